"""Monte-Carlo credit: a step is worth the change in value it makes. A state cutter x a completion plan x values.

The value of a state is the mean reward of completions sampled from it, by the policy and the client that drew the
rollouts, graded like any offline completion (values.monte_carlo). Identical states are completed once, whichever
rollouts share them. The terminal value is the rollout's own reward, which enters nowhere else. Completions are not
trained on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from espalier.data.records import BadInput, Completion, State, Trajectory
from espalier.data.steps import Decode
from espalier.rl.credit.completion_plans import CompletionPlan
from espalier.rl.credit.state_cutters import StateCutter
from espalier.rl.credit.step_credit import (
    PROMPT_VALUES,
    check_whole_rewards,
    fill_values,
    prompt_values,
    step_advantages,
)
from espalier.rl.credit.token_maps import spread_steps
from espalier.rl.estimator_context import EstimatorContext
from espalier.rl.types import Estimate, Experience, RolloutGroup
from espalier.sampling.client import SamplingParams
from espalier.values.monte_carlo import StateKey, of_state, state_key, state_value


@dataclass(frozen=True)
class MonteCarloCredit:
    """Values the states that `cutter` cuts by the completions that `plan` asks for. Raises BadInput on a `prompt_value`
    that does not exist."""

    cutter: StateCutter
    plan: CompletionPlan
    prompt_value: str
    """The value of the prompt: "sampled" like any other state's (as VinePPO), or free from the group's own rewards
    ("group", "leave_one_out")."""

    def __post_init__(self) -> None:
        if self.prompt_value not in PROMPT_VALUES:
            names = ", ".join(PROMPT_VALUES)
            raise BadInput(f"advantage.prompt_value must be one of {names}, got '{self.prompt_value}'")

    @property
    def smallest_group(self) -> int:
        """Say how many rollouts of a problem are needed."""
        return 1 if self.prompt_value == "sampled" else 2

    def __call__(self, groups: Sequence[RolloutGroup], experience: Experience, context: EstimatorContext) -> Estimate:
        """Give every response token the advantage of its step. Raises BadInput where the reward has process terms."""
        check_whole_rewards(groups)
        split, states = self._states(groups, context.decode)
        completions = self.plan.complete(list(states.values()), context)
        values = mean_rewards(states, completions, context)
        rows: list[list[float]] = []
        for group, trajectories in zip(groups, split, strict=True):
            free = prompt_values(group.rewards, "group" if self.prompt_value == "sampled" else self.prompt_value)
            for trajectory, reward, prompt in zip(trajectories, group.rewards, free, strict=True):
                rows.append(values_along(trajectory, reward, prompt, values))
        flat = [trajectory for trajectories in split for trajectory in trajectories]
        steps = [step_advantages(row) for row in rows]
        ends = [trajectory.step_ends for trajectory in flat]
        advantages = spread_steps(ends, steps, experience.response_mask)
        metrics = describe_states(flat, completions, values)
        return Estimate(advantages, metrics=metrics, state_values=rows, value_ends=ends)

    def first_completions(
        self, group: RolloutGroup, decode: Decode, params: SamplingParams
    ) -> list[tuple[State, SamplingParams]]:
        """Return what is going to be asked first of the group (`NamesCompletions`)."""
        states, number = self._states([group], decode)[1].values(), self.plan.completions_per_state
        return [(state, self.plan.params_of(state, number, params)) for state in states]

    def _states(
        self, groups: Sequence[RolloutGroup], decode: Decode
    ) -> tuple[list[list[Trajectory]], dict[StateKey, State]]:
        """Return (the rollouts of every group as they are cut, the states to complete)."""
        split = [[self.cutter(rollout, decode) for rollout in group.rollouts] for group in groups]
        return split, self.plan.states(groups, split, first_step=0 if self.prompt_value == "sampled" else 1)


def mean_rewards(
    states: Mapping[StateKey, State], completions: Mapping[str, Sequence[Completion]], context: EstimatorContext
) -> dict[StateKey, float]:
    """Return value every state by the mean reward of its completions, each scored together with its state as one
    response."""
    if not states:
        return {}
    whole = (of_state(state, completion) for state in states.values() for completion in completions[state.id])
    rewards = iter(context.score(whole))
    return {
        key: state_value([next(rewards).total for _ in completions[state.id]]).value for key, state in states.items()
    }


def values_along(trajectory: Trajectory, reward: float, prompt: float, values: Mapping[StateKey, float]) -> list[float]:
    """List V_0 .. V_S of a rollout: `prompt` where its prompt was not valued, `reward` at the end."""
    starts = [0, *trajectory.step_ends[:-1]][: len(trajectory.steps)]
    row = [values.get(state_key(trajectory.problem_id, trajectory.response_ids[:start])) for start in starts]
    if row and row[0] is None:
        row[0] = prompt
    return fill_values(row, reward)


def describe_states(
    trajectories: Sequence[Trajectory],
    completions: Mapping[str, Sequence[Completion]],
    values: Mapping[StateKey, float],
) -> dict[str, float]:
    """Return average over the completed states: their value, the share without spread, completions and tokens they
    cost."""
    rows = [completion for sampled in completions.values() for completion in sampled]
    num = max(1, len(values))
    grades = [{completion.is_correct for completion in sampled} for sampled in completions.values()]
    return {
        "num_steps": sum(len(trajectory.steps) for trajectory in trajectories) / max(1, len(trajectories)),
        "num_states": float(len(values)),
        "num_completions": float(len(rows)),
        "completions_per_state": len(rows) / num,
        "completion_tokens": float(sum(len(completion.response_ids) for completion in rows)),
        "completions_truncated": sum(row.finish_reason == "length" for row in rows) / max(1, len(rows)),
        "state_value": sum(values.values()) / num,
        "states_that_agree": sum(len(found) == 1 for found in grades) / num,
    }
