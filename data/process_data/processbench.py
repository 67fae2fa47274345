"""ProcessBench (Zheng et al. 2024): one JSON array of `id`, `generator`, `problem`, `steps`,
`final_answer_correct`, `label`.

`label` is the 0-based index of the earliest wrong step, -1 where there is none. Steps after it were not
judged. The steps are a list of paragraphs; a text is made of them with blank lines between. The subset
(`gsm8k`, `math`, ...) is written in the id before its number, and is the group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from espalier.data.process_data.annotations import labels_up_to, own_extra, plain_steps, the_only
from espalier.data.process_data.published import JsonRow, problem_key, take_known
from espalier.data.records import AnnotatedSolution, BadInput


@dataclass(frozen=True)
class ProcessBenchRow:
    """The columns that are read."""

    id: str
    generator: str
    problem: str
    steps: list[str]
    final_answer_correct: bool | None
    label: int


@dataclass(frozen=True)
class ProcessBench:
    """One record a row; its id is the published one."""

    name = "processbench"
    is_array = True

    def read(self, row: JsonRow, key: str, place: str) -> list[AnnotatedSolution]:
        """Raises BadInput where the label names no step."""
        known, extra = take_known(ProcessBenchRow, row, place)
        if not -1 <= known.label < len(known.steps):
            raise BadInput(f"{place}: label must be -1 or a step of 0..{len(known.steps) - 1}, got {known.label}")
        copy = key.partition("~")[2]
        record = AnnotatedSolution(
            id=f"processbench-{known.id}" + (f"~{copy}" if copy else ""),
            problem_id=problem_key(known.problem),
            question=known.problem,
            steps=known.steps,
            labels=labels_up_to(known.label, len(known.steps)),
            first_error=known.label,
            is_correct=known.final_answer_correct,
            info={
                "format": self.name,
                "row": key,
                "separator": "\n\n",
                "group": known.id.rpartition("-")[0] or known.id,
                "published_id": known.id,
                "generator": known.generator,
                "extra": extra,
            },
        )
        return [record]

    def write(self, records: Sequence[AnnotatedSolution], place: str) -> JsonRow:
        """Make the row of one record. Raises BadInput where its first error is not known, or there are more records."""
        record = the_only(records, place)
        if record.first_error is None:
            raise BadInput(f"{place}: its first error is not known: processbench cannot hold it; leave it out")
        known = ProcessBenchRow(
            id=record.info.get("published_id", record.id),
            generator=record.info.get("generator", ""),
            problem=record.question,
            steps=plain_steps(record, self.name),
            final_answer_correct=record.is_correct,
            label=record.first_error,
        )
        return {**vars(known), **own_extra(record, self.name)}
