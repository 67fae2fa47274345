"""REINFORCE++ (Hu 2025): every token's reward to come, whitened over all tokens of the iteration. No critic.

With `has_group_baseline` the group's mean reward is taken off first (the paper's variant for several rollouts of a
problem), so that whitening compares rollouts within and not between problems.
"""

from collections.abc import Sequence

import torch

from rl.advantages.token_maps import rewards_to_go, spread_rollouts
from rl.losses import whiten
from rl.types import Estimate, Experience, Live, RolloutGroup


class ReinforcePlusPlusAdvantage:
    """`gamma` discounts; a KL penalty placed in the reward counts from each token on, as in the paper."""

    needs_critic = False
    reads_token_rewards = True
    samples_more = False

    def __init__(self, gamma: float = 1.0, has_group_baseline: bool = False):
        self.gamma, self.has_group_baseline = gamma, has_group_baseline
        self.smallest_group = 2 if has_group_baseline else 1

    def __call__(self, groups: Sequence[RolloutGroup], experience: Experience, live: Live) -> Estimate:
        """Whitened rewards to go."""
        assert experience.rewards is not None
        mask = experience.response_mask
        found: torch.Tensor = rewards_to_go(experience.rewards, mask, self.gamma)
        if self.has_group_baseline:
            means = [sum(group.rewards) / len(group.rewards) for group in groups for _ in group.rollouts]
            found = found - spread_rollouts(means, mask)
        return Estimate(whiten(found, mask))
