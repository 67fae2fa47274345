"""Distributed, seeded, resumable batches: which examples make step s is a function of (seed, s) alone.

Epochs are permutations laid end to end, so every step has exactly `batch_size` examples and a resume needs
nothing but its step number. Within a step examples are sorted by length, cut into micro-batches and dealt
to the ranks in turn: `micro_batch_size` examples each, or, with a budget of tokens, as few as keep each within the
budget, of equal weight, and equally many on every rank (some empty where examples are few). Only the examples of a
rank's own micro-batches are read; their lengths are known beforehand (`data.examples.example_facts`).
"""

import math
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from espalier.data.examples.stored_examples import StoredExamples, facts_of
from espalier.data.records import BadInput


@dataclass
class Loader:
    """`micro_batches(step)` gives this rank's micro-batches (lists of examples) of one optimizer step.

    `micro_batch_tokens` above 0 takes the place of `micro_batch_size`: tokens of a micro-batch, as they are computed
    without padding (a pair's prompt once).
    """

    examples: Sequence[Any]
    batch_size: int
    micro_batch_size: int
    seed: int
    rank: int = 0
    world_size: int = 1
    micro_batch_tokens: int = 0
    _orders: "dict[int, array[int]]" = field(default_factory=dict)

    def __post_init__(self) -> None:
        size, micro = self.batch_size, self.micro_batch_size
        if min(size, micro) < 1 or self.micro_batch_tokens < 0:
            raise BadInput(f"update.batch_size and update.micro_batch_size must be at least 1, got {size} "
                           f"and {micro} (micro_batch_tokens at least 0: {self.micro_batch_tokens})")  # fmt: skip
        if self.micro_batch_tokens:
            self._check_budget()
            return
        unit = micro * self.world_size
        if size % unit:
            raise BadInput(
                f"update.batch_size {size} is not a multiple of update.micro_batch_size {micro} x "
                f"{self.world_size} ranks: choose update.batch_size={max(1, size // unit) * unit}"
            )

    @cached_property
    def _lengths(self) -> npt.NDArray[np.int32]:
        return facts_of(self.examples)["length"]

    @cached_property
    def _weights(self) -> npt.NDArray[np.int32]:
        return facts_of(self.examples)["computed_tokens"]

    def _check_budget(self) -> None:
        budget, weights = self.micro_batch_tokens, self._weights
        if len(weights) and weights.max() > budget:
            place = int(weights.argmax())
            raise BadInput(f"example '{self.examples[place].id}' has {weights[place]} tokens, more than "
                           f"update.micro_batch_tokens {budget}: raise it, or lower examples.max_length")  # fmt: skip
        if self.batch_size < self.world_size:
            raise BadInput(f"update.batch_size {self.batch_size} leaves some of {self.world_size} ranks without an "
                           f"example: choose update.batch_size={self.world_size} at least")  # fmt: skip

    def _order(self, epoch: int) -> "array[int]":
        if epoch not in self._orders:
            order = array("I", range(len(self.examples)))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._orders = {key: value for key, value in self._orders.items() if key == epoch - 1}
            self._orders[epoch] = order
        return self._orders[epoch]

    def _step_places(self, step: int) -> list[int]:
        """Return where the examples of step `step` (from 0) are, over all ranks, shortest first."""
        count = len(self.examples)
        positions = range(step * self.batch_size, (step + 1) * self.batch_size)
        chosen = [self._order(place // count)[place % count] for place in positions]
        return sorted(chosen, key=lambda place: int(self._lengths[place]))

    def step_examples(self, step: int) -> list[Any]:
        """Return the examples of step `step` (from 0) over all ranks, shortest first."""
        return self._take(self._step_places(step))

    def micro_batches(self, step: int) -> list[list[Any]]:
        """Return this rank's share of the step, as many micro-batches on every rank. With a budget of tokens some are
        empty where ranks times micro-batches is more than there are examples: few long ones on many ranks."""
        mine = self._cut(self._step_places(step))[self.rank :: self.world_size]
        return [self._take(group) for group in mine]

    def stand_in(self, step: int) -> Any:
        """Return the example that takes part, uncounted, where a micro-batch of the step is empty: the shortest."""
        return self.examples[self._step_places(step)[0]]

    def evaluation_batches(self) -> Sequence[list[Any]]:
        """Return all examples once, over all ranks, in order (with a budget: of equal weight); each batch is read when
        it is asked for."""
        everything, size = range(len(self.examples)), self.micro_batch_size
        if self.micro_batch_tokens:
            cuts: list[Sequence[int]] = [cut for cut in self._balanced(everything, 1) if cut]
        else:
            cuts = [everything[start : start + size] for start in everything[::size]]
        return _Batches(self._take, cuts)

    def _take(self, places: Sequence[int]) -> list[Any]:
        if isinstance(self.examples, StoredExamples):
            return self.examples.take(places)
        return [self.examples[place] for place in places]

    def _cut(self, places: Sequence[int]) -> Sequence[Sequence[int]]:
        if self.micro_batch_tokens:
            return self._balanced(places, self.world_size)
        size = self.micro_batch_size
        return [places[start : start + size] for start in range(0, len(places), size)]

    def _balanced(self, places: Sequence[int], unit: int) -> list[list[int]]:
        """Return the fewest bins (a multiple of `unit`) of at most `micro_batch_tokens` that the longest-first rule
        finds; in each the examples keep their order, and none is empty while there are as many examples as bins."""
        budget = self.micro_batch_tokens
        weights = [int(self._weights[place]) for place in places]
        heaviest_first = sorted(range(len(places)), key=weights.__getitem__, reverse=True)
        number = unit * max(1, math.ceil(sum(weights) / (budget * unit)))
        while True:
            loads = [0] * number
            bins: list[list[int]] = [[] for _ in range(number)]
            for index in heaviest_first:
                lightest = min(range(number), key=loads.__getitem__)
                loads[lightest] += weights[index]
                bins[lightest].append(index)
            if max(loads) <= budget or number >= len(places):
                return [[places[index] for index in sorted(chosen)] for chosen in bins]
            number += unit


@dataclass(frozen=True)
class _Batches(Sequence[list[Any]]):
    """Batches whose examples are read by `take` when they are asked for."""

    take: Callable[[Sequence[int]], list[Any]]
    cuts: Sequence[Sequence[int]]

    def __len__(self) -> int:
        return len(self.cuts)

    @overload
    def __getitem__(self, index: int) -> list[Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[Any]]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return [self.take(cut) for cut in self.cuts[index]] if isinstance(index, slice) else self.take(self.cuts[index])
