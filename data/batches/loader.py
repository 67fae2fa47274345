"""Distributed, seeded, resumable batches: which examples make step s is a function of (seed, s) alone.

Epochs are permutations laid end to end, so every step has exactly `batch_size` examples and a resume needs
nothing but its step number. Within a step examples are sorted by length, cut into micro-batches and dealt
to the ranks in turn: `micro_batch_size` examples each, or, with a budget of tokens, as few as keep each within the
budget, of equal weight, and equally many on every rank (some empty where examples are few).
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from espalier.data.examples.token_examples import computed_tokens, example_length
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
    _orders: dict[int, list[int]] = field(default_factory=dict)

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

    def _check_budget(self) -> None:
        budget = self.micro_batch_tokens
        longest = max(self.examples, key=computed_tokens, default=None)
        if longest is not None and computed_tokens(longest) > budget:
            size = computed_tokens(longest)
            raise BadInput(f"example '{longest.id}' has {size} tokens, more than update.micro_batch_tokens {budget}: "
                           "raise it, or lower examples.max_length")  # fmt: skip
        if self.batch_size < self.world_size:
            raise BadInput(f"update.batch_size {self.batch_size} leaves some of {self.world_size} ranks without an "
                           f"example: choose update.batch_size={self.world_size} at least")  # fmt: skip

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            order = list(range(len(self.examples)))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._orders = {key: value for key, value in self._orders.items() if key == epoch - 1}
            self._orders[epoch] = order
        return self._orders[epoch]

    def step_examples(self, step: int) -> list[Any]:
        """Return the examples of step `step` (from 0) over all ranks, shortest first."""
        count = len(self.examples)
        positions = range(step * self.batch_size, (step + 1) * self.batch_size)
        chosen = [self.examples[self._order(place // count)[place % count]] for place in positions]
        return sorted(chosen, key=example_length)

    def micro_batches(self, step: int) -> list[list[Any]]:
        """Return this rank's share of the step, as many micro-batches on every rank. With a budget of tokens some are
        empty where ranks times micro-batches is more than there are examples: few long ones on many ranks."""
        return self._cut(self.step_examples(step))[self.rank :: self.world_size]

    def stand_in(self, step: int) -> Any:
        """Return the example that takes part, uncounted, where a micro-batch of the step is empty: the shortest."""
        return self.step_examples(step)[0]

    def evaluation_batches(self) -> list[list[Any]]:
        """Return all examples once, over all ranks, in order (with a budget: of equal weight)."""
        size = self.micro_batch_size
        if self.micro_batch_tokens:
            return [cut for cut in _balanced(self.examples, self.micro_batch_tokens, 1) if cut]
        return [list(self.examples[start : start + size]) for start in range(0, len(self.examples), size)]

    def _cut(self, chosen: Sequence[Any]) -> list[list[Any]]:
        if self.micro_batch_tokens:
            return _balanced(chosen, self.micro_batch_tokens, self.world_size)
        size = self.micro_batch_size
        return [list(chosen[start : start + size]) for start in range(0, len(chosen), size)]


def _balanced(examples: Sequence[Any], budget: int, unit: int) -> list[list[Any]]:
    """Return the fewest bins (a multiple of `unit`) of at most `budget` tokens that the longest-first rule finds; in
    each the examples keep their order, and none is empty while there are as many examples as bins."""
    weights = [computed_tokens(example) for example in examples]
    heaviest_first = sorted(range(len(examples)), key=weights.__getitem__, reverse=True)
    number = unit * max(1, math.ceil(sum(weights) / (budget * unit)))
    while True:
        loads = [0] * number
        bins: list[list[int]] = [[] for _ in range(number)]
        for index in heaviest_first:
            lightest = min(range(number), key=loads.__getitem__)
            loads[lightest] += weights[index]
            bins[lightest].append(index)
        if max(loads) <= budget or number >= len(examples):
            return [[examples[index] for index in sorted(chosen)] for chosen in bins]
        number += unit
