"""One number per step of every trajectory, from the file that ranks them: scores, values, or the labels of values."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from espalier.data.left_out import leave_out
from espalier.data.records import BadInput, StepScores, StepValues, Trajectory
from espalier.data.row_index import ProblemRows

Numbers = dict[str, tuple[str, list[float]]]  # trajectory id → (problem id, one number a step)


def step_numbers(
    records: Iterable[StepScores | StepValues], reads_labels: bool = False, keeps_gaps: bool = False
) -> Numbers:
    """Return the scores, the values or the labels. What is missing is nan where labels are read or `keeps_gaps`; else
    the trajectory is left out."""
    found: Numbers = {}
    for row in records:
        numbers: Sequence[float | None] = row.scores if isinstance(row, StepScores) else row.values
        if isinstance(row, StepValues) and reads_labels:
            numbers = row.labels
        if keeps_gaps or reads_labels:
            numbers = [math.nan if number is None else number for number in numbers]
        known = [number for number in numbers if number is not None]
        if len(known) == len(numbers):
            found[row.id] = row.problem_id, known
    return found


def numbers_of_steps(
    trajectory: Trajectory, found: Mapping[str, tuple[str, list[float]]], path: str, may_lack: bool = False
) -> list[float]:
    """Return the numbers of a trajectory's steps. Raises BadInput where they are missing or another trajectory's."""
    if trajectory.id not in found:
        raise BadInput(f"{path}: no scores for trajectory '{trajectory.id}': score these trajectories")
    problem, numbers = found[trajectory.id]
    if problem != trajectory.problem_id or len(numbers) != len(trajectory.steps):
        raise _of_another(trajectory, problem, len(numbers), path)
    if not all(math.isfinite(number) or (may_lack and math.isnan(number)) for number in numbers):
        raise BadInput(f"{path}: '{trajectory.id}' has a score that is no finite number: score again")
    return numbers


def _of_another(trajectory: Trajectory, problem: str, num_steps: int, path: str) -> BadInput:
    return BadInput(
        f"{path}: '{trajectory.id}' has {num_steps} steps of problem '{problem}', its trajectory "
        f"{len(trajectory.steps)} of '{trajectory.problem_id}': score these trajectories"
    )


class StepNumbers:
    """The numbers of one problem after the other: the second file of `rows`, whose first are the trajectories.

    What is missing as in `step_numbers`. Raises BadInput where a trajectory's numbers are said to be of another
    problem, which would look like none.
    """

    def __init__(self, rows: ProblemRows, kind: type, path: str, reads_labels: bool = False, keeps_gaps: bool = False):
        self._rows, self._path, self._reads_labels = rows, path, reads_labels
        self._keeps_gaps = keeps_gaps or reads_labels
        number = rows.add(kind, path)
        self._total = 0 if self._keeps_gaps else number
        self._num_gaps = 0
        self.records: list[Any] = []
        """of the problem that was asked for last"""
        self.known: Numbers = {}
        """of its trajectories that have numbers"""
        if found := rows.elsewhere(0, 1):
            trajectory, record = found
            num_steps = len(record.scores if kind is StepScores else record.values)
            raise _of_another(trajectory, record.problem_id, num_steps, path)

    def of(self, problem: int) -> Numbers:
        """Read a problem's; its trajectories that have numbers."""
        self.records = self._rows.rows(1, problem)
        found = step_numbers(self.records, self._reads_labels, self._keeps_gaps)
        if self._keeps_gaps and not self._reads_labels:
            numbers = [number for _, row in found.values() for number in row]
            self._total += len(numbers)
            self._num_gaps += sum(map(math.isnan, numbers))
        else:
            self._num_gaps += len(self.records) - len(found)
        self.known = {name: row for name, row in found.items() if row[1]}
        return self.known

    def of_steps(self, trajectory: Trajectory) -> list[float]:
        """Return those of a trajectory of that problem; see `numbers_of_steps`."""
        return numbers_of_steps(trajectory, self.known, self._path, self._keeps_gaps)

    def note_gaps(self) -> None:
        """Say how many trajectories, or steps, were left out because a value is not known."""
        noun, reason = ("steps", "lead to") if self._keeps_gaps else ("trajectories", "pass through")
        leave_out(self._path, self._num_gaps, self._total, noun, f"{reason} a state whose value is not known")
