"""A control beside `first_error`: little blame, spread evenly, by no model.

`first_error` gives a wrong rollout of S steps A (1 + (S - 1) q_S) of its negative advantage A, one step's worth where
the model is sure of an error (q_S = 0), where GRPO gives it A S. Here each of its S steps gets A / S, one step's worth
in all: what differs from GRPO is how much blame there is, and from `first_error` mostly where it lies.
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
