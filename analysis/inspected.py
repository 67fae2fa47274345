"""What the inspector reads: trajectories joined with whatever is known of their steps, by id, never by text.

Only the trajectories must be there. Values and labels come from a file of StepValues, or from the completions
themselves. Completions belong to a state by its tokens, so that a state which several trajectories share shows the same
ones in each. A judge's verdicts are one label per step, under the trajectory's id (`AnnotatedSolution`) or its
`trajectory_id` (a row per vote: the mean of the votes is shown).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from espalier.data.jsonl import iter_rows, read_records
from espalier.data.records import BadInput, Completion, State, StepScores, StepValues, Trajectory
from espalier.values.monte_carlo import Count, StateKey, state_key
from espalier.values.step_values import UNKNOWN, StateEstimate, counted, problem_accuracies, step_values, with_intervals

R = TypeVar("R", StepValues, StepScores)


@dataclass(frozen=True)
class InspectedFiles:
    """Paths; "" where there is no such file."""

    values: str = ""
    states: str = ""
    completions: str = ""
    scores: str = ""
    verdicts: str = ""

    def check(self) -> None:
        """Raise BadInput where of two files that need each other one is given."""
        if bool(self.states) != bool(self.completions):
            raise BadInput("stage.states and stage.completions belong together: name both or none")

    def paths(self) -> list[str]:
        """Return those that are given."""
        named = (self.values, self.states, self.completions, self.scores, self.verdicts)
        return [path for path in named if path]


@dataclass(frozen=True)
class Inspected:
    """One trajectory of S steps. `steps` has S labels and values, None (and a weight of 0) where nothing is known;
    `scores` and `verdicts` have S entries or are None. `states` has S keys: that of the state each step starts
    from; [] where there are no token ids."""

    trajectory: Trajectory
    steps: StepValues
    scores: list[float] | None
    verdicts: list[float | None] | None
    states: list[StateKey]

    @property
    def length(self) -> int:
        """Response tokens; characters where a chat API gave no ids."""
        return len(self.trajectory.response_ids) or len(self.trajectory.response)

    def targets(self) -> list[float | None]:
        """Return what a reward model or a judge should have said of each step: its label, else its value."""
        return [
            value if label is None else label for label, value in zip(self.steps.labels, self.steps.values, strict=True)
        ]


@dataclass(frozen=True)
class Inspection:
    """All trajectories in the order of their file, and the completions of every state that has any."""

    rows: list[Inspected]
    completions: Mapping[StateKey, list[Completion]]


def read_inspection(input_path: str, files: InspectedFiles) -> Inspection:
    """Read and join. Raises BadInput on a file that is not of these trajectories."""
    trajectories = read_records(Trajectory, input_path)
    if not trajectories:
        raise BadInput(f"{input_path}: no trajectory to inspect")
    completions = _completions(files)
    values = _rows_of(StepValues, files.values, trajectories, "values")
    scores = _rows_of(StepScores, files.scores, trajectories, "scores")
    verdicts = _verdicts(files.verdicts, trajectories)
    accuracies = problem_accuracies(trajectories)
    rows = []
    for one in trajectories:
        keys = _states_of(one)
        known = values.get(one.id) or step_values(one, _estimates(one, keys, completions), accuracies[one.problem_id])
        score = scores.get(one.id)
        rows.append(Inspected(one, with_intervals(known), score.scores if score else None, verdicts.get(one.id), keys))
    return Inspection(rows, completions)


def _rows_of(kind: type[R], path: str, trajectories: Sequence[Trajectory], name: str) -> dict[str, R]:
    """Return trajectory id → its row, with an entry of `name` for every step.

    Raises BadInput where entries and steps differ in number, or no row is of these trajectories.
    """
    if not path:
        return {}
    lengths = {one.id: len(one.steps) for one in trajectories}
    rows_by_id = {}
    for row in read_records(kind, path):
        if row.id not in lengths:
            continue
        number = len(getattr(row, name))
        if number != lengths[row.id]:
            mismatch = f"'{row.id}' has {number} {name}, its trajectory {lengths[row.id]} steps"
            raise BadInput(f"{path}: {mismatch}: make this file from these trajectories")
        rows_by_id[row.id] = row
    if not rows_by_id:
        raise BadInput(f"{path}: holds none of these trajectories: make this file from these trajectories")
    return rows_by_id


def _verdicts(path: str, trajectories: Sequence[Trajectory]) -> dict[str, list[float | None]]:
    """Return trajectory id → the mean of its votes on each step, None where no vote says anything of it. Votes without
    a verdict (no labels) are passed over.

    Raises BadInput where labels are no numbers, are not one per step, or are of none of these trajectories.
    """
    lengths = {one.id: len(one.steps) for one in trajectories}
    votes: dict[str, list[list[float | None]]] = {}
    num_known = 0
    for place, row in iter_rows(path) if path else ():
        name, labels = row.get("trajectory_id", row.get("id")), row.get("labels")
        if not isinstance(labels, list) or not all(isinstance(label, int | float | None) for label in labels):
            raise BadInput(f"{place}: labels must be a list with a number or null for every step")
        num_known += name in lengths
        if name in lengths and labels:
            if len(labels) != lengths[name]:
                mismatch = f"{len(labels)} labels of '{name}', which has {lengths[name]} steps"
                raise BadInput(f"{place}: {mismatch}: let these trajectories be judged")
            votes.setdefault(name, []).append(labels)
    if path and not num_known:
        raise BadInput(f"{path}: holds none of these trajectories: let these trajectories be judged")
    return {name: [_mean_known(step) for step in zip(*rows, strict=True)] for name, rows in votes.items()}


def _mean_known(labels: Sequence[float | None]) -> float | None:
    known = [label for label in labels if label is not None]
    return fmean(known) if known else None


def _completions(files: InspectedFiles) -> dict[StateKey, list[Completion]]:
    if not files.states:
        return {}
    keys = {state.id: state_key(state.problem_id, state.prefix_ids) for state in read_records(State, files.states)}
    completions: dict[StateKey, list[Completion]] = {}
    for one in read_records(Completion, files.completions):
        if one.state_id not in keys:
            raise BadInput(f"{files.completions}: completion '{one.id}': there is no state '{one.state_id}'")
        completions.setdefault(keys[one.state_id], []).append(one)
    return completions


def _states_of(one: Trajectory) -> list[StateKey]:
    """Return the state every step starts from."""
    if len(one.step_ends) != len(one.steps):
        return []
    return [state_key(one.problem_id, one.response_ids[:end]) for end in [0, *one.step_ends][: len(one.steps)]]


def _estimates(
    one: Trajectory, keys: Sequence[StateKey], completions: Mapping[StateKey, Sequence[Completion]]
) -> list[StateEstimate]:
    """Return estimates of the states after every step but the last."""
    known = [_estimate(completions.get(key, ())) for key in keys[1:]]
    return [*known, *[UNKNOWN] * (len(one.steps) - 1 - len(known))]


def _estimate(rows: Sequence[Completion]) -> StateEstimate:
    return counted(Count(sum(row.is_correct for row in rows), len(rows)))
