"""TRL's stepwise supervision: `prompt`, `completions` (one a step), `labels` (one a step, bool or in [0, 1]).

TRL puts a separator after each completion, a newline by default, and so does a text made of them
here. The first error is known where every label is 0 or 1 (or a bool); between them it is a matter of taste.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from espalier.data.process_data.annotations import check_lengths, first_zero, judged_part, own_extra, the_only
from espalier.data.process_data.published import JsonRow, problem_key, take_known
from espalier.data.records import AnnotatedSolution, BadInput


@dataclass(frozen=True)
class TRLRow:
    """The columns that are read."""

    prompt: str
    completions: list[str]
    labels: list[bool | float]


def _kind_of(labels: Sequence[bool | float], place: str) -> str:
    """ "bool", "int" or "float". Raises BadInput on a mixture with bools and on a label outside [0, 1]."""
    kinds = {type(label).__name__ for label in labels}
    if len(kinds) > 1 and "bool" in kinds:
        raise BadInput(f"{place}: labels must be all bools or all numbers, got both")
    if strange := [label for label in labels if not 0 <= label <= 1]:
        raise BadInput(f"{place}: labels must lie in [0, 1], got {strange[0]}: end the solution before a step that "
                       "nobody judged")  # fmt: skip
    return kinds.pop() if len(kinds) == 1 else "float" if kinds else "bool"


@dataclass(frozen=True)
class TRLStepwise:
    """One record a row."""

    name = "trl"
    is_array = False

    def read(self, row: JsonRow, key: str, place: str) -> list[AnnotatedSolution]:
        """Raises BadInput where the labels do not fit the completions."""
        known, extra = take_known(TRLRow, row, place)
        check_lengths(len(known.completions), len(known.labels), place)
        kind = _kind_of(known.labels, place)
        labels: list[float | None] = [float(label) for label in known.labels]
        record = AnnotatedSolution(
            id=f"trl-{key}",
            problem_id=problem_key(known.prompt),
            question=known.prompt,
            steps=known.completions,
            labels=labels,
            first_error=first_zero(labels) if all(label in (0, 1) for label in labels) else None,
            is_correct=None,
            info={"format": self.name, "row": key, "separator": "\n", "label_kind": kind, "extra": extra},
        )
        return [record]

    def write(self, records: Sequence[AnnotatedSolution], place: str) -> JsonRow:
        """Return any record whose first step was judged, up to the first step that was not. Steps of other formats lose
        the white space around them; labels are bools where all are 0 or 1."""
        record = the_only(records, place)
        steps, numbers = judged_part(record, place)
        is_own = record.info.get("format") == self.name
        is_hard = all(number in (0, 1) for number in numbers)
        kind = record.info["label_kind"] if is_own else "bool"
        labels: list[bool | float] = list(numbers)
        if is_hard and kind in ("bool", "int"):
            labels = [bool(number) if kind == "bool" else int(number) for number in numbers]
        known = TRLRow(record.question, steps if is_own else [step.strip() for step in steps], labels)
        return {**vars(known), **own_extra(record, self.name)}
