"""Rows of an iteration's rollouts on their way to the rank that computes them, and passes over them on all ranks.

Rank 0 holds the tensors [N, T] of all rollouts. What another rank computes it gets with the call (`runtime.leading`):
its rows of that pass, so many micro-batches of them that all ranks together get `row_shares.MOST_TOKENS` tokens, and it
keeps none. Every rank makes as many passes as the one with the most: ZeRO-3 gathers weights in every pass, and
gradients are reduced in every backward pass.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

import torch

from espalier.rl import row_shares
from espalier.rl.old_logprobs import OldLogprobs
from espalier.rl.row_shares import Cut
from espalier.rl.types import Experience
from espalier.runtime.leading import ask, ask_alike
from espalier.training.engine import Engine

R = TypeVar("R")

OLD = "old_logprobs"
Masks = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""ids, attention mask, response mask [N, T]"""


def positions(starts: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Return the numbers starts[i], starts[i] + 1, …, so many as sizes[i], one run behind another; both are [R]."""
    before = sizes.cumsum(0) - sizes
    return torch.repeat_interleave(starts - before, sizes) + torch.arange(int(sizes.sum()))


@dataclass(frozen=True)
class RowPart:
    """R rows and nothing but the tokens that they have. `numbers` [R]: which rows they are; `lengths` [R]: of their
    tokens, which stand one behind another in `ids` and in `is_response`; `sizes`: (rows, tokens of the longest) of the
    micro-batches, one behind another; `num_empty`: passes to be made for the other ranks' sake."""

    numbers: torch.Tensor
    lengths: torch.Tensor
    ids: torch.Tensor
    is_response: torch.Tensor
    values: dict[str, torch.Tensor]
    """Of the response tokens, by the names of `Experience`."""
    sizes: list[tuple[int, int]]
    num_empty: int
    places: torch.Tensor | None
    """Of the response tokens in a tensor [N, T], counted through; on rank 0 alone."""

    @classmethod
    def of(cls, masks: Masks, values: Mapping[str, torch.Tensor], cuts: Sequence[Cut], num_empty: int) -> Self:
        """Take the rows of `cuts` from tensors [N, T]. Raises ValueError where one is not padded on the right."""
        numbers = torch.cat([rows for rows, _ in cuts]) if cuts else torch.zeros(0, dtype=torch.long)
        ids, attention_mask, response_mask = masks
        lengths = attention_mask[numbers].sum(-1)
        tokens = positions(numbers * ids.shape[1], lengths)
        if not bool(attention_mask.reshape(-1)[tokens].all()):
            raise ValueError("rows are padded on the right: their tokens stand at their beginning")
        is_response = response_mask.reshape(-1)[tokens].bool()
        places = tokens[is_response]
        chosen = {name: tensor.reshape(-1)[places] for name, tensor in values.items()}
        sizes = [(len(rows), length) for rows, length in cuts]
        return cls(numbers, lengths, ids.reshape(-1)[tokens], is_response, chosen, sizes, num_empty, places)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what rank 0 alone needs."""
        return vars(self) | {"places": None}

    @property
    def cuts(self) -> list[Cut]:
        """The micro-batches, in row numbers of this part."""
        rows = torch.arange(len(self.numbers)).split([num for num, _ in self.sizes]) if self.sizes else ()
        return [(own, length) for own, (_, length) in zip(rows, self.sizes, strict=True)]

    def experience(self) -> Experience:
        """Return the rows as tensors [R, T'], 0 where nothing is known; log-probs of before are scored or empty."""
        shape = (len(self.lengths), int(self.lengths.max()) if len(self.lengths) else 0)
        tokens = positions(torch.arange(shape[0]) * shape[1], self.lengths)

        def spread(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            whole = values.new_zeros(shape)
            whole.view(-1)[places] = values
            return whole

        attention_mask = spread(torch.ones_like(self.is_response), tokens)
        ids, response_mask = spread(self.ids, tokens), spread(self.is_response, tokens)
        found = {name: spread(values, tokens[self.is_response]) for name, values in self.values.items()}
        none = torch.zeros(0, 0)
        old = OldLogprobs(found.pop(OLD, none), none)
        drawn = found.pop("rollout_logprobs", none)
        return Experience(ids, attention_mask, response_mask, drawn, old, **found)

    def fill(self, whole: torch.Tensor, values: torch.Tensor) -> None:
        """Put what was found of the response tokens where they are in `whole` [N, T], in place; on rank 0."""
        assert self.places is not None
        whole.view(-1)[self.places] = values


def portions(attention_mask: torch.Tensor, cuts: Sequence[Sequence[Cut]]) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of passes that are asked for together: as many as have `row_shares.MOST_TOKENS` on all ranks
    together, and one at least. `cuts`: of every rank, in rows of `attention_mask` [N, T]."""
    lengths = attention_mask.sum(-1)
    tokens = [0] * max(map(len, cuts))
    for own in cuts:
        for number, (rows, _) in enumerate(own):
            tokens[number] += int(lengths[rows].sum())
    first = held = 0
    for number, new in enumerate(tokens):
        if number > first and held + new > row_shares.MOST_TOKENS:
            yield first, number
            first, held = number, 0
        held += new
    if tokens:
        yield first, len(tokens)


def on_ranks(
    call: Callable[[RowPart], R], masks: Masks, values: Mapping[str, torch.Tensor], cuts: Sequence[Sequence[Cut]]
) -> Iterator[tuple[RowPart, R]]:
    """Yield (rows, what `call` returns of them) of every rank, a portion at a time: each rank makes the call on its own
    `cuts`, with `masks` and `values` [N, T] of their rows. Call and answer are picklable."""
    for first, end in portions(masks[1], cuts):
        shares = [own[first:end] for own in cuts]
        parts = [RowPart.of(masks, values, own, end - first - len(own)) for own in shares]
        yield from zip(parts, ask([partial(call, part) for part in parts]), strict=True)


def joined(found: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what micro-batches gave of their response tokens as one, [tokens] on the CPU in float32."""
    return torch.cat([torch.zeros(0), *(part.float().cpu() for part in found)])


def begin_step(engine: Engine, cuts: Sequence[Sequence[Cut]]) -> int:
    """Have every rank begin a step of as many passes as the rank with the most has; return their number."""
    num_passes = max(map(len, cuts))
    ask_alike(partial(_begin, engine, num_passes))
    return num_passes


def _begin(engine: Engine, num_passes: int) -> None:
    engine.model.train()
    engine.start_step(num_passes)


def take_step(engine: Engine, learning_rate: float) -> float:
    """Have every rank take the step; return the norm of the gradient before clipping."""
    return ask_alike(partial(engine.step, learning_rate))
