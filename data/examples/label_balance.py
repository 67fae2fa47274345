"""Whether labels of steps can teach anything: labels that are all alike cannot, whatever the loss says.

Read here are labels of inner steps alone. The last step of a trajectory is labelled by its outcome, so right and wrong
trajectories in one file would hide that every state before it has the same label.
"""

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from espalier.data.records import BadInput, StepValues

log = logging.getLogger(__name__)

MIN_LABELS = 20  # fewer may well be alike by chance: they are warned of, never refused
SHARE = 0.99  # labels are alike where this share of them is the same
DISTANCE = 0.5  # how far from the states' mean value a label that they all have contradicts it


@dataclass(frozen=True)
class LabelBalance:
    """`num_same` of `num_labels` labels of inner steps are `label`; `mean_value` is that of their states' values (None:
    no value is known)."""

    num_labels: int
    num_same: int
    label: float
    mean_value: float | None

    @property
    def is_contradicted(self) -> bool:
        """Whether nearly all labels say the same, and the values on average something else."""
        is_alike = self.num_labels >= MIN_LABELS and self.num_same >= SHARE * self.num_labels
        return is_alike and self.mean_value is not None and abs(self.label - self.mean_value) >= DISTANCE

    def __str__(self) -> str:
        mean = "not known" if self.mean_value is None else f"{self.mean_value:.2f}"
        return (
            f"{self.num_same:,} of {self.num_labels:,} labels of inner steps are {self.label:g}, at a mean value of "
            f"their states of {mean}"
        )


def inner_steps(records: Iterable[StepValues]) -> tuple[list[float | None], list[float | None]]:
    """Return (labels, values) of all steps but the last one of every record, whose state is terminal."""
    rows = list(records)
    labels = [label for row in rows for label in row.labels[:-1]]
    return labels, [value for row in rows for value in row.values[:-1]]


def label_balance(labels: Iterable[float | None], values: Iterable[float | None]) -> LabelBalance | None:
    """Return the most frequent label (the first of equally frequent ones) and the mean value of the labelled states,
    from labels and values in one order; None without any label."""
    counts: Counter[float] = Counter()
    total, num_known = 0.0, 0
    for label, value in zip(labels, values, strict=True):
        if label is not None:
            counts[label] += 1
            if value is not None:
                total, num_known = total + value, num_known + 1
    if not counts:
        return None
    label, num_same = counts.most_common(1)[0]
    return LabelBalance(counts.total(), num_same, label, total / num_known if num_known else None)


def check_balance(labels: Iterable[float | None], values: Iterable[float | None], place: str, remedy: str) -> None:
    """Raise BadInput where labels are alike and their states' values are not of that kind; warn where all are alike.

    `labels` and `values` of inner steps in one order; `place` names the file, `remedy` what to change.
    """
    balance = label_balance(labels, values)
    if balance is None:
        return
    if balance.is_contradicted:
        raise BadInput(f"{place}: {balance}: labels that are all alike teach nothing: {remedy}")
    if balance.num_same == balance.num_labels > 1:
        log.warning("%s: %s: there is nothing to learn from them", place, balance)
