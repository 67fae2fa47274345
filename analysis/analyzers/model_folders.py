"""Weights of model folders, as files and tensor by tensor."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open

from espalier.data.records import BadInput
from espalier.models.load import check_model_folder


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
