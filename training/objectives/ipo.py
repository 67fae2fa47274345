"""Identity preference optimisation (Azar et al. 2023): margins are drawn to a target instead of to infinity.

With d as in `training.objectives.preference`, the loss of a pair is (d - 1 / (2 beta))^2. d is of summed log-probs,
as in the paper's formula; `is_length_normalised` takes means, as some implementations do.
"""

from dataclasses import dataclass

import torch

from espalier.training.objectives.preference import PairObjective, PreferenceLogprobs


@dataclass
class IdentityPreference(PairObjective):
    """The larger beta, the smaller the target margin."""

    def pair_losses(self, pairs: PreferenceLogprobs) -> torch.Tensor:
        """Return losses [P]."""
        return (pairs.differences - 1 / (2 * self.beta)) ** 2
