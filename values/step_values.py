"""`StepValues` of a trajectory, from what is known of the states that it passes through.

An estimate of a state is the share of right completions sampled from it, or comes from `values.smoothed`. Where nothing
is known of a state, its value is None: never 0.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from espalier.data.left_out import leave_out
from espalier.data.records import StepValues, Trajectory
from espalier.data.steps import check_ends
from espalier.values.labels import wilson_interval
from espalier.values.monte_carlo import Count, StateKey, state_key


@dataclass(frozen=True)
class StateEstimate:
    """The value of a state in [0, 1] with its 95 % interval from `low` to `high`; `count`: completions of that very
    state. `value` is None where nothing is known."""

    value: float | None
    low: float
    high: float
    count: Count


UNKNOWN = StateEstimate(None, 0.0, 1.0, Count(0, 0))


def counted(count: Count) -> StateEstimate:
    """Estimate a state by its own completions, with Wilson's interval; `UNKNOWN` without any."""
    if not count.num_completions:
        return UNKNOWN
    return StateEstimate(count.value, *wilson_interval(count.num_correct, count.num_completions), count)


def inner_estimates(trajectory: Trajectory, estimates: Mapping[StateKey, StateEstimate]) -> list[StateEstimate]:
    """Return the estimates of the S - 1 inner states of a trajectory of S steps; `UNKNOWN` where a state has none.

    Raises BadInput for a trajectory without token ids.
    """
    check_ends(trajectory.steps, trajectory.step_ends, trajectory.id)
    keys = (state_key(trajectory.problem_id, trajectory.response_ids[:end]) for end in trajectory.step_ends[:-1])
    return [estimates.get(key, UNKNOWN) for key in keys]


def step_values(
    trajectory: Trajectory, inner: Sequence[StateEstimate], prompt_value: float | None = None
) -> StepValues:
    """Return the record of a trajectory from estimates of its S - 1 inner states; the last value is the outcome. Its
    labels are the values. `prompt_value`: share of the problem's trajectories that are right."""
    outcome = float(trajectory.is_correct)
    terminal = StateEstimate(outcome, outcome, outcome, Count(int(trajectory.is_correct), 1))
    steps = [*inner, terminal] if trajectory.steps else []
    return StepValues(
        id=trajectory.id,
        problem_id=trajectory.problem_id,
        prompt=trajectory.prompt,
        steps=trajectory.steps,
        prompt_ids=trajectory.prompt_ids,
        response_ids=trajectory.response_ids,
        step_ends=trajectory.step_ends,
        values=[step.value for step in steps],
        num_correct=[step.count.num_correct for step in steps],
        num_completions=[step.count.num_completions for step in steps],
        is_correct=trajectory.is_correct,
        low=[step.low for step in steps],
        high=[step.high for step in steps],
        prompt_value=prompt_value,
        passage_id=trajectory.passage_id,
    )


def problem_accuracies(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return problem id → the share of its trajectories that are right."""
    outcomes: dict[str, list[bool]] = {}
    for trajectory in trajectories:
        outcomes.setdefault(trajectory.problem_id, []).append(trajectory.is_correct)
    return {problem: sum(rights) / len(rights) for problem, rights in outcomes.items()}


def with_intervals(row: StepValues) -> StepValues:
    """Return the record with intervals: its own, or those that its counts give."""
    if (row.low and row.high) or not row.steps:
        return row
    counts = [Count(*numbers) for numbers in zip(row.num_correct, row.num_completions, strict=True)]
    inner = [wilson_interval(count.num_correct, count.num_completions) for count in counts[:-1]]
    outcome = float(row.is_correct)
    return replace(row, low=[*(low for low, _ in inner), outcome], high=[*(high for _, high in inner), outcome])


def without_gaps(rows: Iterable[StepValues], path: str) -> list[tuple[StepValues, list[float]]]:
    """Return each record whose values are all known, with these values; the others are counted in one line."""
    rows = list(rows)
    known = [(row, [value for value in row.values if value is not None]) for row in rows]
    kept = [(row, values) for row, values in known if len(values) == len(row.values)]
    leave_out(path, len(rows) - len(kept), len(rows), "trajectories", "pass through a state whose value is not known")
    return kept
