"""Chooses the example trajectories of the report: held-out problems, right beside wrong.

A problem with right and wrong trajectories shows one of each: the wrong one whose value falls most in one
step, and the right one that shares the most first steps with it, so that the step where they part stands
out. Such problems are chosen for their fall, not at random; the page says so.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import TypeVar

from espalier.analysis.run_files import RunFiles
from espalier.data.examples.token_examples import is_held_out
from espalier.data.jsonl import iter_rows
from espalier.data.records import BadInput, StepScores, StepValues, Trajectory, parse_record
from espalier.values.step_values import without_gaps

R = TypeVar("R", StepScores, Trajectory)


@dataclass(frozen=True)
class ScoredTrajectory:
    """A trajectory whose values are all known, with the PRM's scores of the same steps."""

    row: StepValues
    values: list[float]
    scores: list[float]

    def miss(self) -> float:
        """Return mean absolute difference of score and value."""
        gaps = [abs(s - v) for s, v in zip(self.scores, self.values, strict=True)]
        return sum(gaps) / len(gaps)


@dataclass(frozen=True)
class ExampleProblem:
    """One problem with the trajectories to show; `num_shared` first steps are the same in all of them."""

    title: str
    gold: str
    trajectories: list[ScoredTrajectory]
    num_shared: int


def largest_drop(values: Sequence[float]) -> float:
    """Return the largest fall of the value from one state to the next; 0 if it never falls."""
    return max([before - after for before, after in pairwise(values)] + [0.0])


def num_shared_steps(first: StepValues, second: StepValues) -> int:
    """Return how many first steps two trajectories have in common."""
    pairs = zip(first.steps, second.steps, strict=False)  # up to the end of the shorter one
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def read_held_out(path: Path, share: float) -> Iterable[StepValues]:
    """Return the step values of held-out problems; the other lines are not validated (their stage has done so)."""
    for place, row in iter_rows(path):
        if is_held_out(str(row.get("passage_id") or row.get("problem_id")), share):
            yield parse_record(StepValues, row, place)


def read_of(kind: type[R], path: Path, problems: Collection[str]) -> Iterable[R]:
    """Return the records of these problems; the other lines are not validated."""
    for place, row in iter_rows(path):
        if row.get("problem_id") in problems:
            yield parse_record(kind, row, place)


def read_scored(files: RunFiles, share: float) -> dict[str, list[ScoredTrajectory]]:
    """Held-out problem id → its distinct trajectories. Raises BadInput where values have no scores."""
    path, scores_path = files.rewards("step_values.jsonl"), files.rewards("step_scores.jsonl")
    known = list(read_held_out(path, share))
    scores = {row.id: row.scores for row in read_of(StepScores, scores_path, {row.problem_id for row in known})}
    groups: dict[str, dict[tuple[str, ...], ScoredTrajectory]] = defaultdict(dict)
    for row, values in without_gaps(known, str(path)):
        if len(scores.get(row.id, [])) != len(row.values):
            want = f"'{row.id}' must have {len(row.values)} scores"
            raise BadInput(f"{scores_path}: {want}: score these trajectories again")
        if row.steps:
            groups[row.problem_id].setdefault(tuple(row.steps), ScoredTrajectory(row, values, scores[row.id]))
    return {problem: list(group.values()) for problem, group in groups.items()}


@dataclass(frozen=True)
class _Fork:
    """A wrong trajectory and the right one that shares the most first steps with it."""

    wrong: ScoredTrajectory
    right: ScoredTrajectory
    drop: float
    num_shared: int


def _fork(group: Sequence[ScoredTrajectory]) -> _Fork | None:
    """Return the fork of a problem; None where all its trajectories are right, or all wrong."""
    right = [t for t in group if t.row.is_correct]
    wrong = [t for t in group if not t.row.is_correct]
    if not right or not wrong:
        return None
    fallen = max(wrong, key=lambda t: largest_drop(t.values))
    beside = max(right, key=lambda t: num_shared_steps(t.row, fallen.row))
    shared = num_shared_steps(beside.row, fallen.row)
    return _Fork(fallen, beside, largest_drop(fallen.values), shared)


def _rank(fork: _Fork) -> tuple[float, int, float, int]:
    """Return the sharpest fall first, then solutions of some length, the right one least in doubt, the clearest fork.

    The PRM has no say in it, and sorting is stable: equals stay in the order of the file.
    """
    length = min(len(fork.right.row.steps), 5)
    return -round(fork.drop, 3), -length, -min(fork.right.values), -min(fork.num_shared, 2)


def choose_examples(
    groups: Mapping[str, Sequence[ScoredTrajectory]], gold: Mapping[str, str], num_problems: int
) -> list[ExampleProblem]:
    """Return `num_problems` problems with a right and a wrong trajectory (or one of them, where too few have both),
    then the trajectory that the PRM misjudges most."""
    forks = [(problem, fork) for problem, group in groups.items() if (fork := _fork(group)) is not None]
    forks.sort(key=lambda row: _rank(row[1]))
    chosen = {
        problem: ExampleProblem("Right beside wrong", gold.get(problem, ""), [fork.right, fork.wrong], fork.num_shared)
        for problem, fork in forks[:num_problems]
    }
    for problem, group in groups.items():
        if len(chosen) < num_problems and problem not in chosen:
            title = "A right solution" if group[0].row.is_correct else "A wrong solution"
            chosen[problem] = ExampleProblem(title, gold.get(problem, ""), [group[0]], 0)
    others = [(problem, t) for problem, group in groups.items() if problem not in chosen for t in group]
    if others:
        problem, worst = max(others, key=lambda row: row[1].miss())
        title = f"The PRM's largest miss: off by {worst.miss():.2f} in the mean of its steps"
        chosen[problem] = ExampleProblem(title, gold.get(problem, ""), [worst], 0)
    return list(chosen.values())


def read_examples(files: RunFiles, share: float, num_problems: int) -> list[ExampleProblem]:
    """Return the examples of a run directory; none where values or scores are missing, or no problem is held out."""
    needed = [files.rewards(f"{name}.jsonl") for name in ("step_values", "step_scores")]
    if not all(path.is_file() for path in needed):
        return []
    trajectories = files.rewards("trajectories.jsonl")
    groups = read_scored(files, share)
    rows = read_of(Trajectory, trajectories, groups) if trajectories.is_file() else []
    return choose_examples(groups, {row.problem_id: str(row.gold) for row in rows}, num_problems)
