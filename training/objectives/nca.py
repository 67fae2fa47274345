"""Noise contrastive alignment on pairs (Chen et al. 2024, "Noise Contrastive Alignment", arXiv 2402.05369, pair form):
rewards are absolute, so that the chosen side is kept likely while the margin grows.

With s = beta * (lp - ref) of a side, the loss of a pair is

    -log sigmoid(s_chosen) - 1/2 [log sigmoid(-s_chosen) + log sigmoid(-s_rejected)].
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from espalier.training.objectives.objective import Metrics, sum_and_count
from espalier.training.objectives.preference import PairObjective, PreferenceLogprobs


@dataclass
class NoiseContrastive(PairObjective):
    """NCA. Beside the accuracy of margins it logs `sign_accuracy`: chosen sides above 0, rejected ones below."""

    def pair_losses(self, pairs: PreferenceLogprobs) -> torch.Tensor:
        """Return losses [P]."""
        chosen, rejected = self._rewards(pairs)
        return -logsigmoid(chosen) - 0.5 * (logsigmoid(-chosen) + logsigmoid(-rejected))

    def pair_metrics(self, pairs: PreferenceLogprobs) -> Metrics:
        """Return the share of sides whose reward has the right sign."""
        chosen, rejected = self._rewards(pairs)
        return {"sign_accuracy": sum_and_count(torch.cat([chosen > 0, rejected < 0]).float())}

    def _rewards(self, pairs: PreferenceLogprobs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return s [P] of both sides."""
        return (
            self.beta * (pairs.chosen - pairs.reference_chosen),
            self.beta * (pairs.rejected - pairs.reference_rejected),
        )
