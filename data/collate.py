"""Examples → padded batches on the CPU. Padding is on the right and masked: no value depends on it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from data.examples import PairExample, StepExample, TokenExample


@dataclass
class Batch:
    """`ids`, `attention_mask` [B, T]; `response_mask` [B, T] bool, true on the tokens a loss or a sum reads.

    `positions`, `values` [R] (rows of `ids` in `rows` [R]) are the step ends of a process reward batch.
    `example_ids` names the examples; a pair takes two rows, chosen in row 2i and rejected in row 2i + 1.
    """

    example_ids: list[str]
    ids: torch.Tensor
    attention_mask: torch.Tensor
    response_mask: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    values: torch.Tensor

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


def _batch(
    example_ids: list[str],
    rows: Sequence[Sequence[int]],
    starts: Sequence[int],
    pad_id: int,
    reads: Sequence[tuple[int, int, float]] = (),
) -> Batch:
    ids, attention_mask, response_mask = pad_rows(rows, starts, pad_id)
    return Batch(
        example_ids,
        ids,
        attention_mask,
        response_mask,
        rows=torch.tensor([row for row, _, _ in reads], dtype=torch.long),
        positions=torch.tensor([position for _, position, _ in reads], dtype=torch.long),
        values=torch.tensor([value for _, _, value in reads], dtype=torch.float32),
    )


def collate_tokens(examples: Sequence[TokenExample], pad_id: int) -> Batch:
    """SFT: one row an example."""
    rows = [example.ids for example in examples]
    return _batch([e.id for e in examples], rows, [e.prompt_length for e in examples], pad_id)


def collate_steps(examples: Sequence[StepExample], pad_id: int) -> Batch:
    """Process rewards: one row an example, one read for every step end."""
    rows = [example.ids for example in examples]
    reads = [
        (row, position, value)
        for row, example in enumerate(examples)
        for position, value in zip(example.positions, example.values, strict=True)
    ]
    return _batch([e.id for e in examples], rows, [0] * len(rows), pad_id, reads)


def collate_pairs(examples: Sequence[PairExample], pad_id: int) -> Batch:
    """Preferences: two rows a pair, chosen then rejected."""
    rows = [[*example.prompt_ids, *side] for example in examples for side in (example.chosen_ids, example.rejected_ids)]
    starts = [len(example.prompt_ids) for example in examples for _ in range(2)]
    return _batch([e.id for e in examples], rows, starts, pad_id)
