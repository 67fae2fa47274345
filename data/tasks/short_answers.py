"""Questions with short free answers: NQ-open, TriviaQA, TruthfulQA. The gold is a list, any of which is right.

**NQ-open** (Kwiatkowski et al. 2019, Lee et al. 2019): JSON lines `question`, `answer` [..]; EfficientQA's dev set has
the same layout. **TriviaQA** (Joshi et al. 2017): an object whose `Data` holds `Question`, `QuestionId`, `Answer`
{`Value`, `Aliases`, …}; its test files have no `Answer`, so no gold. On the hub the names are in lower case.
**TruthfulQA** (Lin et al. 2022): CSV, `Question`, `Best Answer`, `Correct Answers`, `Incorrect Answers` joined by `; `
(an empty one is dropped), `Category`. Its published judges are models: comparing with the correct answers as short
answers, as here, is strict, and no figure of the paper.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from espalier.data.records import Problem
from espalier.data.sources import BadRow, Row, read_json_rows
from espalier.data.tables import read_csv_rows
from espalier.data.tasks.published import PublishedTask


@dataclass(frozen=True)
class NQOpen(PublishedTask):
    """NQ-open; "test" is EfficientQA's development set (version 1.1), which shares no question with dev."""

    kind: str = "short_answer"

    name = "nq_open"
    files: ClassVar[Mapping[str, tuple[str, ...]]] = {
        split: (title, f"qa_calibration/{title}", f"nq_open/{title}")
        for split, title in (
            ("train", "NQ-open.train.jsonl"),
            ("dev", "NQ-open.dev.jsonl"),
            ("test", "NQ-open.efficientqa.dev.1.1.jsonl"),
        )
    }
    hub_splits: ClassVar[Mapping[str, str]] = {"train": "train", "dev": "validation"}

    def problem(self, row: Row) -> Problem:
        """Return answers as published, each once."""
        return Problem("", row.text("question"), list(dict.fromkeys(row.texts("answer"))))


@dataclass(frozen=True)
class TriviaQA(PublishedTask):
    """TriviaQA, as questions alone: the evidence is not read. `source` "web", "wikipedia" or
    "unfiltered-web" names the files."""

    kind: str = "short_answer"
    source: str = "web"

    name = "triviaqa"
    files: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "train": ("SOURCE-train.json", "qa/SOURCE-train.json"),
        "dev": ("SOURCE-dev.json", "qa/SOURCE-dev.json", "triviaqa_sample.json", "qa_calibration/triviaqa_sample.json"),
        "test": ("SOURCE-test-without-answers.json", "qa/SOURCE-test-without-answers.json"),
    }

    def places(self, split: str) -> tuple[str, ...]:
        """Return the published names of the source."""
        return tuple(place.replace("SOURCE", self.source) for place in super().places(split))

    def read_file(self, path: Path) -> list[Row]:
        """Return the rows under `Data`."""
        return read_json_rows(path, under="Data")

    def problem(self, row: Row) -> Problem:
        """Read the value and its aliases, each once; without an answer ("<unk>" on the hub) the gold is "".

        Raises BadRow where the answer is not an object.
        """
        row = replace(row, fields={name.lower().replace("_", ""): value for name, value in row.fields.items()})
        answer = row.fields.get("answer")
        published = row.text("questionid", default="")
        if answer is None:
            return Problem(published, row.text("question"), "")
        if not isinstance(answer, dict):
            raise BadRow(f"Answer must be an object, got {answer!r}")
        parts = replace(row, fields={name.lower(): value for name, value in answer.items()})
        value = parts.text("value")
        if value == "<unk>":
            return Problem(published, row.text("question"), "")
        aliases = _answers(parts, "aliases") if parts.fields.get("aliases") else []
        return Problem(published, row.text("question"), list(dict.fromkeys([value, *aliases])))


@dataclass(frozen=True)
class TruthfulQA(PublishedTask):
    """TruthfulQA, generation: an evaluation set, so its one file is the test split."""

    kind: str = "short_answer"

    name = "truthfulqa"
    files: ClassVar[Mapping[str, tuple[str, ...]]] = {"test": ("TruthfulQA.csv", "qa_calibration/TruthfulQA.csv")}
    hub_splits: ClassVar[Mapping[str, str]] = {"test": "validation"}

    def read_file(self, path: Path) -> list[Row]:
        """Return CSV."""
        return read_csv_rows(path)

    def problem(self, row: Row) -> Problem:
        """Return the best answer first, then the other correct ones; `info`: "subject" (the category), "type",
        "incorrect_answers"."""
        row = replace(row, fields={name.lower().replace(" ", "_"): value for name, value in row.fields.items()})
        correct = _answers(row, "correct_answers")
        info: dict[str, Any] = {
            "subject": row.text("category", default=""),
            "type": row.text("type", default=""),
            "incorrect_answers": _answers(row, "incorrect_answers"),
        }
        return Problem("", row.text("question"), list(dict.fromkeys([row.text("best_answer"), *correct])), info)


def _answers(row: Row, name: str) -> list[str]:
    """Return a list of strings, or the parts of one string between semicolons; empty ones are dropped, one must be
    left."""
    value = row.fields.get(name)
    parts = value if isinstance(value, list) else row.text(name).split(";")
    if not all(isinstance(part, str) for part in parts):
        raise BadRow(f"{name} must be a list of strings")
    answers = [part.strip() for part in parts if part.strip()]
    if not answers:
        raise BadRow(f"{name} holds no answer")
    return answers
