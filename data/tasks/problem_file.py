"""Problems of one's own: rows of `Problem` (data/records.py), as `problems/list_problems` writes them, or of prompts.

`path` is the file, or a folder with `{train,dev,test}.jsonl`, `.json` or `.parquet`. Ids are kept as they are and must
be unique. `kind` says how answers are compared; worked solutions are in `info["solution"]`.

A row of prompts has the column `prompt`, a text or chat turns of which one is the user's (TRL's prompt-only layout),
and no `question`. Its gold is `gold`, `answer` or `ground_truth` where it has one, else "": answers to it are read, and
never right. Without an `id` it is called by the number of its row.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from espalier.data.records import BadInput, Problem, parse_record
from espalier.data.sources import BadRow, Row
from espalier.data.tasks.published import PublishedTask
from espalier.data.tasks.verifiable import GOLDS, read_question

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProblemFile(PublishedTask):
    """A file of problems as a task."""

    name = "problem_file"
    has_solutions: ClassVar[bool] = True
    remedy: ClassVar[str] = "a line needs an id, a question and a gold, or a prompt"
    files: ClassVar[Mapping[str, tuple[str, ...]]] = {
        split: (f"{split}.jsonl", f"{split}.json", f"{split}.parquet") for split in ("train", "dev", "test")
    }

    def problems(self, split: str) -> list[Problem]:
        """Return the problems of a split; one line says how many of them have no answer."""
        found = super().problems(split)
        num = sum(not problem.gold for problem in found)
        if num:
            log.warning("%s/%s: %d of %d problems have no answer: no response to them is ever graded right; reward "
                        "them by a model or a judge", self.name, split, num, len(found))  # fmt: skip
        return found

    def problem(self, row: Row) -> Problem:
        """Read the record of a line.

        Raises BadRow where it is no `Problem` and no prompt, or its order of options is not a permutation.
        """
        if row.has("prompt") and not row.has("question"):
            return self._prompt(row)
        try:
            problem = parse_record(Problem, row.fields, "")
        except BadInput as error:
            raise BadRow(str(error).removeprefix(": ")) from None
        if not problem.id:
            raise BadRow("the id is empty: give every line one of its own")
        order = problem.info.get("option_order")
        if order is not None and (not isinstance(order, list) or {*map(repr, order)} != _places(problem)):
            raise BadRow(f"info.option_order must hold the place of every option once, got {order!r}")
        return problem

    def _prompt(self, row: Row) -> Problem:
        """Read a row of prompts. Raises BadRow."""
        identity = row.fields.get("id")
        is_name = isinstance(identity, str | int) and not isinstance(identity, bool)
        gold = next((row.fields[name] for name in GOLDS if row.has(name)), "")
        if isinstance(gold, int | float) and not isinstance(gold, bool):
            gold = str(gold)
        if not isinstance(gold, str) and not (isinstance(gold, list) and all(isinstance(one, str) for one in gold)):
            raise BadRow(f"the answer must be a text, a number or a list of texts, got {str(gold)[:60]!r}")
        if lost := [name for name in ("options", "context", "info") if row.has(name)]:
            raise BadRow(f"a row of a prompt has no {', '.join(lost)}: call the column question, with an id and gold")
        if isinstance(gold, str) and "\n####" in gold:  # a worked solution
            gold = gold.rpartition("####")[2].strip()
        question = read_question(row, self.template.system, ("prompt",))
        return Problem(str(identity) if is_name else "", question, gold)

    def _named(self, problem: Problem, split: str, index: int, taken: set[str]) -> Problem:
        """Return the problem as it is; a prompt without an id is called by its row's number. Raises BadRow on an id
        that another line has."""
        if not problem.id:
            return super()._named(problem, split, index, taken)
        if problem.id in taken:
            raise BadRow(f"the id {problem.id!r} is that of another line: give every line one of its own")
        taken.add(problem.id)
        return problem


def _places(problem: Problem) -> set[str]:
    return {repr(place) for place in range(len(problem.options))}
