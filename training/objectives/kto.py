"""Kahneman-Tversky optimisation (Ethayarajh et al. 2024): preferences without pairs, from responses judged alone.

With r = lp(y) - ref(y) summed over the response, and z0 = max(0, mean over the step of the same log-ratio for
responses put behind a prompt of another problem), an estimate of the policy's divergence from the reference,

    loss(desirable y)   = desirable_weight   * (1 - sigmoid(beta (r - z0)))
    loss(undesirable y) = undesirable_weight * (1 - sigmoid(beta (z0 - r))).

z0 has no gradient and is one number for all micro-batches and ranks of a step (the loop measures it before the first
loss), so the gradient does not depend on the split; `has_baseline` false takes 0 and saves that pass. A label
between 0 and 1 mixes both losses by its value. Where one side is rarer, weigh it up: the paper wants
desirable_weight * desirable / (undesirable_weight * undesirable) in [1, 4/3].
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from espalier.data.batches.batch import Batch
from espalier.data.batches.collate import collate_outcomes, collate_unpaired
from espalier.data.batches.packing import Layout
from espalier.data.examples.token_examples import OutcomeExample
from espalier.data.records import BadInput
from espalier.training.objectives.objective import Loss, calibration, sum_and_count
from espalier.training.objectives.preference import check_range, log_ratios, unpaired_metrics


def kto_losses(
    ratios: torch.Tensor, labels: torch.Tensor, baseline: float, beta: float, weights: tuple[float, float]
) -> torch.Tensor:
    """Return losses [B] of log-ratios r [B] with labels [B] in [0, 1]; `weights`: desirable, undesirable."""
    desirable = weights[0] * (1 - torch.sigmoid(beta * (ratios - baseline)))
    undesirable = weights[1] * (1 - torch.sigmoid(beta * (baseline - ratios)))
    return labels * desirable + (1 - labels) * undesirable


@dataclass
class KahnemanTversky:
    """Count = responses (their weights). Examples need `has_mismatched: true` unless `has_baseline` is false.

    `temperature` divides the logits of both models. `step_mean` is set by the loop: the mean log-ratio of
    mismatched responses over a step.
    """

    reference: Any
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    has_baseline: bool = True
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_range("beta", self.beta, self.beta > 0, "above 0")
        check_range("temperature", self.temperature, self.temperature > 0, "above 0")
        for name in ("desirable_weight", "undesirable_weight"):
            check_range(name, getattr(self, name), getattr(self, name) >= 0, "at least 0")
        self.step_mean = 0.0

    def collate(self, examples: Sequence[OutcomeExample], layout: Layout) -> Batch:
        """Return one row an example; with a baseline the mismatched too. Raises BadInput without them."""
        if not self.has_baseline:
            return collate_outcomes(examples, layout)
        for example in examples:
            if not example.mismatched_ids:
                raise BadInput(f"'{example.id}' has no response to another prompt: set examples.has_mismatched=true")
        return collate_unpaired(examples, layout)

    def count(self, batch: Batch) -> float:
        """Return responses."""
        return float(batch.weights.double().sum())

    def measure(self, model: Any, batch: Batch) -> tuple[float, float]:
        """Return (sum, count) of the mismatched responses' log-ratios."""
        if batch.mismatched is None:
            return 0.0, 0.0
        return sum_and_count(log_ratios(model, self.reference, batch.mismatched, self.temperature))

    def loss(self, model: Any, batch: Batch) -> Loss:
        """Also logs rewards beta * r of both sides and the margin of their means, the accuracy of r > z0, and how
        well sigmoid(beta (r - z0)) is calibrated as the probability that a response is desirable."""
        baseline = max(0.0, self.step_mean) if math.isfinite(self.step_mean) else math.nan  # max makes 0 of it
        ratios = log_ratios(model, self.reference, batch, self.temperature)
        weights = (self.desirable_weight, self.undesirable_weight)
        losses = kto_losses(ratios, batch.values, baseline, self.beta, weights)
        rewards = self.beta * ratios.detach()
        metrics = {
            **unpaired_metrics(rewards, ratios.detach() > baseline, batch.values),
            "baseline": (baseline * len(rewards), float(len(rewards))),
            **calibration(torch.sigmoid(rewards - self.beta * baseline), batch.values),
        }
        return Loss((losses * batch.weights).sum(), metrics)
