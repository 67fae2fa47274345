"""Direct preference optimisation (Rafailov et al. 2023) on pairs, whole solutions or from a state.

With d as in `training.objectives.preference` and z = beta * d - target_margin, the loss of a pair is

    -(1 - eps) log sigmoid(z) - eps log sigmoid(-z).

eps = `label_smoothing` > 0 is conservative DPO (Mitchell 2023): a label is wrong with probability eps. A
`target_margin` with means of log-probs and no reference is SimPO (Meng et al. 2024).
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from espalier.training.objectives.preference import PairObjective, PreferenceLogprobs, check_range


def smoothed_sigmoid_losses(margins: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """Return losses [P] of margins z [P]."""
    return -(1 - label_smoothing) * logsigmoid(margins) - label_smoothing * logsigmoid(-margins)


@dataclass
class DirectPreference(PairObjective):
    """DPO, cDPO, and with the common options LN-DPO, RPO and SimPO."""

    label_smoothing: float = 0.0
    target_margin: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("label_smoothing", self.label_smoothing, 0 <= self.label_smoothing < 0.5, "in [0, 0.5)")

    def pair_losses(self, pairs: PreferenceLogprobs) -> torch.Tensor:
        """Return losses [P]."""
        return smoothed_sigmoid_losses(self.beta * pairs.differences - self.target_margin, self.label_smoothing)
