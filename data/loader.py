"""Distributed, seeded, resumable batches: which examples make step s is a function of (seed, s) alone.

Epochs are permutations laid end to end, so every step has exactly `batch_size` examples and a resume needs
nothing but its step number. Within a step examples are sorted by length, cut into micro-batches and dealt
to the ranks in turn.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from data.examples import example_length
from data.records import BadInput


@dataclass
class Loader:
    """`micro_batches(step)` gives this rank's micro-batches (lists of examples) of one optimizer step."""

    examples: Sequence[Any]
    batch_size: int
    micro_batch_size: int
    seed: int
    rank: int = 0
    world_size: int = 1
    _orders: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size, micro = self.batch_size, self.micro_batch_size
        if min(size, micro) < 1:
            raise BadInput(f"batch_size and micro_batch_size must be at least 1, got {size} and {micro}")
        unit = micro * self.world_size
        if size % unit:
            raise BadInput(
                f"batch_size {size} is not a multiple of micro_batch_size {micro} x {self.world_size} ranks: "
                f"choose batch_size={max(1, size // unit) * unit}"
            )

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            order = list(range(len(self.examples)))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._orders = {key: value for key, value in self._orders.items() if key == epoch - 1}
            self._orders[epoch] = order
        return self._orders[epoch]

    def step_examples(self, step: int) -> list[Any]:
        """The examples of step `step` (from 0) over all ranks, shortest first."""
        count = len(self.examples)
        places = range(step * self.batch_size, (step + 1) * self.batch_size)
        chosen = [self.examples[self._order(place // count)[place % count]] for place in places]
        return sorted(chosen, key=example_length)

    def micro_batches(self, step: int) -> list[list[Any]]:
        """This rank's share of the step."""
        chosen = self.step_examples(step)
        size = self.micro_batch_size
        cuts = [chosen[start : start + size] for start in range(0, len(chosen), size)]
        return cuts[self.rank :: self.world_size]
