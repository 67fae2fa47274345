"""Questions with short answers whose calibration is measured out of domain: SciQ, BioASQ and Jeopardy.

**SciQ** (Welbl et al. 2017): one JSON array, `question`, `correct_answer`, `distractor1` to `3`, `support`; asked here
without its options. **BioASQ** (Krithara et al. 2023): an object whose `questions` hold `id`, `type`, `body`,
`exact_answer`; only factoid questions are read, whose exact answer is a list of names, or of lists of names for one
thing each. **Jeopardy**: one JSON array of clues, `category`, `question` (between apostrophes), `answer`, `round`,
`value`; an answer may hold an alternative in brackets, "(or …)", or a word that need not be said, "(the)".
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from espalier.data.records import Problem
from espalier.data.sources import BadRow, Row, read_json_rows
from espalier.data.tasks.published import PublishedTask

_BRACKET = re.compile(r"\s*\(([^()]*)\)\s*")


@dataclass(frozen=True)
class SciQ(PublishedTask):
    """Science exam questions; `info`: "support" (a passage), "incorrect_answers"."""

    kind: str = "short_answer"

    name = "sciq"
    files: ClassVar[Mapping[str, tuple[str, ...]]] = {
        split: (f"{title}.json", f"sciq/{title}.json", f"SciQ dataset-2 3/{title}.json")
        for split, title in (("train", "train"), ("dev", "valid"), ("test", "test"))
    }

    def problem(self, row: Row) -> Problem:
        """Read a row. Raises BadRow where a field is missing."""
        wrong = [row.text(f"distractor{number}") for number in (1, 2, 3)]
        info: dict[str, Any] = {"support": row.text("support", default=""), "incorrect_answers": wrong}
        return Problem("", row.text("question"), [row.text("correct_answer")], info)


@dataclass(frozen=True)
class BioASQ(PublishedTask):
    """Factoid questions of biomedical experts; other types of questions are left out. Linguistic calibration is tested
    on the training file of Task 12b."""

    kind: str = "short_answer"

    name = "bioasq"
    files: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "train": ("training12b_new.json", "BioASQ-training12b/training12b_new.json"),
        "test": ("12B1_golden.json", "Task12BGoldenEnriched/12B1_golden.json"),
    }

    def read_file(self, path: Path) -> list[Row]:
        """Return the rows under `questions`."""
        return read_json_rows(path, under="questions")

    def expand(self, row: Row) -> list[Row]:
        """Return the row of a factoid question, none of another type. A type that is missing is left to `problem`."""
        return [row] if row.fields.get("type", "factoid") == "factoid" else []

    def problem(self, row: Row) -> Problem:
        """Read a row; every name of every exact answer is right. Raises BadRow where there is none."""
        if row.text("type") != "factoid":
            raise BadRow("is no factoid question")
        return Problem(row.text("id"), row.text("body"), _names(row.fields.get("exact_answer")))


@dataclass(frozen=True)
class Jeopardy(PublishedTask):
    """Clues of the quiz show; `info`: "subject" (the category), "level" (the round), "value"."""

    kind: str = "short_answer"

    name = "jeopardy"
    files: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "test": ("JEOPARDY_QUESTIONS1.json", "jeopardy/JEOPARDY_QUESTIONS1.json"),
    }

    def problem(self, row: Row) -> Problem:
        """Read a row. Raises BadRow where the clue or the answer is missing."""
        clue = row.text("question")
        if clue[:1] == clue[-1:] == "'" and len(clue) > 2:
            clue = clue[1:-1].strip()
        info = {"subject": row.text("category"), "level": row.text("round", default=""),
                "value": row.text("value", default="")}  # fmt: skip
        return Problem("", clue, accepted_answers(row.text("answer")), info)


def accepted_answers(answer: str) -> list[str]:
    """Return what a published answer accepts: itself without brackets, what "(or …)" names, and both with and without a
    word in brackets."""
    plain = " ".join(_BRACKET.sub(" ", answer).split())
    found = [plain] if plain else []
    for inside in _BRACKET.findall(answer):
        if inside.strip().lower().startswith("or "):
            found.append(inside.strip()[3:].strip())
        else:
            found.append(" ".join(_BRACKET.sub(lambda match: f" {match.group(1)} ", answer).split()))
    return list(dict.fromkeys(one for one in found if one)) or [answer]


def _names(answers: Any) -> list[str]:
    rows = answers if isinstance(answers, list) else [answers]
    names = [name for row in rows for name in (row if isinstance(row, list) else [row])]
    if not names or not all(isinstance(name, str) and name.strip() for name in names):
        raise BadRow("exact_answer must be a list of names, or of lists of them")
    return list(dict.fromkeys(name.strip() for name in names))
