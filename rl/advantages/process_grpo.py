"""GRPO with process supervision (Shao et al. 2024, "DeepSeekMath", section 4.1.3): step rewards, normalised over the
group, summed from each step on. No critic.

With R all step rewards of a group, r~ = (r - mean(R)) / std(R), and the advantage of a token is the sum of r~ over
the steps that end at it or later: its own and those behind. The rewards are the process rewards of the run's reward
(`reward=process_alone`, or `process` with an outcome beside them); the standard deviation is GRPO's here, of a sample
and with 0 for rewards that agree.

An outcome beside them is normalised over the group on its own, as GRPO does, and added to every token: the paper has
rewards by step or by outcome.

Advantages of the steps of a group sum to 0, but what is to come does not: a rollout of many good steps gets more than
one of few.
"""

from collections.abc import Sequence

from espalier.rl.advantages.grpo import group_advantages
from espalier.rl.credit.state_cutters import at_least_one_step
from espalier.rl.credit.step_rewards import step_reward_rows, sums_to_come
from espalier.rl.credit.token_maps import spread_steps
from espalier.rl.estimator_context import EstimatorContext
from espalier.rl.types import Estimate, Experience, RolloutGroup


def credit_by_group(group: RolloutGroup) -> list[list[float]]:
    """Credit the steps of every rollout; one without steps (an end token alone) gets the outcome's part. Raises
    BadInput where a rollout has steps and no process rewards."""
    rows = step_reward_rows(group)
    rest = iter(group_advantages([value for row in rows for value in row] or [0.0], divide_by_std=True))
    outcomes = group_advantages([score.outcome for score in group.scores], divide_by_std=True)
    return [
        [outcome + to_come for to_come in sums_to_come([next(rest) for _ in row])] or [outcome]
        for row, outcome in zip(rows, outcomes, strict=True)
    ]


class ProcessGRPO:
    """Gives every response token the sum of the normalised rewards of its step and those behind."""

    needs_critic = False
    reads_token_rewards = False
    samples_more = False
    smallest_group = 2
    needs_step_rewards = True

    def __call__(self, groups: Sequence[RolloutGroup], experience: Experience, context: EstimatorContext) -> Estimate:
        """Estimate by the scores alone. Raises BadInput where the reward has no process terms."""
        rows = [row for group in groups for row in credit_by_group(group)]
        ends = [at_least_one_step(rollout.trajectory).step_ends for group in groups for rollout in group.rollouts]
        rows = [row[: len(own)] for row, own in zip(rows, ends, strict=True)]  # none for a response without tokens
        return Estimate(spread_steps(ends, rows, experience.response_mask))
