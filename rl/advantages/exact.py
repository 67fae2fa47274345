"""Exact credit: a step is worth the change of the *true* value it makes. No critic, no samples.

The values are those of the policy before the update, by dynamic programming over its probabilities of decisions
(`values/exact/`), on tasks that can be enumerated. This is what a perfect process reward model would give: the
reference that the other estimators are measured against (`bash scripts/bench.sh credit_oracle`), and an upper bound in
training. The terminal value is the rollout's outcome.
"""

import logging
from collections.abc import Sequence
from functools import partial

from espalier.data.records import BadInput
from espalier.rl.credit.state_cutters import at_least_one_step
from espalier.rl.credit.step_credit import step_advantages
from espalier.rl.credit.token_maps import spread_steps
from espalier.rl.estimator_context import EstimatorContext
from espalier.rl.types import Estimate, Experience, RolloutGroup
from espalier.values.exact.state_values import ExactSettings, enumerable, exact_values

log = logging.getLogger("rl")
# Beyond this total variation between merged prefixes their values are no longer to be called exact.
_MAX_MERGE_ERROR = 0.1


class ExactAdvantage:
    """The settings are those of `ExactSettings`: what share of the policy's ways is not followed. A value is the middle
    of its bounds."""

    needs_critic = False
    reads_token_rewards = False
    samples_more = False
    takes_step_rewards = False
    reads_positions = True
    smallest_group = 1

    def __init__(self, line_mass: float, state_mass: float, max_width: int, merges: bool, merge_pairs: int):
        self.settings = partial(
            ExactSettings,
            line_mass=line_mass,
            state_mass=state_mass,
            max_width=max_width,
            merges=merges,
            merge_pairs=merge_pairs,
        )

    def __call__(self, groups: Sequence[RolloutGroup], experience: Experience, context: EstimatorContext) -> Estimate:
        """Give every response token the advantage of its step; rank 0 alone computes.

        Raises BadInput where the task cannot be enumerated, the reward is not the outcome (1 where right, else 0), or
        sampling has stop strings.
        """
        enumerable(context.sampler.task)
        for group in groups:
            for rollout, score in zip(group.rollouts, group.scores, strict=True):
                if score.steps or score.outcome != float(rollout.trajectory.is_correct):
                    raise BadInput(f"advantage=exact knows the value of a right answer alone, and the reward of "
                                   f"{rollout.trajectory.id} is {score.total:g}: set reward=outcome")  # fmt: skip
        if context.params.stop or context.params.stop_tokens:
            raise BadInput("advantage=exact follows responses to their end token: set params.stop=[] and "
                           "params.stop_tokens=[]")  # fmt: skip
        trajectories = [at_least_one_step(rollout.trajectory) for group in groups for rollout in group.rollouts]
        problems = {group.problem.id: group.problem for group in groups}
        params, sampler = context.params, context.sampler
        settings = self.settings(params.max_tokens, params.temperature)
        found = exact_values(context.policy, sampler.tokenizer, sampler.task, problems, trajectories, settings)
        error = found.merge_error.total_variation
        if error > _MAX_MERGE_ERROR:
            log.warning("advantage=exact: decisions after merged prefixes differ by %.2f (total variation): the "
                        "policy does not go by positions alone: set advantage.merges=false, which merges none",
                        error)  # fmt: skip
        values = [[value.mid for value in row] for row in found.values]
        widths = [value.high - value.low for row in found.values for value in row[:-1]]
        metrics = {
            "num_states": float(found.num_states),
            "bound_width": sum(widths) / max(1, len(widths)),
            "merge_error": error,
            "outside": found.outside,
        }
        steps = [step_advantages(row) for row in values]
        advantages = spread_steps([one.step_ends for one in trajectories], steps, experience.response_mask)
        return Estimate(advantages, metrics=metrics, state_values=values)
