"""What several formats need: labels up to the first error, the first error of labels, steps without layout."""

from collections.abc import Sequence

from espalier.data.process_data.published import JsonRow
from espalier.data.records import AnnotatedSolution, BadInput


def labels_up_to(first_error: int, num_steps: int) -> list[float | None]:
    """S labels where only the first error is known: 1 before it, 0 at it, None after it; all 1 for -1."""
    if first_error < 0:
        return [1.0] * num_steps
    return [1.0] * first_error + [0.0] + [None] * (num_steps - first_error - 1)


def first_zero(labels: Sequence[float | None]) -> int | None:
    """Return the first error that the labels tell: the index of the first 0; -1 where all are known and above 0; None
    where an unknown label stands before the first 0, or without any 0."""
    for index, label in enumerate(labels):
        if label is None:
            return None
        if label == 0:
            return index
    return -1


def plain_steps(record: AnnotatedSolution, name: str) -> list[str]:
    """Return the steps as a format that publishes a list holds them: as they are where they come from that format
    (`name`), else without the white space around them."""
    return record.steps if record.info.get("format") == name else [step.strip() for step in record.steps]


def own_extra(record: AnnotatedSolution, name: str) -> JsonRow:
    """Return the columns kept for the format it was read from; none where that is another one."""
    extra: JsonRow = record.info.get("extra", {}) if record.info.get("format") == name else {}
    return extra


def judged_part(record: AnnotatedSolution, place: str) -> tuple[list[str], list[float]]:
    """Return the steps before the first one that nobody judged, with their labels: all that a format without empty
    labels can hold. Raises BadInput where that is nothing."""
    labels: list[float] = []
    for label in record.labels:
        if label is None:
            break
        labels.append(label)
    if record.steps and not labels:
        raise BadInput(f"{place}: nobody judged its first step: this format cannot hold it; leave it out")
    return record.steps[: len(labels)], labels


def the_only(records: Sequence[AnnotatedSolution], place: str) -> AnnotatedSolution:
    """Return the record of a format that has one for each published row. Raises BadInput where there are more."""
    if len(records) != 1:
        raise BadInput(f"{place}: {len(records)} records come from one published row: remove all but one")
    return records[0]


def check_lengths(num_steps: int, num_labels: int, place: str) -> None:
    """Raise BadInput unless there is a label for every step."""
    if num_steps != num_labels:
        raise BadInput(f"{place}: {num_steps} steps and {num_labels} labels: one label a step is wanted")
