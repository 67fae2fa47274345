"""Direct preference optimisation (Rafailov et al. 2023) on pairs, whole solutions or from a state.

With lp(y) the summed log-prob of y's tokens after the prompt, and
d = [lp_pi(chosen) - lp_ref(chosen)] - [lp_pi(rejected) - lp_ref(rejected)],
the loss of a pair is -log sigmoid(beta * d). A pair whose prompt ends mid-solution makes this step-DPO
(Lai et al. 2024); the formula is the same.

`sft_weight` adds, for every pair, that many times the mean negative log-prob of the chosen tokens (the
regulariser of RPO, Pang et al. 2024): it keeps chosen solutions likely while margins grow.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import logsigmoid

from data.collate import Batch, collate_pairs
from data.examples import PairExample
from models.logprobs import response_logprobs
from training.objectives.objective import Loss, sum_and_count


def dpo_losses(
    policy_chosen: torch.Tensor,
    policy_rejected: torch.Tensor,
    reference_chosen: torch.Tensor,
    reference_rejected: torch.Tensor,
    beta: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(losses, chosen rewards, rejected rewards) [B] from summed log-probs [B]; rewards have no graph."""
    chosen = beta * (policy_chosen - reference_chosen)
    rejected = beta * (policy_rejected - reference_rejected)
    return -logsigmoid(chosen - rejected), chosen.detach(), rejected.detach()


class DirectPreference:
    """Count = pairs. `reference` is a frozen copy of the policy at the start: margins begin at 0."""

    def __init__(self, reference: Any, beta: float = 0.1, sft_weight: float = 0.0):
        self.reference = reference
        self.beta = beta
        self.sft_weight = sft_weight

    def collate(self, examples: Sequence[PairExample], pad_id: int) -> Batch:
        """Two rows a pair."""
        return collate_pairs(examples, pad_id)

    def count(self, batch: Batch) -> float:
        """Pairs."""
        return float(len(batch.example_ids))

    def loss(self, model: Any, batch: Batch) -> Loss:
        """Also logs rewards, margins, accuracies and the log-prob of the chosen side."""
        mask = batch.response_mask[:, 1:]
        policy, _ = response_logprobs(model, batch.ids, batch.attention_mask)
        with torch.no_grad():
            self.reference.to(batch.ids.device)
            reference, _ = response_logprobs(self.reference, batch.ids, batch.attention_mask)
        policy_sums, reference_sums = (policy * mask).sum(-1), (reference * mask).sum(-1)
        losses, chosen, rejected = dpo_losses(
            policy_sums[0::2], policy_sums[1::2], reference_sums[0::2], reference_sums[1::2], self.beta
        )
        total = losses.sum()
        if self.sft_weight:
            total = total - self.sft_weight * (policy_sums[0::2] / mask[0::2].sum(-1)).sum()
        metrics = {
            "margin": sum_and_count(chosen - rejected),
            "accuracy": sum_and_count((chosen > rejected).float()),
            "chosen_reward": sum_and_count(chosen),
            "rejected_reward": sum_and_count(rejected),
            "chosen_logprob": sum_and_count(policy_sums[0::2]),
        }
        return Loss(total, metrics)
