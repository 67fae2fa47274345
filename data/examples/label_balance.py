"""Whether labels of steps can teach anything: labels that are all alike cannot, whatever the loss says.

Read here are labels of inner steps alone. The last step of a trajectory is labelled by its outcome, so right and wrong
trajectories in one file would hide that every state before it has the same label.
"""

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from espalier.data.records import BadInput, StepValues

log = logging.getLogger(__name__)

MIN_LABELS = 20  # fewer may well be alike by chance: they are warned of, never refused
SHARE = 0.99  # labels are alike where this share of them is the same
WARNED = 0.9  # and nearly so where this share is
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
        return self._is_contradicted(SHARE)

    @property
    def is_doubtful(self) -> bool:
        """Whether most labels say the same, and the values on average something else."""
        return self._is_contradicted(WARNED)

    def _is_contradicted(self, share: float) -> bool:
        is_alike = self.num_labels >= MIN_LABELS and self.num_same >= share * self.num_labels
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


@dataclass
class LabelCounts:
    """Takes in labels and the values of their states, as many as there are; `balance` says how alike they are."""

    counts: Counter[float] = field(default_factory=Counter)
    sum_of_labels: float = 0.0
    sum_of_values: float = 0.0
    num_values: int = 0

    def add(self, labels: Iterable[float | None], values: Iterable[float | None]) -> None:
        """Take in labels and values in one order; those without a label are passed over."""
        for label, value in zip(labels, values, strict=True):
            if label is not None:
                self.counts[label] += 1
                self.sum_of_labels += label
                if value is not None:
                    self.sum_of_values, self.num_values = self.sum_of_values + value, self.num_values + 1

    @property
    def mean_label(self) -> float:
        """Over all labels; there must be one."""
        return self.sum_of_labels / self.counts.total()

    @property
    def balance(self) -> LabelBalance | None:
        """The most frequent label (the first of equally frequent ones) and the mean value of the labelled states; None
        without any label."""
        if not self.counts:
            return None
        label, num_same = self.counts.most_common(1)[0]
        mean = self.sum_of_values / self.num_values if self.num_values else None
        return LabelBalance(self.counts.total(), num_same, label, mean)


def label_balance(labels: Iterable[float | None], values: Iterable[float | None]) -> LabelBalance | None:
    """Return the balance of labels and values in one order (`LabelCounts`)."""
    counts = LabelCounts()
    counts.add(labels, values)
    return counts.balance


def check_balance(labels: Iterable[float | None], values: Iterable[float | None], place: str, remedy: str) -> None:
    """Raise BadInput where labels are alike and their states' values are not of that kind; warn where all are alike.

    `labels` and `values` of inner steps in one order; `place` names the file, `remedy` what to change.
    """
    judge_balance(label_balance(labels, values), place, remedy)


def judge_balance(balance: LabelBalance | None, place: str, remedy: str) -> None:
    """Raise BadInput, or warn, as `check_balance` does."""
    if balance is None:
        return
    if balance.is_contradicted:
        raise BadInput(f"{place}: {balance}: labels that are all alike teach nothing: {remedy}")
    if balance.num_same == balance.num_labels > 1:
        log.warning("%s: %s: there is nothing to learn from them", place, balance)
    elif balance.is_doubtful:
        log.warning("%s: %s: such labels teach little: %s", place, balance, remedy)
