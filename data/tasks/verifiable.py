"""Problems whose answers are checked by verifiers (docs/verifiers.md): rows that name them, of any source.

A row asks by `question`, `problem`, `prompt` (a text, or chat turns) or `messages` (a last turn of the assistant is
left out), and names its verifiers by

    verifiers: [{"name": "gsm8k", "ground_truth": "18", "weight": 1.0}]      as a list or its JSON text
    dataset: "gsm8k", ground_truth: "18"                                     one of each, or a list of each, as long
    answer, gold or ground_truth, beside task.verifier=gsm8k                 one verifier for every row

Files are JSON lines, JSON or Parquet. A row's `id` is kept where all have one; else it is made of the row's number.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from espalier.data.records import Problem
from espalier.data.sources import BadRow, Row
from espalier.data.tasks.published import PublishedTask
from espalier.data.verifiers.verify import Check, is_never_right, write_checks

log = logging.getLogger(__name__)
_QUESTIONS = ("question", "problem", "prompt", "messages")
_UNGRADED = "is_never_right"
GOLDS = ("ground_truth", "gold", "answer")


@dataclass(frozen=True)
class VerifiableProblems(PublishedTask):
    """`verifier`: of rows that name none; `rename`: name in the data, in any case of letters → verifier (`{ifeval_old:
    ifeval}`)."""

    kind: str = "verifiers"
    verifier: str = ""
    rename: Mapping[str, str] = field(default_factory=dict)
    _read: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    """the names that rows were read with, in small letters"""

    name = "verifiable"
    remedy: ClassVar[str] = "a row needs a question and its verifiers (docs/verifiers.md), or set task.verifier=NAME"
    files: ClassVar[Mapping[str, tuple[str, ...]]] = {
        split: (f"{split}.jsonl", f"{split}.json", f"{split}.parquet") for split in ("train", "dev", "test")
    }

    def problems(self, split: str) -> list[Problem]:
        """Return the problems of a split; one line says how many of them no text can answer, and one which names of
        `rename` no row has."""
        found = super().problems(split)
        num = sum(bool(problem.info.get(_UNGRADED)) for problem in found)
        if num:
            log.warning("%s/%s: %d of %d rows have no verifier of a weight above 0 that judges a text: "
                        "reward=verifiers scores them, and no response to them is ever graded right",
                        self.name, split, num, len(found))  # fmt: skip
        if idle := [name for name in self.rename if name.lower() not in self._read]:
            log.warning("%s/%s: task.rename names verifiers that no row has: %s (rows have %s)", self.name, split,
                        ", ".join(idle), ", ".join(sorted(self._read)) or "none")  # fmt: skip
        return found

    def problem(self, row: Row) -> Problem:
        """Read a row; `info["subject"]` is its source where the row says it, else the names of its verifiers.

        Raises BadRow on a verifier that does not exist, or whose ground truth is no use.
        """
        checks = [replace(one, name=self._renamed(one.name)) for one in read_checks(row, self.verifier)]
        gold = write_checks(checks)
        info = {"subject": row.text("source", default="") or "+".join(dict.fromkeys(one.name for one in checks))}
        if is_never_right(gold):
            info[_UNGRADED] = "yes"
        identity = row.fields.get("id")
        named = str(identity) if isinstance(identity, str | int) and not isinstance(identity, bool) else ""
        return Problem(named, read_question(row, self.template.system), gold, info)

    def _renamed(self, name: str) -> str:
        self._read.add(name.lower())
        return next((new for old, new in self.rename.items() if old.lower() == name.lower()), name)

    def _named(self, problem: Problem, split: str, index: int, taken: set[str]) -> Problem:
        """Return the problem with its own id where it has one that is new, else with that of its row."""
        if not problem.id:
            return super()._named(problem, split, index, taken)
        if problem.id in taken:
            raise BadRow(f"the id {problem.id!r} is that of another row")
        taken.add(problem.id)
        return problem


def read_question(row: Row, system: str = "", names: Sequence[str] = _QUESTIONS) -> str:
    """Return what a row asks in the first of the columns `names` that it has: a text, or the one turn of a user, before
    which the row may hold the prompt's own turn of the `system`. Raises BadRow on none, or other turns."""
    name = next((name for name in names if row.has(name)), "")
    value = row.fields.get(name)
    if isinstance(value, str):
        return row.text(name)
    if not isinstance(value, list) or not all(isinstance(turn, Mapping) for turn in value):
        raise BadRow(f"the row asks nothing: it needs one of {', '.join(names)}")
    is_answered = name == "messages" and value and value[-1].get("role") == "assistant"
    turns = value[:-1] if is_answered else value
    if turns and turns[0].get("role") == "system" and turns[0].get("content") == system:
        turns = turns[1:]
    roles = [turn.get("role") for turn in turns]
    if roles != ["user"]:
        raise BadRow(f"{name} has the turns {', '.join(map(str, roles)) or 'none'}: one of the user is read, "
                     "and a system turn where task.template.system is the same text")  # fmt: skip
    question = turns[0].get("content")
    if not isinstance(question, str) or not question.strip():
        raise BadRow(f"the user's turn of {name} is empty")
    return question.strip()


def read_checks(row: Row, verifier: str = "") -> list[Check]:
    """Return the verifiers of a row, in one of the three forms of the module; `verifier` is that of a row that names
    none. Raises BadRow where there are none, or two lists differ in length."""
    given = row.fields.get("verifiers")
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            raise BadRow(f"verifiers are no JSON: {given[:40]!r}") from None
    if given is not None:
        if not isinstance(given, list) or not given:
            raise BadRow("verifiers must be a list of at least one")
        return [_as_check(one) for one in given]
    truth_name = next((name for name in GOLDS if name in row.fields), "")
    truth, names = row.fields.get(truth_name), row.fields.get("dataset")
    if names is None and verifier:
        names = verifier
    if names is None and truth_name == "gold" and isinstance(truth, str) and truth.startswith('[{"name"'):
        return [_as_check(one) for one in json.loads(truth)]  # a problem that was written by this task
    if names is None:
        raise BadRow(
            "the row names no verifier: it needs verifiers, or dataset and ground_truth, or task.verifier=NAME"
        )
    if isinstance(names, str):
        return [Check(names.lower(), truth)]
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise BadRow(f"dataset must be a name or a list of names, got {str(names)[:40]!r}")
    truths = truth if isinstance(truth, list) else [truth]
    if len(truths) != len(names):
        raise BadRow(f"dataset has {len(names)} names and {truth_name or 'ground_truth'} {len(truths)} values: as many")
    return [Check(name.lower(), one) for name, one in zip(names, truths, strict=True)]


def _as_check(value: Any) -> Check:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise BadRow(f"a verifier is an object with a name and a ground_truth, got {str(value)[:60]!r}")
    if strange := [key for key in value if key not in ("name", "ground_truth", "weight")]:
        raise BadRow(f"a verifier has name, ground_truth and weight, not '{strange[0]}'")
    return Check(value["name"], value.get("ground_truth"), value.get("weight", 1.0))
