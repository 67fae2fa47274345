"""A process reward model without a head: two policies, and how much likelier one of them is to take each step.

A policy trained by DPO on whole solutions is an implicit process reward model (Rafailov et al. 2024, "From r to Q*";
Yuan et al. 2024, "Free process rewards without process labels"): log pi - log pi_ref, summed over a step's tokens, says
what training has made of the step, whether DPO, KTO, NCA or `implicit_ce` has trained it on outcomes. With l_1 .. l_S
these log-ratios of the steps, the score of step t is sigmoid(slope x + offset), and x is by `how`

- "minimum": of l_1 .. l_t: a solution is as good as its worst step so far;
- "sum": of l_1 .. l_t, the value after the step as published: beta times it is the reward of a solution so far;
- "step": l_t alone, the published process reward of the step;
- "token": the lowest log-ratio of a token of step t;
- "whole": l_1 + .. + l_S at every step, an outcome reward model.

The folder is the trained policy's, with the reference in `reference/` and the numbers in `log_ratio_reward.json`; where
that says `has_reference` false, x is of the policy's log-probs alone (Yuan et al.'s ablation). It is read wherever a
process reward model is (`models.scalar_head.load_process_reward`).
"""

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from espalier.data.records import BadInput
from espalier.data.steps import StepTokens
from espalier.models.load import BadModel, load_policy
from espalier.models.sampled_logprobs import sampled_logprobs

FILE = "log_ratio_reward.json"
REFERENCE = "reference"
HOW: dict[str, Callable[[list[list[float]]], list[float]]] = {
    "minimum": lambda steps: list(accumulate(map(math.fsum, steps), min)),
    "sum": lambda steps: list(accumulate(map(math.fsum, steps))),
    "step": lambda steps: [math.fsum(step) for step in steps],
    "token": lambda steps: [min(step, default=0.0) for step in steps],
    "whole": lambda steps: [math.fsum(value for step in steps for value in step)] * len(steps),
}
"""How log-ratios of the tokens of S steps become the S numbers x."""


@dataclass(frozen=True)
class Scale:
    """How log-ratios of steps become scores."""

    how: str = "minimum"
    slope: float = 1.0
    offset: float = 0.0
    has_reference: bool = True

    def __post_init__(self) -> None:
        if self.how not in HOW:
            raise BadInput(f"log-ratios of steps are joined by one of {', '.join(HOW)}, got '{self.how}'")
        if not (math.isfinite(self.slope) and self.slope > 0 and math.isfinite(self.offset)):
            raise BadInput(f"a score must rise with the log-ratio: the slope must be above 0, got {self.slope}")

    def score(self, ratio: float) -> float:
        """Return the score in (0, 1) of a joined log-ratio in nats; not rounded: far ones would be equal."""
        x = self.slope * ratio + self.offset
        return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def joined_ratios(
    logprobs: Sequence[float], reference: Sequence[float], step_ends: Sequence[int], how: str
) -> list[float]:
    """Return x of the module for every step, in nats, from the log-probs of a response's tokens under both models."""
    ratios = [one - other for one, other in zip(logprobs, reference, strict=True)]
    return HOW[how]([ratios[start:end] for start, end in zip([0, *step_ends], step_ends, strict=False)])


class LogRatioReward(torch.nn.Module):
    """Two causal LMs of one vocabulary; `scale` makes scores of their log-ratios. `reference` None: of the policy's
    log-probs."""

    def __init__(self, policy: Any, reference: Any | None, scale: Scale):
        super().__init__()
        self.policy, self.reference, self.scale = policy, reference, scale

    @property
    def config(self) -> Any:
        """The policy's."""
        return self.policy.config

    def ratios(
        self, rows: Sequence[StepTokens], batch_tokens: int, on_progress: Callable[[int], None] = lambda done: None
    ) -> list[list[float]]:
        """Return the joined log-ratio in nats of every step of every solution; `on_progress` gets the number of
        distinct ones done. Raises BadInput on a row that cannot be read."""
        if self.reference is None:
            own = sampled_logprobs(self.policy, rows, batch_tokens, on_progress)
            other = [[0.0] * len(row) for row in own]
        else:
            own = sampled_logprobs(self.policy, rows, batch_tokens)
            other = sampled_logprobs(self.reference, rows, batch_tokens, on_progress)
        pairs = zip(rows, own, other, strict=True)
        return [joined_ratios(one, base, row.step_ends, self.scale.how) for row, one, base in pairs]

    def scores(
        self, rows: Sequence[StepTokens], batch_tokens: int, on_progress: Callable[[int], None] = lambda done: None
    ) -> list[list[float]]:
        """Return the score in (0, 1) of every step of every solution, as `ratios`."""
        found = self.ratios(rows, batch_tokens, on_progress)
        return [[self.scale.score(ratio) for ratio in row] for row in found]


def is_log_ratio_reward(path: str) -> bool:
    """Say whether a folder is one of this module's."""
    return (Path(path) / FILE).is_file()


def load_log_ratio_reward(path: str, attention: str = "auto") -> LogRatioReward:
    """Return both networks of a folder. Raises BadModel where one is missing or its numbers cannot be read."""
    try:
        scale = Scale(**json.loads((Path(path) / FILE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise BadModel(f"{path}/{FILE} cannot be read ({error}): make the reward model again") from None
    reference = load_policy(f"{path}/{REFERENCE}", attention) if scale.has_reference else None
    return LogRatioReward(load_policy(path, attention), reference, scale)


def write_log_ratio_reward(folder: Path, policy: str, reference: str | None, scale: Scale) -> None:
    """Copy the folders and write the numbers; what says that the policy's folder is complete is not copied."""
    unwanted = shutil.ignore_patterns("manifest.json", FILE, REFERENCE)
    shutil.copytree(policy, folder, ignore=unwanted, dirs_exist_ok=True)
    if reference is not None:
        shutil.copytree(reference, folder / REFERENCE, ignore=unwanted)
    (folder / FILE).write_text(json.dumps(asdict(scale)) + "\n")
