"""RLOO (Ahmadian et al. 2024, "Back to Basics"): the baseline of a rollout is the mean reward of the others.

It is unbiased, unlike a mean that holds the rollout itself; it equals G / (G - 1) times Dr. GRPO's advantage. A KL
penalty placed in the reward counts, as in the paper.
"""

from collections.abc import Sequence

from espalier.rl.credit.token_maps import spread_rollouts, total_rewards
from espalier.rl.estimator_context import EstimatorContext
from espalier.rl.types import Estimate, Experience, RolloutGroup, are_alike


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Compute A_i = r_i - mean of the other rewards; exactly 0 for rewards that are alike. Needs at least 2."""
    if len(rewards) < 2:
        raise ValueError("leave-one-out needs at least 2 rollouts of a problem")
    if are_alike(rewards):
        return [0.0] * len(rewards)
    total = sum(rewards)
    return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]


class RLOO:
    """Gives every response token of a rollout the rollout's advantage."""

    needs_critic = False
    reads_token_rewards = True
    samples_more = False
    smallest_group = 2

    def __call__(self, groups: Sequence[RolloutGroup], experience: Experience, context: EstimatorContext) -> Estimate:
        """Estimate one number per rollout, at all its response tokens."""
        totals = iter(total_rewards(experience).tolist())
        rows = [value for group in groups for value in leave_one_out([next(totals) for _ in group.rollouts])]
        return Estimate(spread_rollouts(rows, experience.response_mask))
