"""Supervised fine-tuning: cross-entropy on the response's tokens, averaged over all tokens of a step."""

from collections.abc import Sequence
from typing import Any

from data.collate import Batch, collate_tokens
from data.examples import TokenExample
from models.logprobs import response_logprobs
from training.objectives.objective import Loss


class SupervisedFineTuning:
    """Loss = -sum of log pi(token) over response tokens; count = those tokens. Prompts are masked."""

    def collate(self, examples: Sequence[TokenExample], pad_id: int) -> Batch:
        """One row an example."""
        return collate_tokens(examples, pad_id)

    def count(self, batch: Batch) -> float:
        """Response tokens."""
        return float(batch.response_mask[:, 1:].sum())

    def loss(self, model: Any, batch: Batch) -> Loss:
        """Also logs the mean entropy of the response's tokens."""
        logprobs, entropy = response_logprobs(model, batch.ids, batch.attention_mask)
        mask = batch.response_mask[:, 1:]
        total = -(logprobs * mask).sum()
        entropy_sum = float((entropy * mask).double().sum())
        return Loss(total, {"entropy": (entropy_sum, float(mask.sum()))})
