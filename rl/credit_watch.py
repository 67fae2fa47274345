"""Lines that are said once in a run, where credit says nothing or pays for what nobody wants: no probe would see it,
because every number is as the settings have it."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, variance

import torch

from espalier.rl.credit.process_credit import before_last, last_step_share, score_gap
from espalier.rl.types import Estimate, RolloutGroup

log = logging.getLogger("rl")

_FEWEST = 8
"""Fewest responses of a kind whose mean is looked at."""
_UNLIKELY = 0.05
"""Mean probability of the gold answer, where it is about to be written, below which it is written otherwise."""
_LARGE_GAP = 0.25
"""Mean of score minus reward beyond which scores are no values: more than what chance, or a policy that has moved on,
makes of them."""
_SURE = 3.0
"""Standard errors."""
_ENOUGH = 64
"""Rollouts of which a share of variance is taken."""
_HALF = 0.5
"""Of the variance of rewards: what scores leave to the last step beyond it is more than they give all others."""


class Once:
    """Warns at the first call and never again."""

    def __init__(self) -> None:
        self._is_said = False

    def __call__(self, message: str, *values: object) -> None:
        """Say it in one line."""
        if not self._is_said:
            log.warning(message, *values)
        self._is_said = True


@dataclass
class StepWatch:
    """Looks for an estimator of state values that had no state between prompt and end."""

    say: Once = field(default_factory=Once)

    def look(self, estimate: Estimate) -> None:
        """Look at the estimate of an iteration; one without state values says nothing of them."""
        rows = estimate.state_values
        if len(rows) >= _FEWEST and all(len(row) <= 2 for row in rows):
            self.say("no rollout has a state between its prompt and its end, so that all its tokens get one credit, as "
                     "without states: set task.steps (of advantage=spo advantage.cut_points_per_segment=1), or choose "
                     "advantage=grpo")  # fmt: skip


@dataclass
class CutWatch:
    """Looks for a reward that pays for not ending: a response that did not end by itself, and is not right, for more
    than a wrong one that did."""

    say: Once = field(default_factory=Once)

    def look(self, groups: Sequence[RolloutGroup]) -> None:
        """Look at the scored rollouts of an iteration."""
        both = [(rollout.trajectory, score.total) for group in groups
                for rollout, score in zip(group.rollouts, group.scores, strict=True)]  # fmt: skip
        cut = [reward for row, reward in both if row.finish_reason != "stop" and not row.is_correct]
        wrong = [reward for row, reward in both if row.finish_reason == "stop" and not row.is_correct]
        if min(len(cut), len(wrong)) < _FEWEST:
            return
        gap, error = fmean(cut) - fmean(wrong), math.sqrt(variance(cut) / len(cut) + variance(wrong) / len(wrong))
        if gap > max(1e-6, _SURE * error):
            self.say("wrong responses that did not end by themselves get %.3g in the mean, those that did %.3g: the "
                     "policy is paid for not ending: set reward.non_stop_reward (of a composed reward as "
                     "reward=process) to what the worst answer gets, or lower", fmean(cut), fmean(wrong))  # fmt: skip


@dataclass
class ScaleWatch:
    """Looks for scores of a process reward model that are read as values (`advantage.form=value`) and are none: on
    another scale, or so far from what comes that the last step is credited with most of it."""

    say: Once = field(default_factory=Once)
    say_share: Once = field(default_factory=Once)
    _last: list[tuple[float, float]] = field(default_factory=list)

    def look(self, scores: Sequence[Sequence[float]], rewards: Sequence[float]) -> None:
        """`scores[n]` are those of the steps of rollout n."""
        gap, last = score_gap(scores, rewards), before_last(scores, rewards)
        if len(last) >= _FEWEST and abs(gap) > _LARGE_GAP:
            self.say("advantage.form=value takes scores for chances of success, and those of inner states are %.2f %s "
                     "the rewards that came, in the mean: the last step pays the difference: set "
                     "advantage.form=progress, or name a reward model that was trained on values of this policy",
                     abs(gap), "above" if gap > 0 else "below")  # fmt: skip
        self._last += last
        if len(self._last) < _ENOUGH:
            return
        share, self._last = last_step_share(self._last), []
        if share is not None and share > _HALF:
            self.say_share("advantage.form=value credits the last step with what scores did not see coming, whatever "
                           "it did, and that is %.0f %% of the variance of rewards: a policy learns from it to please "
                           "the model: set advantage.form=progress, which keeps the outcome for every step, or name a "
                           "reward model that knows more", 100 * share)  # fmt: skip


@dataclass
class LambdaWatch:
    """Looks for a lambda by length that is 0, because responses are too short for it."""

    length_alpha: float
    say: Once = field(default_factory=Once)

    def look(self, lam: float | torch.Tensor) -> float:
        """Return the mean of lambda over rollouts, `lam` [N, T]; where it is 0 nothing behind the next token counts."""
        rows = torch.as_tensor(lam).reshape(-1, 1) if isinstance(lam, float) else lam
        if float((rows[:, 0] <= 0).float().mean()) > 0.5:
            self.say("advantage.length_alpha=%g gives lambda 0 to responses of at most %d tokens, which most are here, "
                     "so that a token is credited with the critic's next value alone: raise it, or set it to 0",
                     self.length_alpha, int(1 / self.length_alpha))  # fmt: skip
        return float(rows[:, 0].mean())


@dataclass
class TemplateWatch:
    """Looks for a policy that writes answers in another form than the template's."""

    template: str
    say: Once = field(default_factory=Once)

    def look(self, groups: Sequence[RolloutGroup], values: Sequence[Sequence[float]]) -> None:
        """`values[n]`: probabilities of the gold answer before each step of rollout n. Of right rollouts of several
        steps the last one is high where they were about to write the answer as the template has it."""
        rows = [rollout.trajectory for group in groups for rollout in group.rollouts]
        last = [own[-1] for own, row in zip(values, rows, strict=True)
                if row.is_correct and 1 < len(own) == len(row.steps)]  # fmt: skip
        if len(last) >= _FEWEST and fmean(last) < _UNLIKELY:
            self.say("before the last step of right responses the gold answer in the form %r has a probability of "
                     "%.2g: the policy writes answers in another form, and these values say nothing: set "
                     "advantage.answer_template", self.template, fmean(last))  # fmt: skip
