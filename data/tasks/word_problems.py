"""Word problems with a number at the end: SVAMP (Patel et al. 2021) and ASDiv (Miao et al. 2020).

Both are published as a scene and a question about it, as JSON lines or one JSON array. They are evaluation sets:
what is published as one file is the test split.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import ClassVar

from espalier.data.answers.grade import Gold
from espalier.data.records import Problem
from espalier.data.sources import BadRow, Row
from espalier.data.tasks.published import PublishedTask

_UNIT = re.compile(r"(.*\S)\s+\((.*)\)", re.DOTALL)
_MISSPELT = {"Common-Divison": "Common-Division"}


def join_scene(scene: str, question: str) -> str:
    """Return the scene and its question as one text; a full stop between them where the scene lacks its own."""
    needs_stop = scene[-1:].isalnum() and question[:1].isupper()
    return f"{scene}. {question}" if needs_stop else f"{scene} {question}".strip()


def plain_number(text: str) -> str | None:
    """Return a number without thousands commas and without `.0`; None where the text is not one number."""
    try:
        number = Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None
    if not number.is_finite() or abs(number.adjusted()) > 30:
        return None
    return str(int(number)) if number == number.to_integral_value() else format(number.normalize(), "f")


@dataclass(frozen=True)
class SVAMP(PublishedTask):
    """Rows `Body`, `Question`, `Equation`, `Answer` (145.0 or "145.0"), `Type`, `ID`."""

    kind: str = "response_number"

    name = "svamp"
    files: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "test": ("svamp.jsonl", "math_ood/svamp.jsonl", "data/svamp/test.jsonl", "SVAMP.json"),
    }
    hub_splits: ClassVar[Mapping[str, str]] = {"train": "train", "test": "test"}

    def problem(self, row: Row) -> Problem:
        """Read a row; `info`: "subject" (the operation, its one misspelling corrected), "equation".

        Raises BadRow where Answer is not a number.
        """
        value = row.fields.get("Answer")
        gold = plain_number(str(value)) if isinstance(value, str | int | float) else None
        if gold is None or isinstance(value, bool):
            raise BadRow(f"Answer must be a number, got {value!r}")
        operation = row.text("Type", default="")
        info = {"subject": _MISSPELT.get(operation, operation), "equation": row.text("Equation", default="")}
        question = join_scene(row.text("Body"), row.text("Question"))
        return Problem(row.text("ID", default=""), question, gold, info)


@dataclass(frozen=True)
class ASDiv(PublishedTask):
    """Rows `body`, `question`, `solution_type`, `answer`, `formula`, `idx`.

    `answer` is `9 (apples)`: the unit goes to `info["unit"]`. Golds that are not one number (names, times, ratios,
    fractions) are compared as `kind_of` says.
    """

    kind: str = "response_number"

    name = "asdiv"
    files: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "test": ("asdiv.jsonl", "math_ood/asdiv.jsonl", "data/asdiv/test.jsonl"),
    }
    hub_splits: ClassVar[Mapping[str, str]] = {"test": "validation"}

    def problem(self, row: Row) -> Problem:
        """`info`: "subject" (the kind of solution), "unit" ("" for none), "formula"."""
        answer = row.text("answer")
        match = _UNIT.fullmatch(answer)
        gold, unit = (match[1], match[2].strip()) if match else (answer, "")
        info = {
            "subject": row.text("solution_type", default=""),
            "unit": unit,
            "formula": row.text("formula", default=""),
        }
        return Problem("", join_scene(row.text("body"), row.text("question")), plain_number(gold) or gold, info)

    def kind_of(self, gold: Gold) -> str:
        """Return numbers as `kind` says, fractions by value, all else as short answers."""
        if not isinstance(gold, str) or plain_number(gold) is not None:
            return self.kind
        is_fraction = re.fullmatch(r"-?\(?\d+/\d+\)?", gold) is not None
        return "response_math" if is_fraction else "short_answer"
