"""`long_arithmetic`: word problems of many steps of which most are easy and some are hard, embedded so that nothing is
downloaded.

The problems are those of `word_arithmetic` with other operations (data/tasks/arithmetic_operations.py). Of the
`min_operations` to `max_operations` of a problem

- `num_hard` are hard: doubles, pairs or lends, each drawn where the total allows it. The teacher goes their wrong way
  with probability `wrong_way_rate`, each time independently. The wrong way always gives less than the right one;
- with `num_repaired` above 0 one is "swaps all for n", which sets the total: `num_repaired` of the hard ones stand
  before it, and their wrong ways do no harm;
- `num_distractors` are "a friend doubles n": the teacher goes the same wrong way there, and the total does not depend
  on it;
- all others are easy: buys and gives, which the teacher does right.

Where they stand is random. Once too low, a total stays too low until it is swapped: every operation that follows keeps
a < b where it was so before. So the teacher, and a policy that imitates it without slips, succeeds with probability
(1 - `wrong_way_rate`) ** (`num_hard` - `num_repaired`) on every problem, exactly.
"""

import random
from dataclasses import dataclass

from espalier.data.records import BadInput
from espalier.data.tasks.arithmetic_operations import Operation, apply_operation
from espalier.data.tasks.word_arithmetic import WordArithmetic


@dataclass(frozen=True)
class LongArithmetic(WordArithmetic):
    """Args: those of `WordArithmetic`, hard operations of a problem, how many of them stand before the line that
    repairs their errors, and lines that look like hard ones without being part of the total."""

    wrong_way_rate: float = 0.54
    min_operations: int = 11
    max_operations: int = 12
    num_hard: int = 4
    num_repaired: int = 1
    num_distractors: int = 1

    name = "long_arithmetic"
    id_prefix = "la"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.num_repaired <= self.num_hard:
            raise BadInput(f"task.num_repaired must be from 0 to task.num_hard ({self.num_hard}), got "
                           f"{self.num_repaired}")  # fmt: skip
        if not 0 <= self.wrong_way_rate <= 1:
            raise BadInput(f"task.wrong_way_rate must be from 0 to 1, got {self.wrong_way_rate}")
        if self.num_distractors < 0:
            raise BadInput(f"task.num_distractors must be at least 0, got {self.num_distractors}")
        if self.min_operations < self._num_special:
            raise BadInput(f"task.min_operations must be at least {self._num_special}, one for every hard operation, "
                           f"distractor and swap, got {self.min_operations}")  # fmt: skip

    @property
    def _num_special(self) -> int:
        return self.num_hard + self.num_distractors + (self.num_repaired > 0)

    def draw(self, rng: random.Random) -> tuple[int, list[Operation]]:
        """Return the start and the operations of one problem; all totals stay within 1..max_total."""
        start = value = rng.randint(2, self.max_total // 2)
        operations: list[Operation] = []
        for kind in self._draw_kinds(rng):
            operations.append(rng.choice(self._options(kind, value, rng)))
            value = apply_operation(value, operations[-1])
        return start, operations

    def _draw_kinds(self, rng: random.Random) -> list[str]:
        """Return "hard", "easy", "friend" and "swaps" in the order of the operations."""
        num_easy = rng.randint(self.min_operations, self.max_operations) - self._num_special
        kinds = ["hard"] * self.num_hard + ["easy"] * num_easy + ["friend"] * self.num_distractors
        rng.shuffle(kinds)
        if self.num_repaired:
            hard = [place for place, kind in enumerate(kinds) if kind == "hard"]
            latest = hard[self.num_repaired] if self.num_repaired < self.num_hard else len(kinds)
            kinds.insert(rng.randint(hard[self.num_repaired - 1] + 1, latest), "swaps")
        return kinds

    def _options(self, kind: str, value: int, rng: random.Random) -> list[Operation]:
        """Return the operations of a kind that a total allows, one of each verb; never none."""
        options: list[Operation] = []
        if kind == "swaps":
            return [("swaps", rng.randint(2, self.max_total // 2))]
        if kind == "friend":
            return [("friend", rng.randint(3, max(3, self.max_total // 2)))]
        if kind == "easy":
            if value < self.max_total:
                options.append(("buys", rng.randint(1, min(9, self.max_total - value))))
            if value > 1:
                options.append(("gives", rng.randint(1, min(9, value - 1))))
            return options
        if value > 2 and value * 2 <= self.max_total:
            options.append(("doubles", 0))
        if value + 2 <= self.max_total:
            options.append(("pairs", rng.randint(1, min(4, (self.max_total - value) // 2))))
        if value > 1:
            options.append(("lends", 2 * rng.randint(1, min(4, value - 1))))
        return options
