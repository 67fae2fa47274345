"""Monte-Carlo values of intermediate states (Wang et al. 2024; Kazemnejad et al. 2024).

The value of a state is the share of right answers among completions sampled from it. A trajectory of S steps
has S + 1 states: the prompt (state 0), one after each step, and the terminal one, whose value is the outcome
itself. States are cut in token space; two trajectories of one problem that share a prefix share the state.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from espalier.data.records import BadInput, Completion, State, Trajectory
from espalier.data.steps import check_ends

StateKey = tuple[str, tuple[int, ...]]


def state_key(problem_id: str, prefix_ids: Sequence[int]) -> StateKey:
    """Return what makes two states the same: the problem and the tokens so far."""
    return problem_id, tuple(prefix_ids)


def states_of(trajectory: Trajectory, first_step: int = 1) -> list[State]:
    """Return the states after step `first_step` up to the one before the last step; the terminal state is left out.

    Raises BadInput for a trajectory without token ids.
    """
    check_ends(trajectory.steps, trajectory.step_ends, trajectory.id)
    states = []
    for step in range(first_step, len(trajectory.steps)):
        end = trajectory.step_ends[step - 1] if step else 0
        states.append(
            State(
                id=f"{trajectory.id}#{step}",
                problem_id=trajectory.problem_id,
                trajectory_id=trajectory.id,
                step=step,
                prompt=trajectory.prompt,
                prefix="".join(trajectory.steps[:step]),
                prompt_ids=trajectory.prompt_ids,
                prefix_ids=trajectory.response_ids[:end],
                gold=trajectory.gold,
                num_options=trajectory.num_options,
                passage_id=trajectory.passage_id,
            )
        )
    return states


def distinct_states(trajectories: Iterable[Trajectory], first_step: int = 1) -> list[State]:
    """Return every distinct state once, the first trajectory's that reached it."""
    found: dict[StateKey, State] = {}
    for trajectory in trajectories:
        for state in states_of(trajectory, first_step):
            found.setdefault(state_key(state.problem_id, state.prefix_ids), state)
    return list(found.values())


@dataclass(frozen=True)
class Count:
    """`num_correct` of `num_completions`."""

    num_correct: int
    num_completions: int

    @property
    def value(self) -> float:
        """The Monte-Carlo estimate."""
        return self.num_correct / self.num_completions

    def __add__(self, other: "Count") -> "Count":
        return Count(self.num_correct + other.num_correct, self.num_completions + other.num_completions)


@dataclass(frozen=True)
class StateValue:
    """The Monte-Carlo value of one state: the mean reward of `num_completions` (K) completions.

    `standard_error` of that mean is s / sqrt(K), s the standard deviation of a sample (K - 1 below): not a number for
    K = 1, and 0 where all completions agree, which is no proof that the next one does.
    """

    value: float
    standard_error: float
    num_completions: int


def state_value(rewards: Sequence[float]) -> StateValue:
    """Return value a state by the rewards of its completions (1 right, 0 wrong). Raises BadInput where there are
    none."""
    number = len(rewards)
    if not number:
        raise BadInput("a state without completions has no value: sample at least one from it")
    mean = sum(rewards) / number
    if number == 1:
        return StateValue(mean, math.nan, number)
    variance = math.fsum((reward - mean) ** 2 for reward in rewards) / (number - 1)
    return StateValue(mean, math.sqrt(variance / number), number)


def count_sampled(states: Sequence[State], completions: Iterable[Completion]) -> dict[StateKey, Count]:
    """Return right completions of the states that have any, in the order of the states: some states may have been left
    out.

    Raises BadInput for a completion of no state.
    """
    keys = {state.id: state_key(state.problem_id, state.prefix_ids) for state in states}
    correct: dict[StateKey, int] = dict.fromkeys(keys.values(), 0)
    total: dict[StateKey, int] = dict.fromkeys(keys.values(), 0)
    for completion in completions:
        if completion.state_id not in keys:
            raise BadInput(f"completion '{completion.id}': there is no state '{completion.state_id}'")
        total[keys[completion.state_id]] += 1
        correct[keys[completion.state_id]] += completion.is_correct
    return {key: Count(correct[key], number) for key, number in total.items() if number}


@dataclass(frozen=True)
class OfState(Trajectory):
    """A completion and its state as one trajectory, to be scored and never written; `state_id`: which state."""

    state_id: str = ""


def of_state(state: State, completion: Completion) -> OfState:
    """Return `finished`, with the state that it is a completion of."""
    return OfState(**vars(finished(state, completion)), state_id=state.id)


def finished(state: State, completion: Completion) -> Trajectory:
    """Return the state's prefix and the completion as one trajectory, of one step: what a reward scores as a whole."""
    response = state.prefix + completion.response
    ids = [*state.prefix_ids, *completion.response_ids]
    return Trajectory(
        id=completion.id,
        problem_id=state.problem_id,
        prompt=state.prompt,
        response=response,
        steps=[response],
        prompt_ids=state.prompt_ids,
        response_ids=ids,
        step_ends=[len(ids)],
        finish_reason=completion.finish_reason,
        gold=state.gold,
        answer=completion.answer,
        is_correct=completion.is_correct,
        num_options=state.num_options,
        passage_id=state.passage_id,
    )
