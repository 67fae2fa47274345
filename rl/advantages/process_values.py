"""A process reward model as value: step-level credit without completions and without a critic.

Its score after a step is its estimate of the value of the state the step leads to. In every form the values of a
rollout's states are those of `state_values`: V_0 of the prompt, the scores after all steps but the last, and the reward
itself as V_S. Three forms of what a step is credited with:

- "value": VinePPO's advantage with these values in place of Monte-Carlo ones: V(s_{i+1}) - V(s_i), the value of
  the prompt from the group's rewards, that of the terminal state the reward itself. Scores and rewards must be on
  one scale.
- "progress" (PAV, Setlur et al. 2024, "Rewarding Progress", eq. 5): the rollout's reward above that of the others
  of its group, plus `weight` times the change of the score in the step. The prompt's score is the mean over the
  group of the scores after the first step.
- "minimum" (PURE, Cheng et al. 2025): a step is credited with the lowest score from it on, not with their sum,
  so that one wrong step is not paid for by many idle ones: the rollout's reward above that of the others, plus
  `weight` times (lowest score from here on, minus the mean of the others' lowest scores).
"""

from collections.abc import Sequence
from typing import Any

import torch

from espalier.data.records import BadInput
from espalier.models.scalar_head import load_process_reward
from espalier.rewards.process import score_trajectories
from espalier.rl.advantages.rloo import leave_one_out
from espalier.rl.advantages.steps import fill_values, prompt_values, step_advantages
from espalier.rl.advantages.token_maps import spread_steps, step_ends_of
from espalier.rl.types import Estimate, Experience, Live, RolloutGroup

FORMS = ("value", "progress", "minimum")


def lowest_to_come(scores: Sequence[float]) -> list[float]:
    """For every step the lowest score from it on."""
    found: list[float] = []
    for score in reversed(scores):
        found.append(min(score, found[-1]) if found else score)
    return found[::-1]


def state_values(scores: Sequence[Sequence[float]], rewards: Sequence[float], form: str) -> list[list[float]]:
    """V_0 .. V_S of every rollout of one group; `scores[i]` are those of rollout i after each of its S steps.

    The prompt's value V_0, which no step leads to: in the form "progress" the mean over the group of the scores after
    the first step, else the mean reward of the other rollouts. The terminal value V_S is the rollout's reward. A
    rollout without scores (nothing but an end token) is one step.
    """
    firsts = [row[0] for row in scores if row]
    starts = prompt_values(rewards, "leave_one_out")
    if form == "progress":
        starts = [sum(firsts) / max(1, len(firsts))] * len(rewards)
    return [fill_values([start, *row[:-1]], reward) for start, row, reward in zip(starts, scores, rewards, strict=True)]


def process_advantages(
    scores: Sequence[Sequence[float]], rewards: Sequence[float], form: str, weight: float
) -> list[list[float]]:
    """Advantages of the steps of every rollout of one group; `scores[i]` are those of rollout i after each step.

    A rollout without scores (nothing but an end token) is one step, with the reward's part alone.
    """
    values = state_values(scores, rewards, form)
    if form == "value":
        return [step_advantages(row) for row in values]
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


class ProcessValueAdvantage:
    """`path` is a trained process reward model. `weight` is not read by the form "value".

    Raises BadInput on a form that does not exist.
    """

    needs_critic = False
    reads_token_rewards = False
    samples_more = False
    smallest_group = 2
    has_process_scores = True

    def __init__(
        self, path: str, form: str = "value", weight: float = 1.0, batch_tokens: int = 16384, attention: str = "sdpa"
    ):
        if form not in FORMS:
            raise BadInput(f"advantage.form must be one of {', '.join(FORMS)}, got '{form}'")
        self.model = load_process_reward(path, attention=attention).requires_grad_(False)
        self.form, self.weight, self.batch_tokens = form, weight, batch_tokens

    def to(self, device: torch.device) -> None:
        """Move the network."""
        self.model.to(device)  # type: ignore[arg-type]

    def networks(self) -> dict[str, Any]:
        """The one network."""
        return {"process reward model": self.model}

    def __call__(self, groups: Sequence[RolloutGroup], experience: Experience, live: Live) -> Estimate:
        """Every response token gets the advantage of its step. Raises BadInput where the form "value" meets a reward
        outside 0 to 1."""
        rewards = [reward for group in groups for reward in group.rewards]
        if self.form == "value" and not all(-1e-6 <= reward <= 1 + 1e-6 for reward in rewards):
            raise BadInput(f"advantage.form=value sets process scores from 0 to 1 beside rewards, and these are "
                           f"{min(rewards):g} to {max(rewards):g}: choose advantage.form=progress or minimum, or a "
                           "reward from 0 to 1")  # fmt: skip
        trajectories = [rollout.trajectory for group in groups for rollout in group.rollouts]
        scores = score_trajectories(self.model, trajectories, pad_id=0, batch_tokens=self.batch_tokens)
        rest = iter(scores)
        rows: list[list[float]] = []
        values: list[list[float]] = []
        for group in groups:
            own = [next(rest) for _ in group.rollouts]
            found = state_values(own, group.rewards, self.form)
            has_tokens = [bool(rollout.trajectory.response_ids) for rollout in group.rollouts]
            values += [row if is_one else row[-1:] for row, is_one in zip(found, has_tokens, strict=True)]
            rows += process_advantages(own, group.rewards, self.form, self.weight)
        ends = [step_ends_of(group, index) for group in groups for index in range(len(group.rollouts))]
        every = [score for row in scores for score in row]
        last = [row[-1] for row in scores if row]
        metrics = {
            "step_score": sum(every) / max(1, len(every)),
            "last_score": sum(last) / max(1, len(last)),
        }
        return Estimate(spread_steps(ends, rows, experience.response_mask), metrics=metrics, state_values=values)
