"""What the preference objectives on pairs share: log-probs of both sides, the terms beside the loss, the log.

With lp(y) the summed log-prob of y's tokens after the prompt under the policy pi, ref(y) under the reference, and

    d = [lp(chosen) - ref(chosen)] - [lp(rejected) - ref(rejected)],

every objective of the family is a function of beta and d (DPOP also of the chosen side alone); each has a file of
its own. Options common to all:

- `reference` null: **reference-free**, ref(y) = 0. Else a frozen copy of the policy at the start: before the first
  step d is exactly 0.
- `is_length_normalised`: lp and ref are means over a side's tokens instead of sums (LN-DPO, Lambert et al. 2024).
- `temperature` divides the logits of both models: the sampling temperature, where the margins are to be of the
  distribution that is sampled from (VinePPO).
- `sft_weight` adds, for every pair, that many times the mean negative log-prob of the chosen tokens (the
  regulariser of RPO, Pang et al. 2024): it keeps chosen solutions likely while margins grow.

A pair whose prompt ends mid-solution makes any of them step-wise (step-DPO, Lai et al. 2024); the formulas are the
same.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from espalier.data.batches.batch import Batch
from espalier.data.batches.collate import collate_pairs
from espalier.data.batches.packing import Layout
from espalier.data.examples.token_examples import PairExample
from espalier.data.records import BadInput
from espalier.models.logprobs import target_scores
from espalier.training.objectives.objective import Loss, Metrics, calibration, sum_and_count, with_deviation
from espalier.training.reference_logprobs import ReferenceLogprobs


@dataclass(frozen=True)
class PreferenceLogprobs:
    """Log-probs [P] of the sides of pairs, summed over tokens (or their means); the reference's have no graph."""

    chosen: torch.Tensor
    rejected: torch.Tensor
    reference_chosen: torch.Tensor
    reference_rejected: torch.Tensor

    @property
    def differences(self) -> torch.Tensor:
        """d [P]."""
        return (self.chosen - self.reference_chosen) - (self.rejected - self.reference_rejected)


def check_range(name: str, value: float, is_good: bool, need: str) -> None:
    """Raise BadInput unless a setting of an objective is good."""
    if not is_good:
        raise BadInput(f"objective.{name} must be {need}, got {value}")


def reference_sums(reference: Any, batch: Batch, like: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return summed log-probs [rows] of the targets under the reference, without a graph; 0 without a reference."""
    if reference is None:
        return torch.zeros_like(like)
    if isinstance(reference, ReferenceLogprobs):
        return reference.sums(batch)
    with torch.no_grad():
        reference.to(batch.ids.device)
        return batch.row_sums(target_scores(reference, batch, temperature).logprobs)


def log_ratios(model: Any, reference: Any, batch: Batch, temperature: float) -> torch.Tensor:
    """Return lp - ref [rows], summed over every row's targets."""
    sums = batch.row_sums(target_scores(model, batch, temperature).logprobs)
    return sums - reference_sums(reference, batch, sums, temperature)


def unpaired_metrics(rewards: torch.Tensor, is_said: torch.Tensor, labels: torch.Tensor) -> Metrics:
    """Return the log of responses judged alone: the rewards [B] of both sides and the margin of their means, and how
    often `is_said` [B] (good or not) is what the labels [B] say, at the threshold 1/2."""
    is_good = labels > 0.5
    good, bad = sum_and_count(rewards[is_good]), sum_and_count(rewards[~is_good])
    return {
        "desirable_reward": good,
        "undesirable_reward": bad,
        "margin|plus": good,
        "margin|minus": bad,
        "accuracy": sum_and_count((is_said == is_good).float()),
    }


@dataclass
class PairObjective(ABC):
    """Count = pairs. `pair_losses` is the objective itself."""

    reference: Any
    beta: float = 0.1
    sft_weight: float = 0.0
    is_length_normalised: bool = False
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_range("beta", self.beta, self.beta > 0, "above 0")
        check_range("sft_weight", self.sft_weight, self.sft_weight >= 0, "at least 0")
        check_range("temperature", self.temperature, self.temperature > 0, "above 0")

    @abstractmethod
    def pair_losses(self, pairs: PreferenceLogprobs) -> torch.Tensor:
        """Return losses [P]."""

    def pair_metrics(self, pairs: PreferenceLogprobs) -> Metrics:
        """Return what one objective logs beside the others."""
        return {}

    def collate(self, examples: Sequence[PairExample], layout: Layout) -> Batch:
        """Return two rows a pair. Raises BadInput on pairs with weights, which no loss of log-probs reads."""
        if any(example.weight != 1.0 for example in examples):
            raise BadInput("examples.balances_prompts is for objective=bradley_terry: set it to false")
        return collate_pairs(examples, layout)

    def count(self, batch: Batch) -> float:
        """Return pairs."""
        return float(len(batch.example_ids))

    def loss(self, model: Any, batch: Batch) -> Loss:
        """Also logs rewards beta * (lp - ref), their margins and accuracy (a tie is none), log-probs as summed, the
        share of pairs whose chosen side is the likelier one (`likelier`), and the entropy of the tokens."""
        scores = target_scores(model, batch, self.temperature)
        sums = batch.row_sums(scores.logprobs)
        reference = reference_sums(self.reference, batch, sums, self.temperature)
        lengths = batch.row_lengths()
        means = sums / lengths
        policy, frozen = (means, reference / lengths) if self.is_length_normalised else (sums, reference)
        pairs = PreferenceLogprobs(policy[0::2], policy[1::2], frozen[0::2], frozen[1::2])
        total = self.pair_losses(pairs).sum()
        if self.sft_weight:
            total = total - self.sft_weight * means[0::2].sum()
        chosen, rejected = sums.detach()[0::2], sums.detach()[1::2]
        metrics = {
            **self._reward_metrics(pairs),
            "chosen_logprob": sum_and_count(chosen),
            "rejected_logprob": sum_and_count(rejected),
            "chosen_token_logprob": sum_and_count(means[0::2]),
            "likelier": sum_and_count((chosen > rejected).float()),
            "entropy": sum_and_count(scores.entropies),
            **self.pair_metrics(pairs),
        }
        return Loss(total, metrics)

    def _reward_metrics(self, pairs: PreferenceLogprobs) -> Metrics:
        """Return rewards and margins; calibration of the confidence sigmoid(|margin|) that the larger reward is
        right."""
        chosen = self.beta * (pairs.chosen - pairs.reference_chosen).detach()
        rejected = self.beta * (pairs.rejected - pairs.reference_rejected).detach()
        margin = chosen - rejected
        is_right = (margin > 0).float()
        return {
            **with_deviation("margin", margin),
            "accuracy": sum_and_count(is_right),
            "chosen_reward": sum_and_count(chosen),
            "rejected_reward": sum_and_count(rejected),
            **calibration(torch.sigmoid(margin.abs()), is_right),
        }
