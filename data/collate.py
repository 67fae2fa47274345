"""Examples → padded batches on the CPU. Padding is on the right and masked: no value depends on it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from data.examples import OutcomeExample, PairExample, StepExample, TokenExample


@dataclass
class Batch:
    """`ids`, `attention_mask` [B, T]; `response_mask` [B, T] bool, true on the tokens a loss or a sum reads;
    `token_weights` [B, T] float32, their weights (0 elsewhere).

    `positions`, `values`, `weights` [R] (rows of `ids` in `rows` [R]) are what a scalar head reads: the step ends
    of process rewards, the last tokens of outcomes and of both sides of pairs. `margins` [P] are those of pairs.
    `example_ids` names the examples; a pair takes two rows, chosen in row 2i and rejected in row 2i + 1.
    """

    example_ids: list[str]
    ids: torch.Tensor
    attention_mask: torch.Tensor
    response_mask: torch.Tensor
    token_weights: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    values: torch.Tensor
    weights: torch.Tensor
    margins: torch.Tensor

    def to(self, device: torch.device) -> Self:
        """The same batch on another device."""
        tensors = {name: value.to(device) for name, value in vars(self).items() if torch.is_tensor(value)}
        return type(self)(example_ids=self.example_ids, **tensors)


def pad_rows(rows: Sequence[Sequence[int]], starts: Sequence[int], pad_id: int) -> tuple[torch.Tensor, ...]:
    """(ids, attention_mask, response_mask) [B, T]; row i's response begins at token `starts[i]`."""
    length = max(len(row) for row in rows)
    ids = torch.full((len(rows), length), pad_id, dtype=torch.long)
    attention_mask = torch.zeros((len(rows), length), dtype=torch.long)
    response_mask = torch.zeros((len(rows), length), dtype=torch.bool)
    for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
        ids[index, : len(row)] = torch.tensor(row)
        attention_mask[index, : len(row)] = 1
        response_mask[index, start : len(row)] = True
    return ids, attention_mask, response_mask


@dataclass(frozen=True)
class Read:
    """One place that a scalar head is read at, with its target and its weight."""

    row: int
    position: int
    value: float
    weight: float


def _batch(
    example_ids: list[str],
    rows: Sequence[Sequence[int]],
    starts: Sequence[int],
    pad_id: int,
    reads: Sequence[Read] = (),
    margins: Sequence[float] = (),
) -> Batch:
    ids, attention_mask, response_mask = pad_rows(rows, starts, pad_id)
    return Batch(
        example_ids,
        ids,
        attention_mask,
        response_mask,
        token_weights=response_mask.float(),
        rows=torch.tensor([read.row for read in reads], dtype=torch.long),
        positions=torch.tensor([read.position for read in reads], dtype=torch.long),
        values=torch.tensor([read.value for read in reads], dtype=torch.float32),
        weights=torch.tensor([read.weight for read in reads], dtype=torch.float32),
        margins=torch.tensor(margins, dtype=torch.float32),
    )


def collate_tokens(examples: Sequence[TokenExample], pad_id: int) -> Batch:
    """SFT: one row an example. A token of weight 0 is out of `response_mask`."""
    rows = [example.ids for example in examples]
    batch = _batch([e.id for e in examples], rows, [e.prompt_length for e in examples], pad_id)
    for row, example in enumerate(examples):
        if example.weights:
            batch.token_weights[row, example.prompt_length : len(example.ids)] = torch.tensor(example.weights)
    batch.response_mask &= batch.token_weights != 0
    return batch


def collate_steps(examples: Sequence[StepExample], pad_id: int) -> Batch:
    """Process rewards: one row an example, one read for every step end."""
    rows = [example.ids for example in examples]
    reads = [
        Read(row, *read)
        for row, example in enumerate(examples)
        for read in zip(example.positions, example.values, example.weights or [1.0] * len(example.values), strict=True)
    ]
    return _batch([e.id for e in examples], rows, [0] * len(rows), pad_id, reads)


def collate_outcomes(examples: Sequence[OutcomeExample], pad_id: int) -> Batch:
    """Outcomes: one row an example, read at its last token."""
    rows = [example.ids for example in examples]
    reads = [Read(row, len(e.ids) - 1, e.value, e.weight) for row, e in enumerate(examples)]
    return _batch([e.id for e in examples], rows, [e.prompt_length for e in examples], pad_id, reads)


def collate_unpaired(examples: Sequence[OutcomeExample], pad_id: int) -> Batch:
    """Preferences without pairs: rows 0..B-1 the examples as in `collate_outcomes`, rows B..2B-1 each prompt with
    the response to another one, which no read looks at."""
    rows = [example.ids for example in examples]
    rows += [[*e.ids[: e.prompt_length], *e.mismatched_ids] for e in examples]
    reads = [Read(row, len(e.ids) - 1, e.value, e.weight) for row, e in enumerate(examples)]
    return _batch([e.id for e in examples], rows, [e.prompt_length for e in examples] * 2, pad_id, reads)


def collate_pairs(examples: Sequence[PairExample], pad_id: int) -> Batch:
    """Preferences: two rows a pair, chosen then rejected, each read at its last token."""
    rows = [[*example.prompt_ids, *side] for example in examples for side in (example.chosen_ids, example.rejected_ids)]
    starts = [len(example.prompt_ids) for example in examples for _ in range(2)]
    reads = [Read(row, len(ids) - 1, float(row % 2 == 0), 1.0) for row, ids in enumerate(rows)]
    return _batch([e.id for e in examples], rows, starts, pad_id, reads, [e.margin for e in examples])
