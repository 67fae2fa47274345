"""Monte-Carlo advantages (VinePPO, Kazemnejad et al. 2024): a step is worth the change in value it makes. No critic.

The value of a state is the mean reward of K completions sampled from it, by the policy and the client that drew
the rollouts, graded like any offline completion (values.monte_carlo). States are cut at step ends in token space:
the prompt, and the prompt with the first i steps, i < S; identical states are completed once, whichever rollouts
share them. The terminal value is the rollout's own reward, which enters nowhere else. Completions are not trained
on.

With `cut_points` the steps are segments between improbable tokens instead (segment policy optimisation, SPO, Guo
et al. 2025).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from espalier.data.records import BadInput, Completion, State, Trajectory
from espalier.data.splitters.probability import cut_points_by_probability, is_cut_point
from espalier.rl.advantages.steps import PROMPT_VALUES, fill_values, prompt_values, step_advantages
from espalier.rl.advantages.token_maps import spread_steps
from espalier.rl.types import Estimate, Experience, Live, RolloutGroup
from espalier.sampling.client import SamplingParams
from espalier.values.cut_points import split_at_cut_points
from espalier.values.labels import wilson_interval
from espalier.values.monte_carlo import StateKey, finished, state_key, state_value, states_of


@dataclass(frozen=True)
class CutPoints:
    """`data.splitters.probability.cut_points_by_probability`'s settings. With `masks_other_tokens` only tokens below
    the threshold get an advantage (SPO's probability mask); the loss is divided by all tokens all the same."""

    threshold: float = 0.9
    num_segments: int | None = None
    cut_points_per_segment: int | None = None
    masks_other_tokens: bool = False

    def __post_init__(self) -> None:
        cut_points_by_probability([], self.num_segments, self.threshold, self.cut_points_per_segment)  # refuses


class VinePPO:
    """`completions_per_state` is K. `prompt_value`: "sampled" (K completions, as VinePPO), or free from the group's
    own rewards ("group", "leave_one_out"). States after more than `max_step` steps are not completed (null: all
    are). `budget` of a completion: the tokens that "remaining" leaves of the rollout's own max_tokens, or "fresh"
    max_tokens (as VinePPO, whose late states may run longer than a rollout can). Groups whose rewards agree are
    left out, their advantages 0, unless `completes_agreeing_groups`.

    Adaptive K: with `max_completions` above K, states whose 95 % interval (Wilson) is wider than `max_width` get
    `round_completions` more a round, up to about that many; it costs an unbiased mean.
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
        cut_points: CutPoints | None = None,
    ):
        for is_good, need in (
            (completions_per_state >= 1, f"completions_per_state must be at least 1, got {completions_per_state}"),
            (prompt_value in PROMPT_VALUES, f"prompt_value must be one of {', '.join(PROMPT_VALUES)}, got "
                                            f"'{prompt_value}'"),
            (budget in ("remaining", "fresh"), f"budget must be remaining or fresh, got '{budget}'"),
            (max_step is None or max_step >= 0, f"max_step must be at least 0 or null, got {max_step}"),
            (max_completions == 0 or max_completions > completions_per_state, f"max_completions must be 0 or above "
                f"completions_per_state ({completions_per_state}), got {max_completions}: no state would get more"),
            (round_completions >= 1, f"round_completions must be at least 1, got {round_completions}"),
        ):  # fmt: skip
            if not is_good:
                raise BadInput(f"advantage.{need}")
        self.completions_per_state, self.prompt_value, self.max_step = completions_per_state, prompt_value, max_step
        self.budget, self.completes_agreeing_groups = budget, completes_agreeing_groups
        self.max_completions, self.round_completions, self.max_width = max_completions, round_completions, max_width
        self.cut_points = cut_points
        self.smallest_group = 1 if prompt_value == "sampled" else 2

    def __call__(self, groups: Sequence[RolloutGroup], experience: Experience, live: Live) -> Estimate:
        """Every response token gets the advantage of its step."""
        if any(score.steps for group in groups for score in group.scores):
            raise BadInput("Monte-Carlo values are of whole responses: choose a reward without process terms")
        split = [[self._split(group, index, live) for index in range(len(group.rollouts))] for group in groups]
        states = self._states(groups, split)
        completions = self._complete(list(states.values()), live)
        values = _mean_rewards(states, completions, live)
        rows: list[list[float]] = []
        for group, trajectories in zip(groups, split, strict=True):
            free = prompt_values(group.rewards, "group" if self.prompt_value == "sampled" else self.prompt_value)
            for trajectory, reward, prompt in zip(trajectories, group.rewards, free, strict=True):
                rows.append(self._values(trajectory, reward, prompt, values))
        ends = [trajectory.step_ends for trajectories in split for trajectory in trajectories]
        advantages = spread_steps(ends, [step_advantages(row) for row in rows], experience.response_mask)
        if self.cut_points and self.cut_points.masks_other_tokens:
            advantages = advantages * self._cut_mask(groups, experience)
        return Estimate(advantages, metrics=_describe(split, states, completions, values), state_values=rows)

    def _split(self, group: RolloutGroup, index: int, live: Live) -> Trajectory:
        """The rollout's trajectory with the steps that are valued; one without steps (an end token alone) has one."""
        rollout = group.rollouts[index]
        trajectory = rollout.trajectory
        if self.cut_points and trajectory.response_ids:
            cut = self.cut_points
            trajectory = split_at_cut_points(
                trajectory,
                [min(0.0, value) for value in rollout.logprobs],
                live.decode,
                threshold=cut.threshold,
                num_segments=cut.num_segments,
                cut_points_per_segment=cut.cut_points_per_segment,
            )
        if not trajectory.steps and trajectory.response_ids:
            return replace(trajectory, steps=[trajectory.response], step_ends=[len(trajectory.response_ids)])
        return trajectory

    def _states(self, groups: Sequence[RolloutGroup], split: Sequence[Sequence[Trajectory]]) -> dict[StateKey, State]:
        """The distinct states to complete."""
        first = 0 if self.prompt_value == "sampled" else 1
        found: dict[StateKey, State] = {}
        for group, trajectories in zip(groups, split, strict=True):
            if not self.completes_agreeing_groups and len(set(group.rewards)) == 1:
                continue
            for trajectory in trajectories:
                for state in states_of(trajectory, first):
                    if self.max_step is None or state.step <= self.max_step:
                        found.setdefault(state_key(state.problem_id, state.prefix_ids), state)
        return found

    def _complete(self, states: Sequence[State], live: Live) -> dict[str, list[Completion]]:
        """State id → its completions, in rounds where K is adaptive."""
        found: dict[str, list[Completion]] = {state.id: [] for state in states}
        asked, number, round_number = list(states), self.completions_per_state, 0
        while asked:
            params = [self._params(state, number, live.params) for state in asked]
            for state, more in zip(asked, live.complete(asked, params, round_number), strict=True):
                found[state.id] += more
            asked = [state for state in states if self._is_open(found[state.id])]
            number, round_number = self.round_completions, round_number + 1
        return found

    def _is_open(self, completions: Sequence[Completion]) -> bool:
        if len(completions) >= self.max_completions:
            return False
        low, high = wilson_interval(sum(completion.is_correct for completion in completions), len(completions))
        return high - low > self.max_width

    def _params(self, state: State, number: int, params: SamplingParams) -> SamplingParams:
        spent = len(state.prefix_ids) if self.budget == "remaining" else 0
        return replace(params, n=number, return_logprobs=False, max_tokens=max(1, params.max_tokens - spent))

    def _values(
        self, trajectory: Trajectory, reward: float, prompt: float, values: Mapping[StateKey, float]
    ) -> list[float]:
        """V_0 .. V_S of a rollout."""
        found: list[float | None] = [
            values.get(state_key(trajectory.problem_id, trajectory.response_ids[:end]))
            for end in [0, *trajectory.step_ends[:-1]][: len(trajectory.steps)]
        ]
        if found and found[0] is None:
            found[0] = prompt
        return fill_values(found, reward)

    def _cut_mask(self, groups: Sequence[RolloutGroup], experience: Experience) -> torch.Tensor:
        """[N, T] bool: tokens drawn with a probability below the threshold."""
        assert self.cut_points is not None
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        flat = [min(0.0, value) for rollout in rollouts for value in rollout.logprobs]
        mask = experience.response_mask.clone()
        mask[experience.response_mask] = torch.tensor(is_cut_point(flat, self.cut_points.threshold), dtype=torch.bool)
        return mask


def _mean_rewards(
    states: Mapping[StateKey, State], completions: Mapping[str, Sequence[Completion]], live: Live
) -> dict[StateKey, float]:
    """The mean reward of every state's completions, each scored together with its state as one response."""
    whole = [finished(state, completion) for state in states.values() for completion in completions[state.id]]
    rewards = iter(live.score(whole)) if whole else iter(())
    found = {}
    for key, state in states.items():
        found[key] = state_value([next(rewards).total for _ in completions[state.id]]).value
    return found


def _describe(
    split: Sequence[Sequence[Trajectory]],
    states: Mapping[StateKey, State],
    completions: Mapping[str, Sequence[Completion]],
    values: Mapping[StateKey, float],
) -> dict[str, float]:
    """Means over the completed states: their value, the share without spread, completions and tokens they cost."""
    rows = [completion for sampled in completions.values() for completion in sampled]
    num, steps = max(1, len(states)), [len(trajectory.steps) for trajectories in split for trajectory in trajectories]
    shares = [{completion.is_correct for completion in sampled} for sampled in completions.values()]
    return {
        "num_steps": sum(steps) / max(1, len(steps)),
        "num_states": float(len(states)),
        "num_completions": float(len(rows)),
        "completions_per_state": len(rows) / num,
        "completion_tokens": float(sum(len(completion.response_ids) for completion in rows)),
        "completions_truncated": sum(row.finish_reason == "length" for row in rows) / max(1, len(rows)),
        "state_value": sum(values.values()) / num,
        "states_that_agree": sum(len(found) == 1 for found in shares) / num,
    }
