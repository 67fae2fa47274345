"""PRIME (Cui et al. 2025, "Process Reinforcement through Implicit Rewards", arXiv 2502.01456): RLOO with a reward of
every token, by an implicit reward model that is trained along (`rl.implicit_reward`). No critic.

With r_s the reward of unit s of rollout i (a token, a step, or the whole response), r'_j the mean of the units of
another rollout j of its problem, and o the outcomes,

    A_t = process_weight * sum over s >= t of gamma^(s - t) [r_s - mean of the others' r'_j]
          + outcome_weight * (o_i - mean of the others' o_j),

s - t counted in tokens; the outcome is not discounted. `bounds_returns` divides all process rewards first by the
largest absolute sum from any token on, over the whole iteration, so that such sums lie within [-1, 1] whatever beta is.
The sum of both parts is whitened as the paper does by `update.whitening=standard`.

The paper's published code takes r_s n / (n - 1) - (sum of all r'_j) / (n - 1): this rollout's own mean is not in that
sum here. Every unit is counted, the last one too.
"""

from collections.abc import Sequence

import torch

from espalier.data.records import BadInput
from espalier.rl.advantages.rloo import leave_one_out
from espalier.rl.credit.state_cutters import at_least_one_step
from espalier.rl.credit.token_maps import rewards_to_go, spread_rollouts, total_rewards
from espalier.rl.estimator_context import EstimatorContext
from espalier.rl.types import Estimate, Experience, RolloutGroup

GRANULARITIES = ("token", "step", "whole")
_SMALLEST = 1e-6


def unit_rewards(
    rewards: torch.Tensor, mask: torch.Tensor, ends: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum rewards of tokens [N, T] over units that end behind `ends[n]` response tokens: (the sums, each at the last
    token of its unit, [N, T] in float64; where units end, [N, T])."""
    sums, is_end = torch.zeros(rewards.shape, dtype=torch.float64), torch.zeros_like(mask)
    for row, own in enumerate(ends):
        positions = mask[row].nonzero().squeeze(1)
        if own:
            so_far = rewards[row, positions].double().cumsum(0)[torch.tensor(own) - 1]
            last = positions[torch.tensor(own) - 1]
            sums[row, last] = so_far.diff(prepend=so_far.new_zeros(1))
            is_end[row, last] = True
    return sums, is_end


def against_others(rewards: torch.Tensor, is_unit: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Take the mean of the other rollouts' mean units off every unit [N, T]; `sizes`: rollouts of each problem. A
    rollout without units has the mean 0."""
    means = (rewards * is_unit).sum(-1) / is_unit.sum(-1).clamp(min=1)
    parts = [(own.sum() - own) / (len(own) - 1) for own in means.split(list(sizes))]
    return (rewards - torch.cat(parts)[:, None]) * is_unit


class PRIME:
    """Gives every response token the units that end at it or later, and the outcome. Raises BadInput on settings that
    do not exist."""

    needs_critic = False
    reads_token_rewards = True
    samples_more = False
    smallest_group = 2
    needs_implicit_rewards = True

    def __init__(
        self,
        process_weight: float = 1.0,
        outcome_weight: float = 1.0,
        gamma: float = 1.0,
        granularity: str = "token",
        bounds_returns: bool = True,
    ):
        if granularity not in GRANULARITIES:
            raise BadInput(f"advantage.granularity must be one of {', '.join(GRANULARITIES)}, got '{granularity}'")
        if not 0 < gamma <= 1:
            raise BadInput(f"advantage.gamma must be above 0 and at most 1, got {gamma:g}")
        self.process_weight, self.outcome_weight, self.gamma = process_weight, outcome_weight, gamma
        self.granularity, self.bounds_returns = granularity, bounds_returns

    def __call__(self, groups: Sequence[RolloutGroup], experience: Experience, context: EstimatorContext) -> Estimate:
        """Estimate by the implicit rewards and the outcomes, with a KL penalty where it is part of the reward."""
        rewards, mask = experience.implicit_rewards, experience.response_mask
        assert rewards is not None
        sizes = [len(group.rollouts) for group in groups]
        rewards, is_unit = unit_rewards(rewards, mask, self._ends(groups))
        if self.bounds_returns:
            rewards = rewards / (rewards_to_go(rewards, mask).abs().max() + _SMALLEST)
        process = rewards_to_go(against_others(rewards, is_unit, sizes), mask, self.gamma)
        totals = iter(total_rewards(experience).tolist())
        outcomes = [value for size in sizes for value in leave_one_out([next(totals) for _ in range(size)])]
        outcome = spread_rollouts(outcomes, mask)
        advantages = self.process_weight * process + self.outcome_weight * outcome
        metrics = {"process_part": float(process[mask].abs().mean()), "outcome_part": float(outcome[mask].abs().mean())}
        return Estimate(advantages * mask, metrics=metrics)

    def _ends(self, groups: Sequence[RolloutGroup]) -> list[list[int]]:
        """List where the units of every rollout end, in response tokens."""
        rows = [at_least_one_step(rollout.trajectory) for group in groups for rollout in group.rollouts]
        if self.granularity == "step":
            return [row.step_ends if row.response_ids else [] for row in rows]
        lengths = [len(row.response_ids) for row in rows]
        if self.granularity == "whole":
            return [[length] if length else [] for length in lengths]
        return [list(range(1, length + 1)) for length in lengths]
