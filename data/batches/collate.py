"""Examples → batches (`data.batches.batch`) on the CPU, one function for each kind of example."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from espalier.data.batches.batch import Batch
from espalier.data.batches.packing import Layout, PlacedRows, place_rows
from espalier.data.examples.token_examples import OutcomeExample, PairExample, StepExample, TokenExample


@dataclass(frozen=True)
class Read:
    """One place that a scalar head is read at: a token of a row, with its target and its weight."""

    row: int
    position: int
    value: float
    weight: float


@dataclass(frozen=True)
class _Targets:
    """The targets of one row: its tokens `start`..end, with a weight each (empty: all 1; 0 is none)."""

    row: Sequence[int]
    start: int
    weights: Sequence[float] = ()

    def key(self) -> str:
        """Return a hash of the tokens and of which of them are targets."""
        kept = [weight != 0 for weight in self.weights]
        content = np.array([self.start, len(self.row), *self.row, *kept], dtype=np.int64)
        return hashlib.blake2b(content.tobytes(), digest_size=12).hexdigest()


def _targets(rows: Sequence[_Targets], placed: PlacedRows) -> dict[str, torch.Tensor]:
    """Return the fields of the targets. A row's first token has nothing before it and is none."""
    ids, numbers, positions, weights = [], [], [], []
    for number, (row, path) in enumerate(zip(rows, placed.paths, strict=True)):
        first = max(row.start, 1)
        own = torch.tensor(row.row[first:], dtype=torch.long)
        weight = torch.ones(len(own))
        if row.weights:
            weight = torch.tensor(row.weights, dtype=torch.float32)[first - row.start :]
        kept = weight != 0
        ids.append(own[kept])
        positions.append(path[first - 1 : -1][kept])
        weights.append(weight[kept])
        numbers.append(torch.full((int(kept.sum()),), number))
    names = ("targets", "target_rows", "target_places", "target_weights")
    return {name: torch.cat(parts) for name, parts in zip(names, (ids, numbers, positions, weights), strict=True)}


def _batch(
    example_ids: list[str],
    rows: Sequence[_Targets],
    layout: Layout,
    reads: Sequence[Read] = (),
    margins: Sequence[float] = (),
    mismatched: Batch | None = None,
) -> Batch:
    placed = place_rows([row.row for row in rows], layout)
    return Batch(
        example_ids,
        num_rows=len(rows),
        num_tokens=sum(len(row.row) for row in rows),
        ids=placed.ids,
        attention_mask=placed.attention_mask,
        position_ids=placed.position_ids,
        segments=placed.segments,
        **_targets(rows, placed),
        read_places=torch.tensor([int(placed.paths[read.row][read.position]) for read in reads], dtype=torch.long),
        values=torch.tensor([read.value for read in reads], dtype=torch.float32),
        weights=torch.tensor([read.weight for read in reads], dtype=torch.float32),
        margins=torch.tensor(margins, dtype=torch.float32),
        row_keys=[row.key() for row in rows],
        mismatched=mismatched,
    )


def collate_tokens(examples: Sequence[TokenExample], layout: Layout) -> Batch:
    """SFT: one row an example."""
    rows = [_Targets(example.ids, example.prompt_length, example.weights) for example in examples]
    return _batch([example.id for example in examples], rows, layout)


def collate_steps(examples: Sequence[StepExample], layout: Layout) -> Batch:
    """Return process rewards: one row an example, one read for every step end, no targets."""
    reads = [
        Read(row, *read)
        for row, example in enumerate(examples)
        for read in zip(example.positions, example.values, example.weights or [1.0] * len(example.values), strict=True)
    ]
    rows = [_Targets(example.ids, len(example.ids)) for example in examples]
    return _batch([example.id for example in examples], rows, layout, reads)


def collate_outcomes(examples: Sequence[OutcomeExample], layout: Layout) -> Batch:
    """Outcomes: one row an example, its response as targets, read at its last token."""
    rows = [_Targets(example.ids, example.prompt_length) for example in examples]
    return _batch([example.id for example in examples], rows, layout, _last_reads(examples))


def collate_unpaired(examples: Sequence[OutcomeExample], layout: Layout) -> Batch:
    """Preferences without pairs: `collate_outcomes`, and in `mismatched` each prompt with the response to another."""
    names = [example.id for example in examples]
    others = [_Targets([*e.ids[: e.prompt_length], *e.mismatched_ids], e.prompt_length) for e in examples]
    rows = [_Targets(example.ids, example.prompt_length) for example in examples]
    mismatched = _batch(names, others, layout)
    return _batch(names, rows, layout, _last_reads(examples), mismatched=mismatched)


def _last_reads(examples: Sequence[OutcomeExample]) -> list[Read]:
    return [Read(row, len(e.ids) - 1, e.value, e.weight) for row, e in enumerate(examples)]


def collate_pairs(examples: Sequence[PairExample], layout: Layout) -> Batch:
    """Preferences: two rows a pair, chosen then rejected, each read at its last token."""
    rows = [
        _Targets([*example.prompt_ids, *side], len(example.prompt_ids))
        for example in examples
        for side in (example.chosen_ids, example.rejected_ids)
    ]
    weights = [example.weight for example in examples for _ in range(2)]
    reads = [Read(number, len(row.row) - 1, float(number % 2 == 0), weights[number]) for number, row in enumerate(rows)]
    return _batch([e.id for e in examples], rows, layout, reads, [e.margin for e in examples])
