"""Outcome rewards from pairs (Bradley and Terry 1952; Ouyang et al. 2022; margins as in Touvron et al. 2023).

With r the scalar read at the last token, s = r(chosen) - r(rejected) - margin_scale * margin of the pair, the loss
of a pair is

    -(1 - eps) log sigmoid(s) - eps log sigmoid(-s) + centring * (r(chosen) + r(rejected))^2

A pair counts as its weight (1, unless `examples.balances_prompts`). `eps` smooths labels that may be wrong; `centring`
(Eisenstein et al. 2023) keeps rewards near 0, which pairs alone leave open by a constant. Margins: differences of the
pairs' scores where the examples have `has_score_margin`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import logsigmoid

from espalier.data.batches.batch import Batch
from espalier.data.batches.collate import collate_pairs
from espalier.data.batches.packing import Layout
from espalier.data.examples.token_examples import PairExample
from espalier.data.records import BadInput
from espalier.models.logits import read_logits
from espalier.training.objectives.objective import Loss, calibration, sum_and_count, with_deviation
from espalier.training.objectives.scalar_targets import sum_of_weights


def bradley_terry_losses(
    chosen: torch.Tensor, rejected: torch.Tensor, margins: torch.Tensor, label_smoothing: float, centring: float
) -> torch.Tensor:
    """Return losses [P] of rewards [P] and scaled margins [P]."""
    differences = chosen - rejected - margins
    losses = -(1 - label_smoothing) * logsigmoid(differences) - label_smoothing * logsigmoid(-differences)
    return losses + centring * (chosen + rejected) ** 2


@dataclass
class BradleyTerry:
    """Count = pairs, each as its weight. The model has one label."""

    margin_scale: float = 0.0
    label_smoothing: float = 0.0
    centring: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 0.5:
            raise BadInput(f"objective.label_smoothing must be in [0, 0.5), got {self.label_smoothing}")
        if self.centring < 0:
            raise BadInput(f"objective.centring must be at least 0, got {self.centring}")

    def collate(self, examples: Sequence[PairExample], layout: Layout) -> Batch:
        """Return two rows a pair, each read at its last token."""
        return collate_pairs(examples, layout)

    def count(self, batch: Batch) -> float:
        """Return the sum of the pairs' weights."""
        return sum_of_weights(batch.weights[0::2])

    def loss(self, model: Any, batch: Batch) -> Loss:
        """Also logs rewards and margins with their deviations, accuracy (ties are wrong), and how well the
        confidence sigmoid(|margin|) is calibrated. Raises BadInput on a model with several labels."""
        logits = read_logits(model, batch)
        if logits.shape[-1] != 1:
            raise BadInput(f"pairs train a model of one label, not {logits.shape[-1]}: set model.num_labels=1")
        rewards = logits.float().squeeze(-1)
        chosen, rejected = rewards[0::2], rewards[1::2]
        margins = self.margin_scale * batch.margins
        losses = bradley_terry_losses(chosen, rejected, margins, self.label_smoothing, self.centring)
        margin = (chosen - rejected).detach()
        is_right = (margin > 0).float()
        metrics = {
            **with_deviation("margin", margin),
            **with_deviation("reward", rewards),
            "accuracy": sum_and_count(is_right),
            "chosen_reward": sum_and_count(chosen),
            "rejected_reward": sum_and_count(rejected),
            **calibration(torch.sigmoid(margin.abs()), is_right),
        }
        return Loss((losses * batch.weights[0::2]).sum(), metrics)
