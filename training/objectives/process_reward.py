"""Process rewards: predict, at every step end, the value of the state the step leads to.

One forward pass a trajectory, read at all its step ends; examples made with `one_example_per: prefix` are read at
their last token instead, a pass a step, with the same loss. Soft labels or K + 1 classes by the model's number of
labels, hard labels by `hard_above`: formulas in `training.objectives.scalar_targets`. A step that nobody judged has
no read. Classes are balanced by the weights of the examples (`balanced_classes` there).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data.collate import Batch, collate_steps
from data.examples import StepExample
from training.objectives.objective import Loss
from training.objectives.scalar_targets import check_threshold, sum_of_weights, weighted_scalar_loss


@dataclass
class ProcessReward:
    """Summed cross-entropy over step ends; count = step ends (their weights). `hard_above`: null is soft labels, a
    number makes labels hard: good above it."""

    hard_above: float | None = None

    def __post_init__(self) -> None:
        check_threshold(self.hard_above)

    def collate(self, examples: Sequence[StepExample], pad_id: int) -> Batch:
        """One row an example, one read a step."""
        return collate_steps(examples, pad_id)

    def count(self, batch: Batch) -> float:
        """Step ends."""
        return sum_of_weights(batch.weights)

    def loss(self, model: Any, batch: Batch) -> Loss:
        """Also logs errors against the value, accuracy and calibration."""
        logits = model(input_ids=batch.ids, attention_mask=batch.attention_mask).logits
        read = logits[batch.rows, batch.positions]
        total, metrics = weighted_scalar_loss(read, batch.values, batch.weights, self.hard_above)
        return Loss(total, metrics)
