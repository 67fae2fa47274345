"""Implicit process rewards from outcomes alone, by cross-entropy (Yuan et al. 2024, "Free Process Rewards without
Process Labels", arXiv 2412.01981): unpaired, one response per problem is enough.

With s(y) = beta * [lp(y) - ref(y)], summed over the response, the loss of a response of label l in [0, 1] is

    -l log sigmoid(s) - (1 - l) log sigmoid(-s).

What it trains is a causal LM whose log-ratio to the reference, summed over a step's tokens, is that step's reward:
`models.log_ratio_reward` reads it. 0 before the first step, when policy and reference are one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from espalier.data.batches.batch import Batch
from espalier.data.batches.collate import collate_outcomes
from espalier.data.batches.packing import Layout
from espalier.data.examples.token_examples import OutcomeExample
from espalier.training.objectives.objective import Loss, calibration
from espalier.training.objectives.preference import check_range, log_ratios, unpaired_metrics


def implicit_ce_losses(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return losses [B] of scores s [B] with labels [B] in [0, 1]; finite however far s is from 0."""
    return binary_cross_entropy_with_logits(scores, labels.to(scores.dtype), reduction="none")


@dataclass
class ImplicitCrossEntropy:
    """Count = responses (their weights). `temperature` divides the logits of both models."""

    reference: Any
    beta: float = 0.05
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_range("beta", self.beta, self.beta > 0, "above 0")
        check_range("temperature", self.temperature, self.temperature > 0, "above 0")

    def collate(self, examples: Sequence[OutcomeExample], layout: Layout) -> Batch:
        """Return one row an example."""
        return collate_outcomes(examples, layout)

    def count(self, batch: Batch) -> float:
        """Return responses."""
        return float(batch.weights.double().sum())

    def loss(self, model: Any, batch: Batch) -> Loss:
        """Also logs rewards s of both sides and the margin of their means, the accuracy of the sign of s (0 says
        wrong), and how well sigmoid(s) is calibrated."""
        scores = self.beta * log_ratios(model, self.reference, batch, self.temperature)
        rewards = scores.detach()
        metrics = unpaired_metrics(rewards, rewards > 0, batch.values)
        metrics |= calibration(torch.sigmoid(rewards), batch.values)
        return Loss((implicit_ce_losses(scores, batch.values) * batch.weights).sum(), metrics)
