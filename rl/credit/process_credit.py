"""Scores of a process reward model → credit of the steps, in four forms.

In every form the values of a rollout's states are those of `state_values`: V_0 of the prompt, the scores after all
steps but the last, and the reward itself as V_S. What a step is credited with:

- "value": VinePPO's advantage with these values in place of Monte-Carlo ones: V(s_{i+1}) - V(s_i). Scores and rewards
  must be on one scale.
- "progress" (PAV, Setlur et al. 2024, "Rewarding Progress", eq. 5): the rollout's reward above that of the others
  of its group, plus `weight` times the change of the score in the step. The prompt's score is the mean over the
  group of the scores after the first step.
- "minimum" (PURE, Cheng et al. 2025): a step is credited with the lowest score from it on, not with their sum,
  so that one wrong step is not paid for by many idle ones: the rollout's reward above that of the others, plus
  `weight` times (lowest score from here on, minus the mean of the others' lowest scores).
- "first_error": GRPO's advantage A of the rollout; where it is negative, the step at which the scores fall takes it.
  With q_i the lowest score up to step i as a share of the prompt's, at most 1 (q_0 = 1), step i is credited with
  A (q_{i-1} - q_i + q_S): where scores fall to near 0 what comes before is hardly blamed, and a rollout whose steps all
  look right is blamed throughout, as without a model. No step of a rollout with a negative A is paid, whatever its
  score; scores say which of its steps go unblamed, and how many. (CAPO, Xie et al. 2025, too keeps the outcome and
  blames the steps that a critic calls wrong.) A prompt's score below 0.01 tells nothing apart, and all are blamed as
  by GRPO.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from espalier.data.records import BadInput
from espalier.rl.advantages.grpo import group_advantages
from espalier.rl.advantages.rloo import leave_one_out
from espalier.rl.credit.state_cutters import at_least_one_step
from espalier.rl.credit.step_credit import fill_values, prompt_values, step_advantages
from espalier.rl.credit.token_maps import spread_steps
from espalier.rl.types import Estimate, RolloutGroup

_SMALLEST_START = 0.01
FORMS = ("value", "progress", "minimum", "first_error")


def check_value_scale(rewards: Sequence[float]) -> None:
    """Raise BadInput unless all rewards are from 0 to 1, as values are that the form "value" sets beside them."""
    if not all(-1e-6 <= reward <= 1 + 1e-6 for reward in rewards):
        raise BadInput(f"advantage.form=value sets process scores from 0 to 1 beside rewards, and these are "
                       f"{min(rewards):g} to {max(rewards):g}: choose another advantage.form, progress say, or a "
                       "reward from 0 to 1")  # fmt: skip


def score_gap(scores: Sequence[Sequence[float]], rewards: Sequence[float]) -> float:
    """Return how far the scores of inner states are above the rewards of the rollouts that passed them, in the mean.

    A rollout's reward is a sample of the value of every state that it passed, so that of values this is 0 but for
    chance. 0 where there is no inner state.
    """
    gaps = [score - reward for row, reward in zip(scores, rewards, strict=True) for score in row[:-1]]
    return sum(gaps) / max(1, len(gaps))


def before_last(scores: Sequence[Sequence[float]], rewards: Sequence[float]) -> list[tuple[float, float]]:
    """Return (score of the state before the last step, reward) of the rollouts that have an inner state."""
    return [(row[-2], reward) for row, reward in zip(scores, rewards, strict=True) if len(row) > 1]


def last_step_share(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return what scores before the last step leave to it: the mean square of reward - score as a share of the variance
    of rewards, for pairs of `before_last`. Of values it is 1 less the share of variance that they explain, 0 where the
    last step decides nothing, and 1 for one value that is every state's. None where all rewards are equal."""
    mean = sum(reward for _, reward in pairs) / max(1, len(pairs))
    spread = sum((reward - mean) ** 2 for _, reward in pairs)
    return sum((reward - score) ** 2 for score, reward in pairs) / spread if spread > 0 else None


def lowest_to_come(scores: Sequence[float]) -> list[float]:
    """Find for every step the lowest score from it on."""
    found: list[float] = []
    for score in reversed(scores):
        found.append(min(score, found[-1]) if found else score)
    return found[::-1]


def lowest_shares(scores: Sequence[float], start: float) -> list[float]:
    """List q_0 .. q_S of the form "first_error" for the scores of S steps; `start` is the prompt's score."""
    if start < _SMALLEST_START:
        return [1.0] * (len(scores) + 1)
    return [1.0, *accumulate((min(1.0, score / start) for score in scores), min)]


def blame_first_error(scores: Sequence[float], start: float, advantage: float) -> list[float]:
    """Credit the steps of a rollout by the form "first_error"; `start` is the prompt's score. One that has no steps is
    one step."""
    if advantage >= 0 or not scores:
        return [advantage] * max(1, len(scores))
    shares = lowest_shares(scores, start)
    return [advantage * (before - after + shares[-1]) for before, after in pairwise(shares)]


def state_values(scores: Sequence[Sequence[float]], rewards: Sequence[float], form: str) -> list[list[float]]:
    """Return value the states of every rollout of one group, V_0 .. V_S.

    `scores[i]` are those of rollout i after each of its S steps. The prompt's value V_0, which no step leads to, is in
    the forms "progress" and "first_error" the mean over the group of the scores after the first step, else the mean
    reward of the other rollouts. The terminal value V_S is the rollout's reward. A rollout without scores (nothing but
    an end token) is one step.
    """
    firsts = [row[0] for row in scores if row]
    starts = prompt_values(rewards, "leave_one_out")
    if form in ("progress", "first_error"):
        starts = [sum(firsts) / max(1, len(firsts))] * len(rewards)
    return [fill_values([start, *row[:-1]], reward) for start, row, reward in zip(starts, scores, rewards, strict=True)]


def process_advantages(
    scores: Sequence[Sequence[float]], rewards: Sequence[float], form: str, weight: float
) -> list[list[float]]:
    """Credit the steps of every rollout of one group; `scores[i]` are those of rollout i after each step.

    A rollout without scores (nothing but an end token) is one step, with the reward's part alone.
    """
    values = state_values(scores, rewards, form)
    if form == "value":
        return [step_advantages(row) for row in values]
    if form == "first_error":
        gains = group_advantages(rewards, divide_by_std=True)
        return [blame_first_error(row, own[0], gain) for row, own, gain in zip(scores, values, gains, strict=True)]
    above = leave_one_out(rewards)
    if form == "progress":
        return [
            [gain + weight * change for change in step_advantages([own[0], *row])] or [gain]
            for row, own, gain in zip(scores, values, above, strict=True)
        ]
    lowest = [min(row, default=0.0) for row in scores]
    return [
        [gain + weight * (low - (sum(lowest) - own) / (len(lowest) - 1)) for low in lowest_to_come(row)] or [gain]
        for row, gain, own in zip(scores, above, lowest, strict=True)
    ]


def credit_rollouts(
    groups: Sequence[RolloutGroup],
    scores: Sequence[Sequence[float]],
    form: str,
    weight: float,
    response_mask: torch.Tensor,
) -> Estimate:
    """Give every response token the advantage of its step, and value the states; `scores[n]` are those of rollout n
    after each step.

    Raises BadInput where the form "value" meets a reward outside 0 to 1.
    """
    if form == "value":
        check_value_scale([reward for group in groups for reward in group.rewards])
    rest = iter(scores)
    rows: list[list[float]] = []
    values: list[list[float]] = []
    for group in groups:
        own = [next(rest) for _ in group.rollouts]
        found = state_values(own, group.rewards, form)
        has_tokens = [bool(rollout.trajectory.response_ids) for rollout in group.rollouts]
        values += [row if is_one else row[-1:] for row, is_one in zip(found, has_tokens, strict=True)]
        rows += process_advantages(own, group.rewards, form, weight)
    ends = [at_least_one_step(rollout.trajectory).step_ends for group in groups for rollout in group.rollouts]
    return Estimate(spread_steps(ends, rows, response_mask), state_values=values)
