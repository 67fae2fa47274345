"""Group-relative advantages: a rollout is as good as its reward is above its group's mean. No critic.

GRPO (Shao et al. 2024, "DeepSeekMath", section 4.1.2) divides by the group's standard deviation; Dr. GRPO
(Liu et al. 2025, "Understanding R1-Zero-Like Training", section 3.2) does not, because the division gives
problems that are nearly always or nearly never solved more weight than the rest.

Their different ways to average over tokens are `loss_aggregation`; DAPO's dynamic sampling is
`dynamic_sampling_rounds`.
"""

import math
from collections.abc import Sequence

from espalier.data.records import BadInput
from espalier.rl.credit.token_maps import spread_rollouts
from espalier.rl.estimator_context import EstimatorContext
from espalier.rl.types import SMALLEST_STD, Estimate, Experience, RolloutGroup, sample_std


def group_advantages(rewards: Sequence[float], divide_by_std: bool) -> list[float]:
    """Compute A_i = r_i - mean(r), divided by std(r) (of a sample, G - 1 below) where asked.

    A group whose rewards are all equal (std below 1e-6) teaches nothing: its advantages are exactly 0.
    """
    std, mean = sample_std(rewards), sum(rewards) / len(rewards)
    if std < SMALLEST_STD:
        return [0.0] * len(rewards)
    centred = [reward - mean for reward in rewards]
    return [value / std for value in centred] if divide_by_std else centred


class GRPO:
    """Gives every response token of a rollout the rollout's advantage, times `negative_weight` where that is below 0:
    below 1 the policy is drawn to what is better than the others more than it is pushed off what is worse. Raises
    BadInput on a weight below 0."""

    needs_critic = False
    reads_token_rewards = False
    samples_more = False
    smallest_group = 2

    def __init__(self, divide_by_std: bool, negative_weight: float = 1.0):
        if not 0 <= negative_weight < math.inf:
            raise BadInput(f"advantage.negative_weight must be a number of at least 0, got {negative_weight:g}")
        self.divide_by_std, self.negative_weight = divide_by_std, negative_weight

    def __call__(self, groups: Sequence[RolloutGroup], experience: Experience, context: EstimatorContext) -> Estimate:
        """Estimate one number per rollout, at all its response tokens."""
        rows = [value for group in groups for value in group_advantages(group.rewards, self.divide_by_std)]
        weighted = [value * (self.negative_weight if value < 0 else 1.0) for value in rows]
        return Estimate(spread_rollouts(weighted, experience.response_mask))
