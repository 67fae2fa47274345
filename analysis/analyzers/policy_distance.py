"""How far policies are from where training began: L2 distance of their weights, and KL on their own samples.

KL is k1, the published system's: the sum over a response's tokens of log pi - log pi_start, of responses drawn from pi,
averaged; in nats per response, unbiased, and possibly below 0 on few samples.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from espalier.analysis.analyzers.figure import Panel, write_figure
from espalier.analysis.analyzers.model_folders import check_sampler, check_tokens, paired_tensors, weight_files
from espalier.analysis.analyzers.run_history import named_folders
from espalier.data.batches.packing import pad_rows
from espalier.data.jsonl import read_records
from espalier.data.records import BadInput, Trajectory
from espalier.models.load import load_reference, load_tokenizer
from espalier.models.logprobs import response_logprobs
from espalier.pipeline.evaluation.evaluation_inputs import named_paths
from espalier.pipeline.evaluation.intervals import Interval, resampled_mean
from espalier.pipeline.stage import StageContext
from espalier.runtime.distributed import device


def weight_distance(folder: str, start: str) -> tuple[float, float]:
    """Return (L2 norm of the difference of all weights, that divided by the norm of the start), in float64."""
    square, whole = 0.0, 0.0
    for one, other in paired_tensors(folder, start):
        square += float((one.double() - other.double()).square().sum())
        whole += float(other.double().square().sum())
    return math.sqrt(square), math.sqrt(square / whole) if whole else math.nan


@torch.no_grad()
def response_sums(
    folder: str, trajectories: Sequence[Trajectory], temperature: float, micro_batch_size: int
) -> list[float]:
    """Return the log-prob of every response under the model of a folder."""
    model = load_reference(folder).to(device())  # type: ignore[arg-type]
    pad_id = int(load_tokenizer(folder).pad_token_id)
    sums: list[float] = []
    for first in range(0, len(trajectories), micro_batch_size):
        cut = trajectories[first : first + micro_batch_size]
        rows, starts = [[*t.prompt_ids, *t.response_ids] for t in cut], [len(t.prompt_ids) for t in cut]
        tensors = (tensor.to(device()) for tensor in pad_rows(rows, starts, pad_id))
        ids, attention_mask, response_mask = tensors
        logprobs, _ = response_logprobs(model, ids, attention_mask, temperature, response_mask)
        sums += logprobs.double().sum(-1).tolist()
    return sums


@dataclass(frozen=True)
class MeasurePolicyDistance:
    """The figure stands beside the output, as SVG."""

    start: str
    """the model folder that training began with, or the reference"""
    policies: Any
    """model folders in the order of training: a list, a pattern (RUN/policies/*), or a mapping of names to folders"""
    samples: Any
    """policy → its own samples (Trajectory) at `temperature`, of all or some of the policies; "" measures no KL"""
    temperature: float
    """of the sampler"""
    micro_batch_size: int
    """responses of one pass"""

    finds_inputs: ClassVar[bool] = True

    def inputs(self) -> list[str]:
        """Return all weights and samples."""
        folders = [self.start, *named_folders(self.policies, "stage.policies").values()]
        return [*(file for folder in folders for file in weight_files(folder)), *self._samples().values()]

    def run(self, input_path: str, context: StageContext) -> dict[str, Any]:
        """Return `{"l2", "relative_l2", "kl"}` of each policy, KL with its 95 % interval over problems, None where it
        has no samples. Raises BadInput where folders hold different networks, samples have no token ids, and where they
        are not the policy's at that temperature."""
        folders, samples = named_folders(self.policies, "stage.policies"), self._samples()
        unknown = sorted(samples.keys() - folders.keys())
        if unknown:
            raise BadInput(f"stage.samples: there is no policy '{unknown[0]}': name them as the policies are, "
                           f"{', '.join(folders)}")  # fmt: skip
        figures: dict[str, dict[str, Any]] = {}
        with context.progress("measure", len(folders), "model") as progress:
            for done, (name, folder) in enumerate(folders.items(), 1):
                distance, relative = weight_distance(folder, self.start)
                kl = self._kl(folder, samples[name]) if name in samples else None
                figures[name] = {"l2": round(distance, 6), "relative_l2": round(relative, 8), "kl": kl}
                progress.update(done)
        write_figure(context.output, "Distance from the start", _panels(figures))
        context.counts.update(policies=len(figures))
        return {"start": self.start, "policies": figures}

    def _samples(self) -> dict[str, str]:
        if self.samples and not isinstance(self.samples, Mapping):
            raise BadInput(f"stage.samples must map policies to their samples, got {str(self.samples)[:80]!r}")
        return named_paths(self.samples, "stage.samples")

    def _kl(self, folder: str, path: str) -> Interval | None:
        trajectories = read_records(Trajectory, path)
        if not any(row.response_ids for row in trajectories):
            raise BadInput(f"{path}: no sample with token ids: sample from the policy with vLLM")
        check_tokens(folder, trajectories)
        check_sampler(path, folder, self.temperature)
        sums = [response_sums(one, trajectories, self.temperature, self.micro_batch_size)
                for one in (folder, self.start)]  # fmt: skip
        gaps = [own - start for own, start in zip(*sums, strict=True)]
        if not all(map(math.isfinite, gaps)):
            raise BadInput(f"{path}: the log-probs of {folder} are not finite: is it damaged?")
        return resampled_mean([(row.problem_id, gap) for row, gap in zip(trajectories, gaps, strict=True)])


def _panels(figures: Mapping[str, Mapping[str, Any]]) -> list[Panel]:
    rows = list(enumerate(figures.values(), 1))
    kl = [(number, row["kl"]["mean"]) for number, row in rows if row["kl"]]
    return [
        Panel("policy", "L2 distance of the weights", {"weights": [(number, row["l2"]) for number, row in rows]}),
        Panel("policy", "KL from the start, nats per response", {"KL": kl}),
    ]
