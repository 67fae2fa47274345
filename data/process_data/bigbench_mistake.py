"""BIG-Bench-Mistake (Tyen et al. 2024): JSON lines of `input`, `steps`, `target`, `answer`, `mistake_index`.

`mistake_index` is the 0-based index of the first mistake, null where no step is wrong; steps after it were not
judged. Some rows have no mistake index and yet another final answer than `target`: they are kept as they are
published, and `info["defect"]` says so. The steps are a list; a text is made of them with newlines between.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from espalier.data.process_data.annotations import labels_up_to, own_extra, plain_steps, the_only
from espalier.data.process_data.published import JsonRow, problem_key, take_known
from espalier.data.records import AnnotatedSolution, BadInput

DEFECT = "the final answer is wrong and no step is said to be"


@dataclass(frozen=True)
class BigBenchMistakeRow:
    """The columns that are read."""

    input: str
    steps: list[str]
    target: str
    answer: str | None
    mistake_index: int | None


@dataclass(frozen=True)
class BigBenchMistake:
    """One record a row. The final answer is right where it equals the target but for white space around it."""

    name = "bigbench_mistake"
    is_array = False

    def read(self, row: JsonRow, key: str, place: str) -> list[AnnotatedSolution]:
        """Raises BadInput where the mistake index names no step."""
        known, extra = take_known(BigBenchMistakeRow, row, place)
        first_error = -1 if known.mistake_index is None else known.mistake_index
        if known.mistake_index is not None and not 0 <= first_error < len(known.steps):
            raise BadInput(f"{place}: mistake_index must be null or a step of 0..{len(known.steps) - 1}, "
                           f"got {first_error}")  # fmt: skip
        is_correct = known.answer is not None and known.answer.strip() == known.target.strip()
        info: dict[str, Any] = {
            "format": self.name,
            "row": key,
            "separator": "\n",
            "answer": known.answer,
            "target": known.target,
            "extra": extra,
        }
        if first_error < 0 and not is_correct:
            info["defect"] = DEFECT
        record = AnnotatedSolution(
            id=f"bigbench_mistake-{key}",
            problem_id=problem_key(known.input),
            question=known.input,
            steps=known.steps,
            labels=labels_up_to(first_error, len(known.steps)),
            first_error=first_error,
            is_correct=is_correct,
            gold=known.target.strip(),
            info=info,
        )
        return [record]

    def write(self, records: Sequence[AnnotatedSolution], place: str) -> JsonRow:
        """Make the row of one record; `answer` is null where it is not known.

        Raises BadInput where its first error is not known, or there are more records.
        """
        record = the_only(records, place)
        if record.first_error is None:
            raise BadInput(f"{place}: its first error is not known: bigbench_mistake cannot hold it; leave it out")
        known = BigBenchMistakeRow(
            input=record.question,
            steps=plain_steps(record, self.name),
            target=record.info.get("target", record.gold),
            answer=record.info.get("answer"),
            mistake_index=None if record.first_error < 0 else record.first_error,
        )
        return {**vars(known), **own_extra(record, self.name)}
