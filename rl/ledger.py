"""Where every sampled token of a run ended: the balance of rollouts, and that of completions.

Tokens are those that rollouts drew themselves. A token that has come is trained on (by its age: how many versions the
policy was ahead of the one that drew it), dropped as agreeing (dynamic sampling's surplus), dropped by the filter, or
waiting for the batch that it was drawn for; what waits when a program ends comes back with the checkpoint, or is drawn
again. What an estimator has sampled beside them (completions of states, other rollouts) has valued something, waits
with its batch or is drawn again. Both sides are counted where things happen, not one from the other, so that what is
lost, or used twice, shows.
"""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from espalier.rl.types import RolloutGroup


class LedgerOpen(RuntimeError):
    """The balance does not close: rollouts were lost, or trained on twice."""

    exit_code = 2


def tokens_of(groups: Iterable[RolloutGroup]) -> int:
    """Count the tokens that the rollouts drew themselves."""
    return sum(len(rollout.drawn_ids) for group in groups for rollout in group.rollouts)


def read_waiting(path: Path) -> tuple[int, int]:
    """Return the tokens (of rollouts, of completions) that waited after the last iteration in a metrics.jsonl."""
    rows = (json.loads(line) for line in path.read_text().splitlines()) if path.is_file() else ()
    found = [row for row in rows if "ledger/waiting" in row]
    last = found[-1] if found else {}
    return int(last.get("ledger/waiting", 0)), int(last.get("ledger/completions_waiting", 0))


class Ledger:
    """Counts of tokens; `max_age`: the oldest that are trained on."""

    def __init__(self, max_age: int):
        self.max_age = max_age
        self.generated = self.agreeing = self.filtered = self.drawn_again = 0
        self.valued = self.completions_again = self._completions_before = 0
        self.trained: Counter[int] = Counter()
        self._before: dict[str, int] = {}

    def go_on(self, waiting: int, completions: int, kept: int = 0, kept_completions: int = 0) -> None:
        """Take over the tokens (of rollouts, of completions) that waited in the last iteration of the program of
        before, and those that its checkpoint kept; the others are drawn again."""
        self.generated, self.drawn_again = max(waiting, kept), max(0, waiting - kept)
        self._completions_before = max(completions, kept_completions)
        self.completions_again = max(0, completions - kept_completions)
        self._before |= {"generated": waiting, "completions": completions}

    def train(self, groups: Iterable[RolloutGroup], version: int) -> None:
        """Take rollouts that the policy of `version` is trained on."""
        for group in groups:
            for rollout in group.rollouts:
                self.trained.update(version - drawn_by for drawn_by in rollout.token_versions)

    def close(self, waiting: int) -> dict[str, float]:
        """Return the balance as metrics: what came and where it went since the last call, and what waits; `waiting`:
        tokens that came for batches that nothing was taken from yet. Raises LedgerOpen."""
        trained = sum(self.trained.values())
        if self.generated != trained + self.agreeing + self.filtered + self.drawn_again + waiting:
            raise LedgerOpen(f"{self.generated} tokens came, and {trained} are trained on, {self.agreeing} dropped as "
                             f"agreeing, {self.filtered} filtered, {self.drawn_again} drawn again, {waiting} "
                             "waiting")  # fmt: skip
        counts = {f"trained_age_{age}": self.trained[age] for age in range(self.max_age + 1)}
        counts |= {"agreeing": self.agreeing, "filtered": self.filtered, "generated": self.generated}
        return self._new(counts | {"drawn_again": self.drawn_again}) | {"ledger/waiting": float(waiting)}

    def close_completions(self, came: int, waiting: int, dropped: int = 0) -> dict[str, float]:
        """Return the balance of completions likewise; `came`: their tokens since the program began, `waiting`: those
        that the estimator has not asked for yet, `dropped`: those that a checkpoint kept in vain. Raises LedgerOpen."""
        came, again = came + self._completions_before, self.completions_again + dropped
        if came != self.valued + again + waiting:
            raise LedgerOpen(f"{came} tokens of completions came, and {self.valued} have valued states, {again} are "
                             f"drawn again, {waiting} wait")  # fmt: skip
        counts = {"completions": came, "completions_valued": self.valued, "completions_drawn_again": again}
        return self._new(counts) | {"ledger/completions_waiting": float(waiting)}

    def _new(self, counts: dict[str, int]) -> dict[str, float]:
        new = {f"ledger/{name}": float(count - self._before.get(name, 0)) for name, count in counts.items()}
        self._before |= counts
        return new
