"""Pointwise outcome rewards: predict from the last token of a whole response how good it is.

With one label binary cross-entropy against the outcome or a probability of it (soft labels), with two labels the
2-class outcome model (Cobbe et al. 2021; Jiao et al. 2024): formulas in `training.objectives.scalar_targets`.
Responses compared in pairs are `training.objectives.bradley_terry`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data.collate import Batch, collate_outcomes
from data.examples import OutcomeExample
from training.objectives.objective import Loss
from training.objectives.scalar_targets import check_threshold, sum_of_weights, weighted_scalar_loss


@dataclass
class OutcomeReward:
    """Summed cross-entropy over responses; count = responses (their weights). `hard_above` as in ProcessReward."""

    hard_above: float | None = None

    def __post_init__(self) -> None:
        check_threshold(self.hard_above)

    def collate(self, examples: Sequence[OutcomeExample], pad_id: int) -> Batch:
        """One row and one read an example."""
        return collate_outcomes(examples, pad_id)

    def count(self, batch: Batch) -> float:
        """Responses."""
        return sum_of_weights(batch.weights)

    def loss(self, model: Any, batch: Batch) -> Loss:
        """Also logs errors against the outcome, accuracy and calibration."""
        logits = model(input_ids=batch.ids, attention_mask=batch.attention_mask).logits
        read = logits[batch.rows, batch.positions]
        total, metrics = weighted_scalar_loss(read, batch.values, batch.weights, self.hard_above)
        return Loss(total, metrics)
