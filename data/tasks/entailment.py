"""LogiQA 2.0 as entailment (Liu et al. 2023; csitfun/LogiQA2.0, logiqa2nli): premises and a conclusion.

JSON lines in `.txt`: `label` ("entailed" or "not entailed"), `major_premise` (a string or a list of strings),
`minor_premise`, `conclusion`. A premise may be empty, or a list without any or with empty ones: what is left must be
one premise at least. It is asked as a choice between the two labels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from data.records import Problem
from data.sources import BadRow, Row
from data.tasks.published import PublishedTask, letter_of

LABELS = ["entailed", "not entailed"]


@dataclass(frozen=True)
class LogiQANLI(PublishedTask):
    """The context is the premises, one a line; the question is the conclusion; A is "entailed"."""

    name = "logiqa2_nli"
    files: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "train": ("logiqa2nli/DATA/QA2NLI/train.txt", "QA2NLI/train.txt", "nli_train.txt"),
        "dev": (
            "logiqa2nli/DATA/QA2NLI/dev.txt", "QA2NLI/dev.txt", "nli_dev.txt",
            "nli_dev_sample.txt", "logiqa2/nli_dev_sample.txt",
        ),
        "test": ("logiqa2nli/DATA/QA2NLI/test.txt", "QA2NLI/test.txt", "nli_test.txt"),
    }  # fmt: skip

    def problem(self, row: Row) -> Problem:
        """`info["premises"]` lists the premises, major before minor."""
        premises = [*_premises(row, "major_premise"), *_premises(row, "minor_premise")]
        if not premises:
            raise BadRow("major_premise and minor_premise are both empty")
        label = row.text("label")
        if label not in LABELS:
            raise BadRow(f"label must be 'entailed' or 'not entailed', got {label!r}")
        gold = letter_of(LABELS.index(label), 2)
        return Problem("", row.text("conclusion"), gold, {"premises": premises}, "\n".join(premises), list(LABELS))


def _premises(row: Row, name: str) -> list[str]:
    """The premises of one kind that are not empty."""
    value = row.fields.get(name)
    parts = value if isinstance(value, list) else [row.text(name, default="")]
    if not all(isinstance(part, str) for part in parts):
        raise BadRow(f"{name} must be a string or a list of strings, got {value!r}")
    return [part.strip() for part in parts if part.strip()]
