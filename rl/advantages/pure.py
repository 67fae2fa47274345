"""PURE in full (Cheng et al. 2025, "Stop Summation", arXiv 2504.15275): min-form credit with a baseline per token. No
critic.

The reward makes the min form: `reward.form=minimum` multiplies the score r_j of each step by its weight
softmax(-r / `reward.temperature`), so that what is to come sums to nearly the lowest score up to the step that has it,
and to nearly 0 behind it (rewards/process.py). Such rewards r*_j are what this reads:

    A(step i) = sum over j >= i of (r*_j - b n_j) + outcome - mean outcome of the others

with n_j the tokens of step j, and b the reward per token of the others of the group: the sum of all their r* over the
number of all their tokens. With a baseline per *step* a response pays for every step it makes, and policies learnt to
make fewer, longer ones, down to one or none; per token it makes no difference where a response is cut. All of it as in
the code published with the paper.
"""

from collections.abc import Sequence

from espalier.rl.advantages.rloo import leave_one_out
from espalier.rl.credit.state_cutters import at_least_one_step
from espalier.rl.credit.step_rewards import step_reward_rows, sums_to_come
from espalier.rl.credit.token_maps import spread_steps
from espalier.rl.estimator_context import EstimatorContext
from espalier.rl.types import Estimate, Experience, RolloutGroup


def rewards_per_token(rewards: Sequence[Sequence[float]], num_tokens: Sequence[int]) -> list[float]:
    """Divide, for every rollout of a group, the rewards of the others by their tokens; 0 where they have none."""
    total, tokens = sum(map(sum, rewards)), sum(num_tokens)
    return [
        (total - sum(own)) / (tokens - size) if tokens > size else 0.0
        for own, size in zip(rewards, num_tokens, strict=True)
    ]


class PURE:
    """Reads process rewards of the form "minimum", and an outcome where the reward has one."""

    needs_critic = False
    reads_token_rewards = False
    samples_more = False
    smallest_group = 2
    needs_step_rewards = True
    reward_form = "minimum"

    def __call__(self, groups: Sequence[RolloutGroup], experience: Experience, context: EstimatorContext) -> Estimate:
        """Give every response token the advantage of its step. Raises BadInput where the reward has no process
        terms."""
        ends: list[list[int]] = []
        rows: list[list[float]] = []
        for group in groups:
            rewards = step_reward_rows(group)
            cuts = [at_least_one_step(rollout.trajectory).step_ends for rollout in group.rollouts]
            baselines = rewards_per_token(rewards, [len(rollout.trajectory.response_ids) for rollout in group.rollouts])
            above = leave_one_out([score.outcome for score in group.scores])
            for own, cut, baseline, gain in zip(rewards, cuts, baselines, above, strict=True):
                lengths = [end - start for start, end in zip([0, *cut], cut, strict=False)]
                step_rewards = own or [0.0] * len(cut)  # an end token alone has no score
                paid = [value - baseline * size for value, size in zip(step_rewards, lengths, strict=True)]
                rows.append([gain + to_come for to_come in sums_to_come(paid)])
            ends += cuts
        return Estimate(spread_steps(ends, rows, experience.response_mask))
