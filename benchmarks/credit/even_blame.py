"""A control beside `first_error`: as little blame, spread evenly, by no model.

`first_error` gives a wrong rollout of S steps about one step's worth of its (negative) advantage A where GRPO gives it
S. Here each of its S steps gets A / S, so that what differs between the two is where the blame lies, and what differs
between this and GRPO is how much of it there is.
"""

from collections.abc import Sequence

from espalier.rl.advantages.grpo import group_advantages
from espalier.rl.credit.token_maps import spread_rollouts
from espalier.rl.estimator_context import EstimatorContext
from espalier.rl.types import Estimate, Experience, RolloutGroup


class EvenBlame:
    """In place of `espalier.rl.advantages.grpo.GRPO`, with its settings."""

    needs_critic = False
    reads_token_rewards = False
    samples_more = False
    smallest_group = 2

    def __init__(self, divide_by_std: bool):
        self.divide_by_std = divide_by_std

    def __call__(self, groups: Sequence[RolloutGroup], experience: Experience, context: EstimatorContext) -> Estimate:
        """Estimate one number per rollout, at all its response tokens."""
        rows = [
            gain if gain >= 0 else gain / max(1, len(rollout.trajectory.steps))
            for group in groups
            for rollout, gain in zip(group.rollouts, group_advantages(group.rewards, self.divide_by_std), strict=True)
        ]
        return Estimate(spread_rollouts(rows, experience.response_mask))
