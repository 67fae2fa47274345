"""Losses of a scalar head against targets in [0, 1]; the model's number of labels L decides between two.

- L = 1, **soft labels**: binary cross-entropy with the target itself (a 0.875 trains as 0.875), as in the soft
  estimation of Math-Shepherd (Wang et al. 2024); with hard labels the ordinary binary classifier.
- L = K + 1, **classes**: class k means "k of K completions are correct" (Jiao et al. 2024; K = 1 is the 2-class
  outcome model). A target t is cross-entropy with the class t * K; where that is no whole number its two neighbours
  share it, so that the expected class is t * K exactly: 0.875 with K = 4 is half class 3 and half class 4.

**Hard labels** replace every target by whether it is above a threshold: above 0 is the hard estimation of
Math-Shepherd (some completion succeeded).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, log_softmax

from espalier.data.batches.batch import Batch
from espalier.data.records import BadInput
from espalier.models.logits import read_logits
from espalier.models.scalar_head import scores_from_logits
from espalier.training.objectives.objective import Loss, Metrics, calibration, sum_and_count


def check_threshold(hard_above: float | None) -> None:
    """Raise BadInput on a threshold that calls every target the same."""
    if hard_above is not None and not 0 <= hard_above < 1:
        raise BadInput(f"objective.hard_above must be null (soft labels) or in [0, 1), got {hard_above}")


def class_targets(targets: torch.Tensor, num_labels: int) -> torch.Tensor:
    """Targets [R] in [0, 1] → distributions over classes [R, L] whose expected class is target * (L - 1)."""
    classes = targets.float() * (num_labels - 1)
    nearest = classes.round()
    is_whole = (classes - nearest).abs() < 1e-5  # 2/3 * 3 is class 2, whatever float32 says
    classes = torch.where(is_whole, nearest, classes)
    lower = classes.floor().clamp(0, num_labels - 2)
    share = (classes - lower).unsqueeze(-1)
    index = lower.long().unsqueeze(-1)
    probs = torch.zeros(*targets.shape, num_labels, device=targets.device)
    return probs.scatter(-1, index, 1 - share).scatter(-1, index + 1, share)


def scalar_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return losses [R] of logits [R, L] against targets [R] in [0, 1], in float32."""
    logits = logits.float()
    if logits.shape[-1] == 1:
        return binary_cross_entropy_with_logits(logits.squeeze(-1), targets.float(), reduction="none")
    return -(log_softmax(logits, dim=-1) * class_targets(targets, logits.shape[-1])).sum(-1)


def weighted_scalar_loss(
    logits: torch.Tensor, values: torch.Tensor, weights: torch.Tensor, hard_above: float | None
) -> tuple[torch.Tensor, Metrics]:
    """Return (summed loss, metrics) of logits [R, L] against values [R], each times its weight [R].

    The metrics are unweighted means over the reads: `value_mae` and `brier` (the squared error) of the score
    against the target, `accuracy` at the threshold 1/2, `score` and `value` (they agree where the model is right on
    average), and the calibration error.
    """
    targets = values if hard_above is None else (values > hard_above).float()
    total = (scalar_losses(logits, targets) * weights).sum()
    scores = scores_from_logits(logits.detach())
    errors = scores - targets
    metrics = {
        "value_mae": sum_and_count(errors.abs()),
        "brier": sum_and_count(errors**2),
        "accuracy": sum_and_count(((scores > 0.5) == (targets > 0.5)).float()),
        "score": sum_and_count(scores),
        "value": sum_and_count(targets),
        **calibration(scores, targets),
    }
    return total, metrics


def sum_of_weights(weights: torch.Tensor) -> float:
    """Return the count that goes with a sum of weights [R]."""
    return float(weights.double().sum())


@dataclass
class ScalarRewardObjective:
    """What outcome and process rewards share: the summed loss over reads; count = reads (their weights).

    `hard_above`: null is soft labels, a number makes labels hard: good above it.
    """

    hard_above: float | None = None

    def __post_init__(self) -> None:
        check_threshold(self.hard_above)

    def count(self, batch: Batch) -> float:
        """Reads."""
        return sum_of_weights(batch.weights)

    def loss(self, model: Any, batch: Batch) -> Loss:
        """Also logs errors against the target, accuracy and calibration."""
        read = read_logits(model, batch)
        total, metrics = weighted_scalar_loss(read, batch.values, batch.weights, self.hard_above)
        return Loss(total, metrics)
