"""Supervised fine-tuning: cross-entropy on the response's tokens, each times its weight.

With l(b, t) = -weight(b, t) * log pi(token t of example b) over the response tokens (a token of weight 0 is none),
the three reductions of a step, each a sum and a count:

| loss_aggregation | sum                                     | count     |
|
|-----------|-----------------------------------------|-----------|------------------------------------------------|
| token     | of all l(b, t)                          | tokens    | every token counts alike                       |
| sequence  | over b of mean over t of l(b, t)        | examples  | every example counts alike                     |
| batch     | of all l(b, t)                          | examples  | the summed log-prob of an example, as in RL    |

They are VinePPO's (Kazemnejad et al. 2024) `total_non_pad_tokens`, `per_instance_non_pad_tokens_then_batch` (what
its published runs use) and `batch`; its per-token advantages are the weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from espalier.data.batches.batch import Batch
from espalier.data.batches.collate import collate_tokens
from espalier.data.batches.packing import Layout
from espalier.data.examples.token_examples import TokenExample
from espalier.data.records import BadInput
from espalier.models.logprobs import target_scores
from espalier.training.objectives.objective import Loss, sum_and_count


@dataclass
class SupervisedFineTuning:
    """`loss_aggregation`: token, sequence or batch. Prompts are masked. An example without a response token counts in
    none of them. `temperature` divides the logits (the sampling temperature in VinePPO's RestEM)."""

    loss_aggregation: str = "token"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.loss_aggregation not in ("token", "sequence", "batch"):
            raise BadInput(
                f"objective.loss_aggregation must be token, sequence or batch, got '{self.loss_aggregation}'"
            )
        if self.temperature <= 0:
            raise BadInput(f"objective.temperature must be above 0, got {self.temperature}")

    def collate(self, examples: Sequence[TokenExample], layout: Layout) -> Batch:
        """Return one row an example."""
        return collate_tokens(examples, layout)

    def count(self, batch: Batch) -> float:
        """Return response tokens, or examples that have one."""
        return float(len(batch.targets) if self.loss_aggregation == "token" else len(batch.target_rows.unique()))

    def loss(self, model: Any, batch: Batch) -> Loss:
        """Also logs means over response tokens: of the log-prob without weights, of the entropy, and of whether the
        token was the likeliest one (`token_accuracy`)."""
        scores = target_scores(model, batch, self.temperature)
        losses = -(scores.logprobs * batch.target_weights)
        if self.loss_aggregation == "sequence":
            losses = losses / batch.row_lengths()[batch.target_rows]
        metrics = {
            "entropy": sum_and_count(scores.entropies),
            "logprob": sum_and_count(scores.logprobs),
            "token_accuracy": sum_and_count(scores.is_likeliest),
        }
        return Loss(losses.sum(), metrics)
