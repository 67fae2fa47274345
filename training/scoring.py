"""Examples and a model → one prediction an example (`data.predictions`): a forward pass over padded rows.

A causal language model gives log-probs, a scalar head scores; with the log-probs of a reference come rewards and
margins of the DPO family, at the objective's beta, temperature and length normalisation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from espalier.data.batches.packing import pad_rows
from espalier.data.examples.example_facts import token_rows
from espalier.data.examples.token_examples import OutcomeExample, PairExample, StepExample
from espalier.data.predictions import PairLogprobs, PairRewards, ResponseLogprobs, RewardPrediction, StepPredictions
from espalier.data.records import BadInput
from espalier.models.logits import all_logits
from espalier.models.logprobs import response_logprobs
from espalier.models.precision import autocast
from espalier.models.scalar_head import scores_from_logits

Prediction = ResponseLogprobs | PairLogprobs | StepPredictions | RewardPrediction | PairRewards


def is_scalar(model: Any) -> bool:
    """Say whether the model gives scalars or classes a position, and no distribution over tokens."""
    return type(model).__name__.endswith("ForTokenClassification")


def prediction_kind(example: Any, is_scalar_model: bool) -> type[Prediction]:
    """Return the kind of row that an example gives. Raises BadInput where a model cannot score it."""
    if isinstance(example, PairExample):
        return PairRewards if is_scalar_model else PairLogprobs
    if isinstance(example, StepExample) and is_scalar_model:
        return StepPredictions
    if isinstance(example, OutcomeExample) and is_scalar_model:
        return RewardPrediction
    if isinstance(example, StepExample) or is_scalar_model:
        raise BadInput(f"a {'scalar head' if is_scalar_model else 'causal language model'} cannot score a "
                       f"{type(example).__name__}: set model=process_reward for step values, model=policy for "
                       "demonstrations")  # fmt: skip
    return ResponseLogprobs


@dataclass(frozen=True)
class Scorer:
    """Scores batches with one model. `references`: the predictions of the reference, by id; empty without one."""

    model: Any
    pad_id: int
    precision: str
    temperature: float = 1.0
    beta: float = 0.1
    is_length_normalised: bool = False
    references: Mapping[str, Prediction] = field(default_factory=dict)

    @torch.inference_mode()
    def score(self, examples: Sequence[Any]) -> list[Prediction]:
        """Return one prediction an example, in order."""
        device = next(self.model.parameters()).device
        rows = [row for example in examples for row in token_rows(example)]
        ids, attention_mask, _ = pad_rows(rows, [0] * len(rows), self.pad_id)
        ids, attention_mask = ids.to(device), attention_mask.to(device)
        with autocast(device, self.precision):
            if is_scalar(self.model):
                logits = all_logits(self.model, {"input_ids": ids, "attention_mask": attention_mask}).float().cpu()
                tables = [logits[row, : len(tokens)] for row, tokens in enumerate(rows)]  # [T, L]
            else:
                scores = response_logprobs(self.model, ids, attention_mask, self.temperature)
                both = torch.stack(scores, dim=-1).float().cpu()
                tables = [both[row, : len(tokens) - 1] for row, tokens in enumerate(rows)]  # [T - 1, 2]
        width = len(rows) // len(examples)  # 2 for pairs
        parts = [tables[start : start + width] for start in range(0, len(rows), width)]
        predict = self._from_logits if is_scalar(self.model) else self._from_logprobs
        return [predict(example, part) for example, part in zip(examples, parts, strict=True)]

    def _from_logits(self, example: Any, tables: list[torch.Tensor]) -> Prediction:
        """From logits [T, L] of each row."""
        if isinstance(example, StepExample):
            scores = scores_from_logits(tables[0][example.positions])
            return StepPredictions(example.id, _rounded(scores), [round(value, 6) for value in example.values])
        ends = [table[-1] for table in tables]
        has_one_label = ends[0].numel() == 1
        if isinstance(example, OutcomeExample):
            score = float(scores_from_logits(ends[0]))
            reward = round(float(ends[0]), 6) if has_one_label else None
            return RewardPrediction(example.id, round(score, 6), example.value, reward)
        if not has_one_label:
            raise BadInput(f"pairs are scored by a head of one label, not {ends[0].numel()}")
        chosen, rejected = (float(end) for end in ends)
        return PairRewards(example.id, round(chosen, 6), round(rejected, 6), round(chosen - rejected, 6))

    def _from_logprobs(self, example: Any, tables: list[torch.Tensor]) -> Prediction:
        """From (log-prob, entropy) [T - 1, 2] of each row: place t - 1 is token t."""
        if isinstance(example, PairExample):
            start = len(example.prompt_ids) - 1
            chosen, rejected = (table[start:, 0] for table in tables)
            return self._with_margin(PairLogprobs(example.id, _sum(chosen), _sum(rejected), len(chosen), len(rejected)))
        table = tables[0][max(0, example.prompt_length - 1) :]
        entropy = round(float(table[:, 1].double().mean()), 6)
        row = ResponseLogprobs(example.id, _sum(table[:, 0]), _rounded(table[:, 0]), entropy)
        reference = self.references.get(row.id)
        if not isinstance(reference, ResponseLogprobs):
            return row
        reward = self.beta * (row.logprob - reference.logprob)
        return replace(row, reference_logprob=reference.logprob, reward=round(reward, 6))

    def _with_margin(self, row: PairLogprobs) -> PairLogprobs:
        reference = self.references.get(row.id)
        if not isinstance(reference, PairLogprobs):
            return row
        lengths = (row.num_chosen_tokens, row.num_rejected_tokens) if self.is_length_normalised else (1, 1)
        chosen = self.beta * (row.chosen_logprob - reference.chosen_logprob) / lengths[0]
        rejected = self.beta * (row.rejected_logprob - reference.rejected_logprob) / lengths[1]
        return replace(
            row,
            reference_chosen_logprob=reference.chosen_logprob,
            reference_rejected_logprob=reference.rejected_logprob,
            chosen_reward=round(chosen, 6),
            rejected_reward=round(rejected, 6),
            margin=round(chosen - rejected, 6),
        )


def _sum(values: torch.Tensor) -> float:
    return round(float(values.double().sum()), 6)


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(value, 6) for value in values.double().tolist()]
