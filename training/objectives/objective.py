"""What an objective offers the loop: batches, and a loss as a sum and a count, never a mean.

The loop divides by the count over all micro-batches and ranks of a step. That one rule makes accumulation,
ragged batches and many ranks agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from data.collate import Batch


@dataclass
class Loss:
    """`total`: the summed loss, a scalar with a graph. `metrics`: name → (sum, count), for the log."""

    total: torch.Tensor
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)


class Objective(Protocol):
    """A training objective."""

    def collate(self, examples: Sequence[Any], pad_id: int) -> Batch:
        """Examples → one batch."""

    def count(self, batch: Batch) -> float:
        """What the summed loss is divided by, known before the forward pass."""

    def loss(self, model: Any, batch: Batch) -> Loss:
        """The summed loss of a batch."""


def sum_and_count(values: torch.Tensor) -> tuple[float, float]:
    """A metric's (sum, count) from its values."""
    return float(values.detach().double().sum()), float(values.numel())
