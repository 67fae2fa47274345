"""Where every sampled token of a run ended: the balance of an asynchronous run's rollouts.

Tokens are those that rollouts drew themselves, from the first iteration after the program's start. A token that has
come is trained on (by its age: how many versions the policy was ahead of the one that drew it), dropped as agreeing
(dynamic sampling's surplus), dropped by the filter, or waiting in a batch that is drawn ahead. Both sides are counted
where things happen, not one from the other, so that a batch that is lost or trained on twice shows.
"""

from collections import Counter
from collections.abc import Iterable

from espalier.rl.types import RolloutGroup


class LedgerOpen(RuntimeError):
    """The balance does not close: rollouts were lost, or trained on twice."""

    exit_code = 2


def tokens_of(groups: Iterable[RolloutGroup]) -> int:
    """Count the tokens that the rollouts drew themselves."""
    return sum(len(rollout.drawn_ids) for group in groups for rollout in group.rollouts)


class Ledger:
    """Counts of tokens; `max_age`: the oldest that are trained on."""

    def __init__(self, max_age: int):
        self.max_age = max_age
        self.generated = self.agreeing = self.filtered = 0
        self.trained: Counter[int] = Counter()
        self._before: dict[str, int] = {}

    def train(self, groups: Iterable[RolloutGroup], version: int) -> None:
        """Take rollouts that the policy of `version` is trained on."""
        for group in groups:
            for rollout in group.rollouts:
                self.trained.update(version - drawn_by for drawn_by in rollout.token_versions)

    def close(self, waiting: int) -> dict[str, float]:
        """Return the balance as metrics: what came and where it went since the last call, and what waits; `waiting`:
        tokens in batches that nothing was taken from yet. Raises LedgerOpen."""
        trained = sum(self.trained.values())
        if self.generated != trained + self.agreeing + self.filtered + waiting:
            raise LedgerOpen(f"{self.generated} tokens came, and {trained} are trained on, {self.agreeing} dropped as "
                             f"agreeing, {self.filtered} filtered, {waiting} waiting")  # fmt: skip
        counts = {f"trained_age_{age}": self.trained[age] for age in range(self.max_age + 1)}
        counts |= {"agreeing": self.agreeing, "filtered": self.filtered, "generated": self.generated}
        new = {name: count - self._before.get(name, 0) for name, count in counts.items()}
        self._before = counts
        return {f"ledger/{name}": float(value) for name, value in (new | {"waiting": waiting}).items()}
