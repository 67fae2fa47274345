"""DPO-positive (Pal et al. 2024): chosen solutions may not become less likely than under the reference.

With d, lp and ref as in `training.objectives.preference`, and the penalty inside beta and inside the sigmoid,

    z = beta * (d - lambda * max(0, ref(chosen) - lp(chosen))),
    loss of a pair = -(1 - eps) log sigmoid(z) - eps log sigmoid(-z).

VinePPO's baselines (Kazemnejad et al. 2024) use lambda 50, eps 0, beta 0.1 (MATH) and 0.3 (GSM8K).
"""

from dataclasses import dataclass

import torch

from espalier.data.records import BadInput
from espalier.training.objectives.dpo import smoothed_sigmoid_losses
from espalier.training.objectives.objective import Metrics, sum_and_count
from espalier.training.objectives.preference import PairObjective, PreferenceLogprobs, check_range


def positive_penalties(pairs: PreferenceLogprobs) -> torch.Tensor:
    """Return max(0, ref(chosen) - lp(chosen)) [P]; its slope at 0 is 0."""
    return torch.relu(pairs.reference_chosen - pairs.chosen)


@dataclass
class PositivePreference(PairObjective):
    """`penalty` is lambda. It needs a reference."""

    penalty: float = 50.0
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("penalty", self.penalty, self.penalty >= 0, "at least 0")
        check_range("label_smoothing", self.label_smoothing, 0 <= self.label_smoothing < 0.5, "in [0, 0.5)")
        if self.reference is None:
            raise BadInput("DPO-positive compares with a reference: set objective.reference")

    def pair_losses(self, pairs: PreferenceLogprobs) -> torch.Tensor:
        """Return losses [P]."""
        margins = self.beta * (pairs.differences - self.penalty * positive_penalties(pairs))
        return smoothed_sigmoid_losses(margins, self.label_smoothing)

    def pair_metrics(self, pairs: PreferenceLogprobs) -> Metrics:
        """Return how far chosen solutions have sunk below the reference, in nats."""
        return {"sunk": sum_and_count(positive_penalties(pairs))}
