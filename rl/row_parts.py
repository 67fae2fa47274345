"""Rows of an iteration's rollouts on their way to the rank that computes them, and passes over them on all ranks.

Rank 0 holds the tensors [N, T] of all rollouts. What another rank computes it gets with the call (`runtime.leading`):
its rows of that pass, so many micro-batches of them that all ranks together get `MOST_TOKENS` tokens, and it keeps
none. Every rank makes as many passes as the one with the most: ZeRO-3 gathers weights in every pass, and gradients are
reduced in every backward pass.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self, TypeVar

import torch

from espalier.rl.old_logprobs import OldLogprobs
from espalier.rl.row_shares import Cut
from espalier.rl.types import Experience
from espalier.runtime.leading import ask, ask_alike
from espalier.training.engine import Engine

R = TypeVar("R")

MOST_TOKENS = 2**22
"""Of all ranks at a time, prompts included: some 80 MB of an update's rows, once more on rank 0 on their way."""
OLD = "old_logprobs"
Masks = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""ids, attention mask, response mask [N, T]"""


@dataclass(frozen=True)
class RowPart:
    """R rows and nothing but the tokens that they have. `numbers` [R]: which rows they are; `cuts`: the micro-batches,
    in row numbers of this part; `num_empty`: passes to be made for the other ranks' sake."""

    numbers: torch.Tensor
    ids: torch.Tensor
    attention_mask: torch.Tensor
    response_mask: torch.Tensor
    values: dict[str, torch.Tensor]
    """Of the response tokens, by the names of `Experience`."""
    cuts: list[Cut]
    num_empty: int

    @classmethod
    def of(cls, masks: Masks, values: Mapping[str, torch.Tensor], cuts: Sequence[Cut], num_empty: int) -> Self:
        """Take the rows of `cuts` from tensors [N, T]."""
        numbers = torch.cat([rows for rows, _ in cuts]) if cuts else torch.zeros(0, dtype=torch.long)
        width = max((length for _, length in cuts), default=0)
        ids, attention_mask, response_mask = (tensor[numbers, :width] for tensor in masks)
        attention_mask, response_mask = attention_mask.bool(), response_mask.bool()
        chosen = {name: tensor[numbers, :width][response_mask] for name, tensor in values.items()}
        places = torch.arange(len(numbers)).split([len(rows) for rows, _ in cuts]) if cuts else ()
        own = [(place, length) for place, (_, length) in zip(places, cuts, strict=True)]
        return cls(numbers, ids[attention_mask], attention_mask, response_mask, chosen, own, num_empty)

    def experience(self) -> Experience:
        """Return the rows as tensors [R, T'], 0 where nothing is known; log-probs of before are scored or empty."""
        mask = self.response_mask
        ids = self.ids.new_zeros(mask.shape).masked_scatter_(self.attention_mask, self.ids)
        found = {name: values.new_zeros(mask.shape).masked_scatter_(mask, values)
                 for name, values in self.values.items()}  # fmt: skip
        none = torch.zeros(0, 0)
        old = OldLogprobs(found.pop(OLD, none), none)
        drawn = found.pop("rollout_logprobs", none)
        return Experience(ids, self.attention_mask, mask, drawn, old, **found)


def portions(attention_mask: torch.Tensor, cuts: Sequence[Sequence[Cut]]) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of passes that are asked for together: as many as have `MOST_TOKENS` on all ranks together,
    and one at least. `cuts`: of every rank, in rows of `attention_mask` [N, T]."""
    lengths = attention_mask.sum(-1)
    tokens = [0] * max(map(len, cuts))
    for own in cuts:
        for number, (rows, _) in enumerate(own):
            tokens[number] += int(lengths[rows].sum())
    first = 0
    for number in range(1, len(tokens) + 1):
        if number == len(tokens) or sum(tokens[first : number + 1]) > MOST_TOKENS:
            yield first, number
            first = number


def on_ranks(
    call: Callable[[RowPart], R], masks: Masks, values: Mapping[str, torch.Tensor], cuts: Sequence[Sequence[Cut]]
) -> Iterator[tuple[Sequence[Cut], R]]:
    """Yield (micro-batches, what `call` returns of them) of every rank, a portion at a time: each rank makes the call
    on its own `cuts`, with `masks` and `values` [N, T] of their rows. Both are picklable."""
    for first, end in portions(masks[1], cuts):
        shares = [own[first:end] for own in cuts]
        parts = [RowPart.of(masks, values, own, end - first - len(own)) for own in shares]
        yield from zip(shares, ask([partial(call, part) for part in parts]), strict=True)


def fill(whole: torch.Tensor, mask: torch.Tensor, cut: Cut, values: torch.Tensor) -> None:
    """Put the `values` of a micro-batch's response tokens where they are in `whole` [N, T], in place."""
    rows, length = cut
    block = whole[rows, :length]
    block[mask[rows, :length]] = values
    whole[rows, :length] = block


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
