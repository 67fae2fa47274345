"""Problems of one's own: JSON lines of `Problem` (data/records.py), as `problems/list_problems` writes them.

`path` is the file, or a folder with `{train,dev,test}.jsonl`. Ids are kept as they are and must be unique. `kind` says
how answers are compared; worked solutions are in `info["solution"]`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from espalier.data.records import BadInput, Problem, parse_record
from espalier.data.sources import BadRow, Row
from espalier.data.tasks.published import PublishedTask


@dataclass(frozen=True)
class ProblemFile(PublishedTask):
    """A file of problems as a task."""

    name = "problem_file"
    has_solutions: ClassVar[bool] = True
    remedy: ClassVar[str] = "a line needs an id, a question and a gold"
    files: ClassVar[Mapping[str, tuple[str, ...]]] = {split: (f"{split}.jsonl",) for split in ("train", "dev", "test")}

    def problem(self, row: Row) -> Problem:
        """Read the record of a line.

        Raises BadRow where it is no `Problem`, or its order of options is not a permutation.
        """
        try:
            problem = parse_record(Problem, row.fields, "")
        except BadInput as error:
            raise BadRow(str(error).removeprefix(": ")) from None
        order = problem.info.get("option_order")
        if order is not None and (not isinstance(order, list) or {*map(repr, order)} != _places(problem)):
            raise BadRow(f"info.option_order must hold the place of every option once, got {order!r}")
        return problem

    def _named(self, problem: Problem, split: str, index: int, taken: set[str]) -> Problem:
        """Return the problem as it is. Raises BadRow on an id that another line has."""
        if not problem.id or problem.id in taken:
            raise BadRow(f"the id {problem.id!r} must not be empty and not that of another line")
        taken.add(problem.id)
        return problem


def _places(problem: Problem) -> set[str]:
    return {repr(place) for place in range(len(problem.options))}
