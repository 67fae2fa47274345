"""Process rewards: predict, at every step end, the value of the state the step leads to.

One forward pass a trajectory. Two forms, told apart by the model's number of labels:

- one label, **soft labels**: binary cross-entropy against the Monte-Carlo value itself (a 0.875 trains as
  0.875), as in soft estimation of Math-Shepherd (Wang et al. 2024);
- K + 1 labels, **classes**: cross-entropy with the class round(value * K), the number of correct
  completions (Jiao et al. 2024).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from data.collate import Batch, collate_steps
from data.examples import StepExample
from models.scalar_head import scores_from_logits
from training.objectives.objective import Loss, sum_and_count


class ProcessReward:
    """Summed cross-entropy over step ends; count = step ends."""

    def collate(self, examples: Sequence[StepExample], pad_id: int) -> Batch:
        """One row an example, one read a step."""
        return collate_steps(examples, pad_id)

    def count(self, batch: Batch) -> float:
        """Step ends."""
        return float(batch.values.numel())

    def loss(self, model: Any, batch: Batch) -> Loss:
        """Also logs the mean absolute error against the value and the accuracy at the threshold 1/2."""
        logits = model(input_ids=batch.ids, attention_mask=batch.attention_mask).logits
        read = logits[batch.rows, batch.positions].float()
        num_labels = read.shape[-1]
        if num_labels == 1:
            total = binary_cross_entropy_with_logits(read.squeeze(-1), batch.values, reduction="sum")
        else:
            classes = torch.round(batch.values * (num_labels - 1)).long()
            total = cross_entropy(read, classes, reduction="sum")
        scores = scores_from_logits(read.detach())
        is_right = (scores > 0.5) == (batch.values > 0.5)
        metrics = {
            "value_mae": sum_and_count((scores - batch.values).abs()),
            "accuracy": sum_and_count(is_right.float()),
        }
        return Loss(total, metrics)
