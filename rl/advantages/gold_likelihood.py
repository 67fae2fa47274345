"""Values by prefill alone: how likely the policy thinks the right answer, after each step. No critic, nothing sampled.

GRPO-VPS (Wang et al. 2026, arXiv 2604.20659): the gold answer is set behind each state of a rollout, and the policy's
probability of it is the state's value, V(s) = pi(gold | s). One pass of the network before the update reads them all.

`answer_template` says how an answer is announced, "#### {gold}" say: the tokens before the gold answer are given, the
others' probabilities are multiplied; with `counts_end` that of the end token too, without which the answer 1 would be
thought likely where the policy is about to write 12. With `per_token` V is the geometric mean over these tokens in
place of the product: an answer of several tokens is then no less likely for its length. Of several gold answers the
likeliest counts.

What a step is credited with:

- "progress": the rollout's reward above that of the others of its group, plus `weight` times the change of V in the
  step (the paper refines the group's credit by such changes; their exact weight there was not to be read). The last
  step, which writes the answer itself, has no change.
- "value": VinePPO's advantage with these values in place of Monte-Carlo ones, V(s') - V(s), with the reward at the end.

A state that leaves an answer no room below `params.max_tokens` has no value of its own: there, "progress" sees no
change, and "value" goes straight to the reward.

Where the policy announces answers in another form than the template's, every V is next to 0 and says nothing; a warning
says so (rl/credit_watch.py).
"""

import math
from collections.abc import Sequence

from espalier.data.records import BadInput
from espalier.rl.advantages.rloo import leave_one_out
from espalier.rl.credit.answer_tokens import answers_behind_states, check_answer_template
from espalier.rl.credit.process_credit import check_value_scale
from espalier.rl.credit.state_cutters import at_least_one_step
from espalier.rl.credit.step_credit import fill_values, step_advantages
from espalier.rl.credit.token_maps import spread_steps
from espalier.rl.credit_watch import TemplateWatch
from espalier.rl.estimator_context import EstimatorContext
from espalier.rl.types import Estimate, Experience, RolloutGroup

FORMS = ("progress", "value")


class GoldLikelihood:
    """The settings are as the module says. Raises BadInput on a form that does not exist, or a template without
    {gold}."""

    needs_critic = False
    reads_token_rewards = False
    samples_more = False
    smallest_group = 2
    takes_step_rewards = False
    has_process_scores = True

    def __init__(
        self,
        answer_template: str,
        form: str = "progress",
        weight: float = 1.0,
        per_token: bool = False,
        counts_end: bool = True,
    ):
        if form not in FORMS:
            raise BadInput(f"advantage.form must be one of {', '.join(FORMS)}, got '{form}'")
        check_answer_template(answer_template)
        self.answer_template, self.form, self.weight = answer_template, form, weight
        self.per_token, self.counts_end = per_token, counts_end
        self.watch = TemplateWatch(answer_template)

    def __call__(self, groups: Sequence[RolloutGroup], experience: Experience, context: EstimatorContext) -> Estimate:
        """Give every response token the advantage of its step; all ranks compute the likelihoods.

        Raises BadInput where the reward has process terms, a problem has no gold answer, or the form "value" meets a
        reward outside 0 to 1.
        """
        if any(score.steps for group in groups for score in group.scores):
            raise BadInput("the likelihood of an answer values whole responses: choose a reward without process terms")
        if self.form == "value":
            check_value_scale([reward for group in groups for reward in group.rewards])
        known = self.state_values(groups, context)
        rewards = [reward for group in groups for reward in group.rewards]
        above = [gain for group in groups for gain in leave_one_out(group.rewards)]
        ends = [at_least_one_step(rollout.trajectory).step_ends for group in groups for rollout in group.rollouts]
        rows: list[list[float]] = []
        values: list[list[float]] = []
        for own, gain, reward, cut in zip(known, above, rewards, ends, strict=True):
            along: list[float | None] = [*own, *[None] * (len(cut) - len(own))]
            values.append(fill_values(along, reward))
            if self.form == "value":
                rows.append(step_advantages(values[-1]))
            else:
                changes = step_advantages(fill_values(along, own[-1] if own else 0.0))
                rows.append([gain + self.weight * change for change in changes])
        self.watch.look(groups, known)
        every = [value for row in known for value in row]
        metrics = {"gold_likelihood": sum(every) / max(1, len(every))}
        return Estimate(spread_steps(ends, rows, experience.response_mask), metrics=metrics, state_values=values)

    def state_values(self, groups: Sequence[RolloutGroup], context: EstimatorContext) -> list[list[float]]:
        """Read V of the states before each step of every rollout, as long as they leave room for an answer."""
        asked = [answers_behind_states(group, self.answer_template, context, self.counts_end) for group in groups]
        numbers = [number for own in asked for number in own.numbers]
        counted = [rest for own in asked for rest in own.counted]
        sums = context.continuation_logprobs([state for own in asked for state in own.prefixes], counted)
        lengths = [len(rest) if self.per_token else 1 for rest in counted]
        likelihoods = iter([math.exp(total / length) for total, length in zip(sums, lengths, strict=True)])
        return [
            [max(next(likelihoods) for _ in range(num_answers)) for _ in range(num_states)]
            for num_states, num_answers in numbers
        ]
