"""Hinge loss on pairs (SLiC-HF, Zhao et al. 2023, in the form of Liu et al. 2024): nothing is learnt from a pair
whose margin is at least 1.

With d as in `training.objectives.preference`, the loss of a pair is max(0, 1 - beta d).
"""

from dataclasses import dataclass

import torch

from espalier.training.objectives.objective import Metrics, sum_and_count
from espalier.training.objectives.preference import PairObjective, PreferenceLogprobs


@dataclass
class HingePreference(PairObjective):
    """Also logs the share of pairs that still teach something (`active`)."""

    def pair_losses(self, pairs: PreferenceLogprobs) -> torch.Tensor:
        """Return losses [P]."""
        return torch.relu(1 - self.beta * pairs.differences)

    def pair_metrics(self, pairs: PreferenceLogprobs) -> Metrics:
        """Return the share of pairs with a loss above 0."""
        return {"active": sum_and_count((self.beta * pairs.differences.detach() < 1).float())}
