"""REINFORCE++ (Hu 2025): every token's reward to come, whitened over all tokens of the iteration. No critic.

A_t = (G_t - mean of G) / deviation of G, with G_t = sum over u >= t of gamma^(u - t) r_u.

With `has_group_baseline` the group's mean reward is taken off first (the paper's variant for several rollouts of a
problem), so that whitening compares rollouts within and not between problems. With process rewards that is the mean of
what the group's rollouts still had to come at the same token (rl/credit/baselines.py).
"""

from collections.abc import Sequence

import torch

from espalier.data.records import BadInput
from espalier.rl.credit.baselines import expected_to_come, spread_baselines
from espalier.rl.credit.token_maps import rewards_to_go
from espalier.rl.estimator_context import EstimatorContext
from espalier.rl.losses import whiten
from espalier.rl.types import Estimate, Experience, RolloutGroup


class ReinforcePlusPlusAdvantage:
    """`gamma` discounts, the baseline too; a KL penalty placed in the reward counts from each token on, as in the paper
    (the baseline has none of it)."""

    needs_critic = False
    reads_token_rewards = True
    takes_implicit_rewards = True
    samples_more = False

    def __init__(self, gamma: float = 1.0, has_group_baseline: bool = False):
        if not 0 <= gamma <= 1:
            raise BadInput(f"advantage.gamma must be from 0 to 1, got {gamma}")
        self.gamma, self.has_group_baseline = gamma, has_group_baseline
        self.smallest_group = 2 if has_group_baseline else 1

    def __call__(self, groups: Sequence[RolloutGroup], experience: Experience, context: EstimatorContext) -> Estimate:
        """Whiten the rewards to go."""
        mask = experience.response_mask
        return Estimate(whiten(self.before_whitening(groups, experience), mask))

    def before_whitening(self, groups: Sequence[RolloutGroup], experience: Experience) -> torch.Tensor:
        """Compute rewards to go [N, T], above the group's where there is a baseline."""
        assert experience.rewards is not None
        mask = experience.response_mask
        found = rewards_to_go(experience.rewards, mask, self.gamma)
        if not self.has_group_baseline:
            return found
        return found - spread_baselines(expected_to_come(groups, mask.shape[1], self.gamma), groups, mask)
