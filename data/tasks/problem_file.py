"""Problems of one's own: rows of `Problem` (data/records.py), as `problems/list_problems` writes them, or of columns
that such files have.

`path` is the file, or a folder with `{train,dev,test}.jsonl`, `.json` or `.parquet`. `kind` says how answers are
compared; worked solutions are in `info["solution"]`.

A row asks in `question`, `prompt` or `problem`: a text, or chat turns of which one is the user's. Its answer is in
`ground_truth`, `gold` or `answer`: a text, a number or a list of texts. Of a worked solution it is what follows the
last `####` that begins a line, as in GSM8K. A row of a `prompt` (TRL's prompt-only layout) may be without one, and has
the gold "" then: answers to it are read, and never right. An `id` is kept and must be unique; a row without one is
called by its number. `info`, `context` and `options` are those of a `Problem`. Other columns are not read.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from espalier.data.answers.grade import Gold
from espalier.data.answers.numbers import extract_marked_number
from espalier.data.records import BadInput, Problem, parse_record
from espalier.data.sources import BadRow, Row
from espalier.data.tasks.published import PublishedTask, Rows
from espalier.data.tasks.verifiable import GOLDS, read_question

log = logging.getLogger(__name__)
_QUESTIONS = ("question", "prompt", "problem")
_MORE = ("info", "context", "options", "passage_id")
_MARKED = re.compile(r"^####(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class ProblemFile(PublishedTask):
    """A file of problems as a task."""

    name = "problem_file"
    has_solutions: ClassVar[bool] = True
    remedy: ClassVar[str] = "a line needs a question and its answer, or a prompt"
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

    def read_problems(self, rows: list[Row], split: str) -> Rows:
        """Make problems of rows; one line names the columns that are not read."""
        columns = {name: None for row in rows for name in row.fields}
        if unread := [name for name in columns if name not in ("id", *_QUESTIONS, *GOLDS, *_MORE)]:
            log.info("%s/%s: the columns %s are not read", self.name, split, ", ".join(unread))
        return super().read_problems(rows, split)

    def problem(self, row: Row) -> Problem:
        """Read the problem of a row; its id is "" where the row has none.

        Raises BadRow where the row does not ask, has a question without an answer, or has no such answer, options or
        context; where its order of options is not a permutation too.
        """
        identity = row.fields.get("id")
        is_name = isinstance(identity, str | int) and not isinstance(identity, bool)
        fields = {
            "id": str(identity) if is_name else "",
            "question": self._question(row),
            "gold": self._gold(row),
            **{name: row.fields[name] for name in _MORE if row.has(name)},
        }
        try:
            problem = parse_record(Problem, fields, "")
        except BadInput as error:
            remedy = ": give the column another name if it is none of a problem's"
            raise BadRow(str(error).removeprefix(": ") + remedy) from None
        order = problem.info.get("option_order")
        if order is not None and (not isinstance(order, list) or {*map(repr, order)} != _places(problem)):
            raise BadRow(f"info.option_order must hold the place of every option once, got {order!r}")
        return problem

    def _question(self, row: Row) -> str:
        """Return what the row asks: a text as it stands (a base model goes on behind its last space or newline), or
        the user's turn. Raises BadRow."""
        name = next((name for name in _QUESTIONS if row.has(name)), "")
        value = row.fields.get(name)
        if name and not isinstance(value, list):
            row.text(name)  # raises on what is no text, and on an empty one
            return str(value)
        return read_question(row, self.template.system, _QUESTIONS)

    def _gold(self, row: Row) -> Gold:
        """Return the answer of the row, "" where a prompt has none. Raises BadRow."""
        gold = next((row.fields[name] for name in GOLDS if row.has(name)), None)
        if gold is None:
            if row.has("question") or not row.has("prompt"):
                raise BadRow(f'the row has no answer: it needs one of {", ".join(GOLDS)} ("" where nobody knows it)')
            return ""
        if isinstance(gold, int | float) and not isinstance(gold, bool):
            return str(gold)
        if isinstance(gold, str):
            return self._answer(gold)
        if isinstance(gold, list) and all(isinstance(one, str) for one in gold):
            return [*map(self._answer, gold)]
        raise BadRow(f"the answer must be a text, a number or a list of texts, got {str(gold)[:60]!r}")

    def _answer(self, gold: str) -> str:
        """Return what follows the last `####` that begins a line, the whole text where there is none. Raises BadRow
        where nothing follows, or no number where numbers are compared."""
        marked = _MARKED.findall(gold)
        if not marked:
            return gold
        is_number = self.kind == "marked_number"
        answer = extract_marked_number(f"####{marked[-1]}") if is_number else marked[-1].strip()
        if not answer:
            raise BadRow(f"the answer has {'no number' if is_number else 'nothing'} behind its last ####")
        return answer

    def _named(self, problem: Problem, split: str, index: int, taken: set[str]) -> Problem:
        """Return the problem as it is; one without an id is called by its row's number. Raises BadRow on an id that
        another line has."""
        if not problem.id:
            return super()._named(problem, split, index, taken)
        if problem.id in taken:
            raise BadRow(f"the id {problem.id!r} is that of another line: give every line one of its own")
        taken.add(problem.id)
        return problem


def _places(problem: Problem) -> set[str]:
    return {repr(place) for place in range(len(problem.options))}
