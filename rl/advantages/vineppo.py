"""VinePPO (Kazemnejad et al. 2024): Monte-Carlo credit at step ends. No critic.

States are cut at step ends in token space: the prompt, and the prompt with the first i steps, i < S. The value of a
state is the mean reward of K completions sampled from it, V(s_i) = sum_k R(completion k of s_i) / K; a step is worth
the change in value it makes, A(step i) = V(s_i) - V(s_{i-1}), with V(s_S) = R.
"""

from collections.abc import Sequence

from espalier.rl.credit.completion_plans import CompletionPlan
from espalier.rl.credit.monte_carlo_credit import MonteCarloCredit
from espalier.rl.credit.state_cutters import cut_at_step_ends
from espalier.rl.estimator_context import EstimatorContext
from espalier.rl.types import Estimate, Experience, RolloutGroup


class VinePPO:
    """The settings are those of `CompletionPlan`; for `prompt_value` see `MonteCarloCredit`.

    Raises BadInput on settings out of range.
    """

    needs_critic = False
    reads_token_rewards = False
    samples_more = True
    takes_step_rewards = False

    def __init__(
        self,
        completions_per_state: int,
        prompt_value: str = "group",
        max_step: int | None = None,
        budget: str = "remaining",
        completes_agreeing_groups: bool = True,
        max_completions: int = 0,
        round_completions: int = 4,
        max_width: float = 0.3,
    ):
        plan = CompletionPlan(
            completions_per_state=completions_per_state,
            max_step=max_step,
            budget=budget,
            completes_agreeing_groups=completes_agreeing_groups,
            max_completions=max_completions,
            round_completions=round_completions,
            max_width=max_width,
        )
        self.credit = MonteCarloCredit(cut_at_step_ends, plan, prompt_value)
        self.smallest_group = self.credit.smallest_group
        self.first_completions = self.credit.first_completions

    def __call__(self, groups: Sequence[RolloutGroup], experience: Experience, context: EstimatorContext) -> Estimate:
        """Give every response token the advantage of its step."""
        return self.credit(groups, experience, context)
