"""Grade predictions of any origin: the way to audit the grader.

Input rows `{id, prediction, gold, kind}` (`num_options` for `choice`), output rows `{id, verdict, extracted,
reason, seconds}` in the same order; the kinds are those of data/answers/grading.py. `seconds` is the wall
clock of one row, the symbolic workers already running.
"""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from espalier.data.answers.grade import Gold
from espalier.data.answers.grading import KINDS, grade_answer
from espalier.data.answers.pool import POOL
from espalier.data.jsonl import read_records
from espalier.data.records import BadInput
from espalier.pipeline.stage import StageContext


@dataclass(frozen=True)
class AnswerToGrade:
    """A row to grade; a null prediction or gold is unparseable."""

    id: str | int
    """any; it is written beside the grade"""
    prediction: str | None
    """the answer, or the whole response, as the kind reads it"""
    gold: Gold | None
    """the right answer, or several"""
    kind: str
    """kind of answer (docs/grading.md)"""
    num_options: int = 0
    """number of options of a choice"""
    expected: Any = None
    """of case files; not read"""
    source: Any = None
    """of case files; not read"""
    note: Any = None
    """of case files; not read"""


@dataclass(frozen=True)
class GradedAnswer:
    """The grade of a row."""

    id: str | int
    """the row's"""
    verdict: str
    """right, wrong or unparseable"""
    extracted: str | None
    """what was read; null where unparseable"""
    reason: str
    """why"""
    seconds: float
    """what grading took"""


@dataclass(frozen=True)
class GradeAnswers:
    """Grades every row; counts verdicts by kind."""

    kinds: tuple[str, ...] = field(default=KINDS, init=False)

    def inputs(self) -> list[str]:
        """Nothing but the input."""
        return []

    def run(self, input_path: str, context: StageContext) -> Iterator[Any]:
        """Yield `GradedAnswer` rows. Raises BadInput where there is no row, or one has a kind that does not exist."""
        rows = read_records(AnswerToGrade, input_path)
        if not rows:
            raise BadInput(f"{input_path}: holds no row to grade")
        unknown = next((row for row in rows if row.kind not in KINDS), None)
        if unknown is not None:
            raise BadInput(f"{input_path}: row '{unknown.id}': no kind '{unknown.kind}': use one of {', '.join(KINDS)}")
        POOL.start()
        verdicts: Counter[str] = Counter()
        with context.progress("grade", len(rows), "answer") as progress:
            for number, row in enumerate(rows, 1):
                started = time.perf_counter()
                grade = grade_answer(
                    prediction=row.prediction or "", gold=row.gold or "", kind=row.kind, num_options=row.num_options
                )
                seconds = time.perf_counter() - started
                verdicts[grade.verdict] += 1
                progress.update(number)
                yield GradedAnswer(row.id, grade.verdict, grade.answer, grade.reason, round(seconds, 6))
        context.counts.update(verdicts)
        context.counts["unparseable_rate"] = round(verdicts["unparseable"] / max(len(rows), 1), 5)
