"""What an evaluation reads: samples and greedy solutions of the same problems, problem by problem; all checked.

Scores (`pipeline.evaluation.rankings`) are joined by trajectory id, problems by problem id.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.data.answers.grade import Gold
from espalier.data.failed_rows import read_failed
from espalier.data.jsonl import read_records
from espalier.data.records import BadInput, Problem, Trajectory
from espalier.data.row_index import ProblemRows


@dataclass(frozen=True)
class OutcomeScore:
    """A reward model's one score of a trajectory."""

    id: str
    """the trajectory's id"""
    problem_id: str
    score: float | None
    """a share in [0, 1], or log-odds; null where the scorer gave none that can be read"""
    is_seen: bool | None = None
    """whether the scorer learned to judge the problem; null where nobody knows"""


@dataclass(frozen=True)
class ProblemSamples:
    """The samples of a problem, and its greedy solution, None where no greedy file is named; `number` is the problem's
    in the index of rows."""

    number: int
    id: str
    group: list[Trajectory]
    greedy: Trajectory | None

    @property
    def is_labelled(self) -> bool:
        """Whether the problem is published with its answer."""
        return has_gold(self.group[0].gold)

    @property
    def chosen(self) -> list[Trajectory]:
        """Return what the policy answers with: the greedy solution where there is one, else the samples."""
        return [self.greedy] if self.greedy is not None else self.group


def has_gold(gold: Gold) -> bool:
    """False where the problem is published without its answer."""
    return any(gold) if isinstance(gold, list) else gold != ""


class SampleRows:
    """n samples per problem and, if a path is given, one greedy solution of each; read problem by problem, in the order
    of the greedy file. A problem that one of the files lists as refused (`data.failed_rows`) is left out.

    Raises BadInput on an empty file, unequal numbers of samples, other problems or other golds.
    """

    def __init__(self, rows: ProblemRows, path: str, greedy_path: str = ""):
        self.path, self._rows, self._greedy_path = path, rows, greedy_path
        num_greedy = rows.add(Trajectory, greedy_path) if greedy_path else 0
        self._place = rows.num_files
        if not rows.add(Trajectory, path):
            raise BadInput(f"{path}: no trajectory to evaluate")
        if greedy_path and not num_greedy:
            raise BadInput(f"{greedy_path}: no greedy trajectory: finish sampling first, or leave stage.greedy empty")
        self.num_samples = self.num_problems = 0
        self.num_refused = 0
        """problems that have no trajectory because they were refused"""
        self._check()

    def __iter__(self) -> Iterator[ProblemSamples]:
        for number, name, group, greedy in self._groups():
            if group and (greedy or not self._greedy_path):
                yield ProblemSamples(number, name, group, greedy[0] if greedy else None)

    def _groups(self) -> Iterator[tuple[int, str, list[Trajectory], list[Trajectory]]]:
        for number in self._rows.problems():
            group: list[Trajectory] = self._rows.rows(self._place, number)
            greedy: list[Trajectory] = self._rows.rows(0, number) if self._greedy_path else []
            if group or greedy:
                yield number, (group or greedy)[0].problem_id, group, greedy

    def _check(self) -> None:
        failed = read_failed(self.path), read_failed(self._greedy_path) if self._greedy_path else {}
        refused = set(failed[0]), set(failed[1])
        gap, several, gold, sizes = "", "", "", set[int]()
        for _, name, *both in self._groups():
            for rows, names in zip(both, refused, strict=True):
                if rows:
                    names.discard(name)
            group, greedy = both
            if self._greedy_path and bool(group) != bool(greedy):
                if not any(name in names for names in refused):
                    gap = min(gap or name, name)
                continue
            self.num_problems += 1
            sizes.add(len(group))
            if len(greedy) > 1:
                several = several or f"problem '{name}' stands {len(greedy)} times"
            gold = gold or _other_gold([*group, *greedy])
        self.num_refused = len(refused[0] | refused[1])
        if gap:
            raise BadInput(f"{self.path} and {self._greedy_path} do not hold the same problems ('{gap}' is only in "
                           "one): sample both on the same split")  # fmt: skip
        if several:
            raise BadInput(f"{self._greedy_path}: {several}: one greedy solution a problem is needed")
        if not sizes:
            raise BadInput(f"{self.path}: every problem was refused in one of the files: see {self.path} and "
                           f"{self._greedy_path} with .failed before their ending")  # fmt: skip
        if len(sizes) > 1:
            raise BadInput(f"{self.path}: problems have {min(sizes)} to {max(sizes)} samples: finish sampling first")
        if gold:
            raise BadInput(f"{self.path}: {gold}: they are not of one run")
        self.num_samples = sizes.pop()


def _other_gold(group: Sequence[Trajectory]) -> str:
    """Say which trajectory has another gold than the first, if any."""
    other = next((t for t in group if t.gold != group[0].gold), None)
    if other is None:
        return ""
    return (f"problem '{other.problem_id}' has gold {group[0].gold!r} in '{group[0].id}' and {other.gold!r} in "
            f"'{other.id}'")  # fmt: skip


def named_paths(value: Any, setting: str) -> dict[str, str]:
    """Name → path of a setting that is one path (named ""), a list (named by their stems) or a mapping.

    Raises BadInput where two stems are the same, or the setting is something else.
    """
    if not value:
        return {}
    if isinstance(value, str):
        return {"": value}
    if isinstance(value, Mapping) and all(isinstance(path, str) for path in value.values()):
        return {str(name): path for name, path in value.items()}
    if isinstance(value, list | tuple) and all(isinstance(path, str) for path in value):
        paths = {Path(path).stem: path for path in value}
        if len(paths) == len(value):
            return paths
        raise BadInput(f"{setting}: two files have the same name: give names, {setting}={{prm: FILE, orm: FILE}}")
    raise BadInput(f"{setting} must be a path, a list of paths or a mapping of names to paths, got {value!r}")


def read_problems(path: str) -> dict[str, Problem]:
    """Problem id → problem."""
    return {problem.id: problem for problem in read_records(Problem, path)}


def check_known(problem: str, problems: Mapping[str, Problem], path: str, samples: str) -> None:
    """Raise BadInput where a problem that was sampled is not in the file of problems."""
    if problem not in problems:
        raise BadInput(f"{path}: no problem '{problem}', which {samples} holds: give the file of its split")
