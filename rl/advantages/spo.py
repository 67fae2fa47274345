"""SPO, segment policy optimisation (Guo et al. 2025): Monte-Carlo credit at improbable tokens. No critic.

Where a sampled token was improbable the policy might have gone another way, so the value of a state changes there and
hardly between. Segments end after cut points of that kind, and only improbable tokens get an advantage (the
probability mask): A_t = V(end of its segment) - V(its start) where p_t < threshold, else 0. The published code leaves
the other tokens out of the loss's mean, too; here the loss is divided by all tokens, so that a step is smaller by their
share, which Adam takes no notice of where no gradient is clipped.
"""

from collections.abc import Sequence
from dataclasses import replace

from espalier.rl.credit.completion_plans import CompletionPlan
from espalier.rl.credit.monte_carlo_credit import MonteCarloCredit
from espalier.rl.credit.state_cutters import ImprobableTokenCutter
from espalier.rl.estimator_context import EstimatorContext
from espalier.rl.types import Estimate, Experience, RolloutGroup


class SPO:
    """`threshold`, `num_segments` and `cut_points_per_segment` are those of `ImprobableTokenCutter`, the other settings
    VinePPO's. With `masks_other_tokens` only improbable tokens get an advantage, else every token of a segment.

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
        threshold: float = 0.9,
        num_segments: int | None = None,
        cut_points_per_segment: int | None = None,
        masks_other_tokens: bool = True,
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
        self.cutter = ImprobableTokenCutter(threshold, num_segments, cut_points_per_segment)
        self.credit = MonteCarloCredit(self.cutter, plan, prompt_value)
        self.smallest_group = self.credit.smallest_group
        self.first_completions = self.credit.first_completions
        self.masks_other_tokens = masks_other_tokens

    def __call__(self, groups: Sequence[RolloutGroup], experience: Experience, context: EstimatorContext) -> Estimate:
        """Give every improbable token, or every token, the advantage of its segment."""
        estimate = self.credit(groups, experience, context)
        if not self.masks_other_tokens:
            return estimate
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        mask = self.cutter.improbable_tokens(rollouts, experience.response_mask)
        return replace(estimate, advantages=estimate.advantages * mask)
