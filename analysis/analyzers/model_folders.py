"""Weights of model folders, as files and tensor by tensor; whether a model may read the solutions of a file."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open

from espalier.data.records import BadInput, StepValues, Trajectory
from espalier.models.load import check_model_folder, load_tokenizer
from espalier.models.tokenizer_checks import check_reads_ids
from espalier.runtime.fingerprints import model_fingerprint, same_weights
from espalier.runtime.stored_provenance import sampled_by


def weight_files(folder: str) -> list[str]:
    """List a model folder's weights. Raises BadModel where it is none, BadInput where they are no safetensors."""
    check_model_folder(folder)
    files = sorted(str(path) for path in Path(folder).glob("*.safetensors"))
    if not files:
        raise BadInput(f"{folder}: its weights are no *.safetensors: save the model again in that format")
    return files


def paired_tensors(folder: str, other: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield every tensor of both folders, one pair at a time. Raises BadInput where they hold different ones."""
    with ExitStack() as stack:
        tables = []
        for path in (folder, other):
            opened = [stack.enter_context(safe_open(file, "pt")) for file in weight_files(path)]
            tables.append({name: file for file in opened for name in file.keys()})  # noqa: SIM118
        one, two = tables
        apart = sorted(one.keys() ^ two.keys())
        if apart:
            raise BadInput(f"{folder} and {other}: only one of them has the tensor {apart[0]}: give two states of one "
                           "network (export adapters merged)")  # fmt: skip
        for name in sorted(one):
            pair = one[name].get_tensor(name), two[name].get_tensor(name)
            if pair[0].shape != pair[1].shape:
                shapes = " and ".join(str(tuple(tensor.shape)) for tensor in pair)
                raise BadInput(f"{folder} and {other}: {name} has the shapes {shapes}: give two states of one network")
            yield pair


def check_tokens(folder: str, rows: Sequence[Trajectory | StepValues]) -> None:
    """Raise BadInput where the first solution with token ids is not its text by the tokenizer of a model folder: its
    numbers would be of other texts."""
    row = next((row for row in rows if row.response_ids), None)
    if row is not None:
        ids, text = (row.prompt_ids, row.response_ids), "".join(row.steps)
        check_reads_ids(load_tokenizer(folder), folder, *ids, text, f"'{row.id}'")


def check_sampler(path: str | Path, folder: str, temperature: float) -> None:
    """Raise BadInput where the provenance of a file of solutions says that another policy than that of the folder
    sampled it, at another temperature than `temperature`, or with unlikely tokens left out (top-p): log-probs would be
    of other responses than that policy's. What does not stand there cannot be asked, and passes."""
    origin = sampled_by(Path(path))
    if origin is None:
        return
    weights = model_fingerprint(folder)
    if origin.weights and weights and not same_weights(origin.weights, weights):
        raise BadInput(f"{path} was sampled by {origin.policy}, and {folder} has other weights: name the samples of "
                       "that policy, or the policy of these samples")  # fmt: skip
    if origin.temperature is not None and abs(origin.temperature - temperature) > 1e-9:
        remedy = f"set stage.temperature={origin.temperature:g}" if origin.temperature > 0 else (
            "name samples that were drawn above 0, greedy ones are no draws")  # fmt: skip
        raise BadInput(f"{path} was sampled at temperature {origin.temperature:g}, and stage.temperature is "
                       f"{temperature:g}: {remedy}")  # fmt: skip
    if origin.top_p not in (None, 1.0):
        raise BadInput(f"{path} was sampled with top_p {origin.top_p:g}, without the policy's less likely tokens: "
                       "sample with params.top_p=1")  # fmt: skip
