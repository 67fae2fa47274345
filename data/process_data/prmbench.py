"""PRMBench (Song et al. 2025): JSON lines of a right process and one with errors of one class planted in it.

`error_steps` are **1-based** and some lie beyond the end of `modified_process`: those name no step and are only
kept. A row gives two records: `{key}/modified`, whose error steps have label 0 and all others 1, and
`{key}/original`, all of whose steps are right; `info["pair"]` joins them and `info["is_chosen"]` marks the
original. A modified process whose error steps all lie beyond its end has no known first error; its steps
count as right, as in the published evaluation. `idx` names the problem and repeats over the classes, so a
row's key is `idx` and `classification`. The group is the class, in the published spelling (`redundency`).
Processes are lists; a text is made of them with newlines between.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from espalier.data.process_data.published import JsonRow, take_known
from espalier.data.records import AnnotatedSolution, BadInput


@dataclass(frozen=True)
class PRMBenchRow:
    """The columns that are read; `modified_steps`, `reason` and `question` are only kept."""

    original_question: str
    modified_question: str
    original_process: list[str]
    modified_process: list[str]
    error_steps: list[int]
    classification: str
    idx: str


@dataclass(frozen=True)
class PRMBench:
    """Two records a row, the modified process first."""

    name = "prmbench"
    is_array = False

    def read(self, row: JsonRow, key: str, place: str) -> list[AnnotatedSolution]:
        """Raises BadInput where an error step is below 1."""
        known, extra = take_known(PRMBenchRow, row, place)
        if min(known.error_steps, default=1) < 1:
            raise BadInput(f"{place}: error_steps are counted from 1, got {min(known.error_steps)}")
        num_steps = len(known.modified_process)
        wrong = {step - 1 for step in known.error_steps if step <= num_steps}
        first_error = min(wrong) if wrong else None if known.error_steps else -1
        copy = key.partition("~")[2]
        row_id = f"prmbench-{known.idx}-{known.classification}" + (f"~{copy}" if copy else "")
        shared: dict[str, Any] = {"format": self.name, "row": row_id, "separator": "\n", "pair": row_id}
        modified = AnnotatedSolution(
            id=f"{row_id}/modified",
            problem_id=f"prmbench-{known.idx}",
            question=known.modified_question,
            steps=known.modified_process,
            labels=[float(step not in wrong) for step in range(num_steps)],
            first_error=first_error,
            is_correct=None,
            info={
                **shared,
                "group": known.classification,
                "is_chosen": False,
                "idx": known.idx,
                "error_steps": known.error_steps,
                "num_errors_beyond_end": sum(step > num_steps for step in known.error_steps),
                "extra": extra,
            },
        )
        original = AnnotatedSolution(
            id=f"{row_id}/original",
            problem_id=f"prmbench-{known.idx}",
            question=known.original_question,
            steps=known.original_process,
            labels=[1.0] * len(known.original_process),
            first_error=-1,
            is_correct=True,
            info={**shared, "group": "original", "is_chosen": True},
        )
        return [modified, original]

    def write(self, records: Sequence[AnnotatedSolution], place: str) -> JsonRow:
        """Make a row from both records that were read from it.

        Raises BadInput where one is missing, or the labels are not those of `error_steps`.
        """
        sides = {record.id.rpartition("/")[2]: record for record in records}
        if len(records) != 2 or sides.keys() != {"modified", "original"}:
            raise BadInput(f"{place}: prmbench wants the two records of a row, modified and original, "
                           f"got {', '.join(record.id for record in records)}: export them together")  # fmt: skip
        modified, original = sides["modified"], sides["original"]
        known = PRMBenchRow(
            original_question=original.question,
            modified_question=modified.question,
            original_process=original.steps,
            modified_process=modified.steps,
            error_steps=modified.info["error_steps"],
            classification=modified.info["group"],
            idx=modified.info["idx"],
        )
        wrong = set(known.error_steps)
        if modified.labels != [float(step + 1 not in wrong) for step in range(len(modified.steps))]:
            raise BadInput(f"{place}: its labels are not those of error_steps: export it as trl or processbench")
        return {**vars(known), **modified.info["extra"]}
