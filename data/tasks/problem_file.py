"""Problems of one's own: rows of `Problem` (data/records.py), as `problems/list_problems` writes them, or of prompts.

`path` is the file, or a folder with `{train,dev,test}.jsonl`, `.json` or `.parquet`. Ids are kept as they are and must
be unique. `kind` says how answers are compared; worked solutions are in `info["solution"]`.

A row of prompts has the column `prompt`, a text or chat turns of which one is the user's (TRL's prompt-only layout),
and no `question`. Its gold is `gold`, `answer` or `ground_truth` where it has one, else "": answers to it are read, and
never right. Of a worked solution the gold is what follows the last `####` that begins a line, as in GSM8K. Without an
`id` it is called by the number of its row. `info`, `context` and `options` are those of a `Problem`.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from espalier.data.answers.numbers import extract_marked_number
from espalier.data.records import BadInput, Problem, parse_record
from espalier.data.sources import BadRow, Row
from espalier.data.tasks.published import PublishedTask
from espalier.data.tasks.verifiable import GOLDS, read_question

log = logging.getLogger(__name__)
_MARKED = re.compile(r"^####(.*)$", re.MULTILINE)


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
        is_prompt = row.has("prompt") and not row.has("question")
        try:
            problem = parse_record(Problem, self._prompt(row) if is_prompt else row.fields, "")
        except BadInput as error:
            remedy = ": give the column another name if it is none of a problem's" if is_prompt else ""
            raise BadRow(str(error).removeprefix(": ") + remedy) from None
        if not problem.id and not is_prompt:
            raise BadRow("the id is empty: give every line one of its own")
        order = problem.info.get("option_order")
        if order is not None and (not isinstance(order, list) or {*map(repr, order)} != _places(problem)):
            raise BadRow(f"info.option_order must hold the place of every option once, got {order!r}")
        return problem

    def _prompt(self, row: Row) -> dict[str, Any]:
        """Return the fields of the problem of a row of prompts. Raises BadRow."""
        identity = row.fields.get("id")
        is_name = isinstance(identity, str | int) and not isinstance(identity, bool)
        gold = next((row.fields[name] for name in GOLDS if row.has(name)), "")
        if isinstance(gold, int | float) and not isinstance(gold, bool):
            gold = str(gold)
        if not isinstance(gold, str) and not (isinstance(gold, list) and all(isinstance(one, str) for one in gold)):
            raise BadRow(f"the answer must be a text, a number or a list of texts, got {str(gold)[:60]!r}")
        gold = self._answer(gold) if isinstance(gold, str) else [*map(self._answer, gold)]
        question = read_question(row, self.template.system, ("prompt",))
        if isinstance(row.fields["prompt"], str):
            question = row.fields["prompt"]  # as it stands: a base model goes on behind its last space or newline
        more = {name: row.fields[name] for name in ("info", "context", "options") if row.has(name)}
        return {"id": str(identity) if is_name else "", "question": question, "gold": gold, **more}

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
