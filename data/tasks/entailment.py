"""LogiQA 2.0 as entailment (Liu et al. 2023; csitfun/LogiQA2.0, logiqa2nli): premises and a conclusion.

JSON lines in `.txt`, in two layouts. The first: `label` ("entailed" or "not entailed"), `major_premise` (a string or a
list of strings), `minor_premise`, `conclusion`. A premise may be empty, or a list without any or with empty ones: what
is left must be one premise at least. The newer one (`*_new.txt`): `id`, `label` ("entailment" or "not-entailment"),
`premise` (one text), `hypothesis`, `type` {name: true}. A row is read as what it is. It is asked as a choice between
the two labels of the first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from espalier.data.records import Problem
from espalier.data.sources import BadRow, Row
from espalier.data.tasks.logical_reading import kinds_of_reasoning
from espalier.data.tasks.published import PublishedTask, letter_of

LABELS = ["entailed", "not entailed"]
_SPELLINGS = {"entailed": 0, "entailment": 0, "not entailed": 1, "not-entailed": 1, "not-entailment": 1}


@dataclass(frozen=True)
class LogiQANLI(PublishedTask):
    """The context is the premises, one a line; the question is the conclusion; A is "entailed"."""

    name = "logiqa2_nli"
    files: ClassVar[Mapping[str, tuple[str, ...]]] = {
        split: (
            f"logiqa2nli/DATA/QA2NLI/{split}.txt", f"QA2NLI/{split}.txt", f"nli_{split}.txt",
            f"nli_{split}_sample.txt", f"logiqa2/nli_{split}_sample.txt",
        )
        for split in ("train", "dev", "test")
    }  # fmt: skip

    def problem(self, row: Row) -> Problem:
        """Read a row; `info`: "premises", major before minor, and "subject", the kinds of reasoning, if there are any.

        Raises BadRow where there is no premise, or the label is not one of the published spellings.
        """
        premises = [part for name in ("major_premise", "minor_premise", "premise") for part in _premises(row, name)]
        if not premises:
            raise BadRow("the row has no premise: major_premise, minor_premise and premise are empty")
        label = row.text("label")
        if label not in _SPELLINGS:
            raise BadRow(
                f"label must be 'entailed' or 'not entailed' (or 'entailment', 'not-entailment'), got {label!r}"
            )
        gold = letter_of(_SPELLINGS[label], 2)
        info: dict[str, Any] = {"premises": premises}
        types = kinds_of_reasoning(row)
        if types:
            info["subject"] = types
        published = str(row.integer("id")) if row.has("id") else ""
        conclusion = row.text("hypothesis" if row.has("hypothesis") else "conclusion")
        return Problem(published, conclusion, gold, info, "\n".join(premises), list(LABELS))


def _premises(row: Row, name: str) -> list[str]:
    """Return the premises of one kind that are not empty."""
    value = row.fields.get(name)
    parts = value if isinstance(value, list) else [row.text(name, default="")]
    if not all(isinstance(part, str) for part in parts):
        raise BadRow(f"{name} must be a string or a list of strings, got {value!r}")
    return [part.strip() for part in parts if part.strip()]
