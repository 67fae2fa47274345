"""Robust DPO (Chowdhury et al. 2024): unbiased under labels that are flipped with probability eps.

With z = beta * d as in `training.objectives.preference`, the loss of a pair is

    [-(1 - eps) log sigmoid(z) + eps log sigmoid(-z)] / (1 - 2 eps).

Its mean over flipped labels is the loss of the true ones. It is not bounded below: eps is to be the true rate.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from espalier.training.objectives.preference import PairObjective, PreferenceLogprobs, check_range


@dataclass
class RobustPreference(PairObjective):
    """`flip_rate` is eps."""

    flip_rate: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("flip_rate", self.flip_rate, 0 <= self.flip_rate < 0.5, "in [0, 0.5)")

    def pair_losses(self, pairs: PreferenceLogprobs) -> torch.Tensor:
        """Return losses [P]."""
        margins = self.beta * pairs.differences
        kept, flipped = logsigmoid(margins), logsigmoid(-margins)
        return (-(1 - self.flip_rate) * kept + self.flip_rate * flipped) / (1 - 2 * self.flip_rate)
