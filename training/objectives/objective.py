"""What an objective offers the loop: batches, and a loss as a sum and a count, never a mean.

The loop divides by the count over all micro-batches and ranks of a step. That one rule makes accumulation,
ragged batches and many ranks agree. What an objective logs travels as sums and counts too. Some figures are no
means: their parts are logged under `name|part` and `training.sums.finish_metrics` makes one figure of them.

- the standard deviation of x: with x itself, the mean of its square, `x|square`, becomes `x_std`;
- the expected calibration error: the mean of (score - outcome) over all reads whose score lies in bin k,
  `calibration_error|k`, becomes `calibration_error` = sum over k of the absolute values;
- a difference of two means over different rows: `x|plus` less `x|minus`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from espalier.data.batches.batch import Batch
from espalier.data.batches.packing import Layout

NUM_BINS = 10
Metrics = dict[str, tuple[float, float]]


@dataclass
class Loss:
    """`total`: the summed loss, a scalar with a graph. `metrics`: name → (sum, count), for the log."""

    total: torch.Tensor
    metrics: Metrics = field(default_factory=dict)


class Objective(Protocol):
    """A training objective."""

    def collate(self, examples: Sequence[Any], layout: Layout) -> Batch:
        """Examples → one batch."""

    def count(self, batch: Batch) -> float:
        """Return what the summed loss is divided by, known before the forward pass."""

    def loss(self, model: Any, batch: Batch) -> Loss:
        """Return the summed loss of a batch."""


@runtime_checkable
class MeasuresStep(Protocol):
    """An objective whose loss reads a mean over the whole step (all micro-batches and ranks): the loop calls
    `measure` on every batch, without a graph, and sets `step_mean` before the first loss."""

    step_mean: float

    def measure(self, model: Any, batch: Batch) -> tuple[float, float]:
        """Return (sum, count) of a batch."""


def sum_and_count(values: torch.Tensor) -> tuple[float, float]:
    """Return a metric's (sum, count) from its values [...]."""
    return float(values.detach().double().sum()), float(values.numel())


def with_deviation(name: str, values: torch.Tensor) -> Metrics:
    """Return the mean of the values [...], and the parts of their standard deviation."""
    return {name: sum_and_count(values), f"{name}|square": sum_and_count(values.detach().double() ** 2)}


def calibration(scores: torch.Tensor, outcomes: torch.Tensor) -> Metrics:
    """Return the parts of the expected calibration error (Naeini et al. 2015) of scores [R] in [0, 1] against outcomes
    [R] in [0, 1], in ten bins of equal width, each with its upper border (the first with 0 too)."""
    borders = torch.arange(1, NUM_BINS, device=scores.device) / NUM_BINS
    bins = torch.bucketize(scores.detach().float(), borders)
    gaps = torch.zeros(NUM_BINS, dtype=torch.float64, device=scores.device)
    gaps.index_add_(0, bins, (scores.detach() - outcomes).double())
    return {f"calibration_error|{index}": (gap, float(scores.numel())) for index, gap in enumerate(gaps.tolist())}
