"""What one problem may cost. Asked before every question, that of tokens before those that draw, so that what is under
way ends: a budget is exceeded by one step per beam at most."""

import time
from dataclasses import dataclass

from espalier.data.records import BadInput
from espalier.search.tree import Tree


@dataclass(frozen=True)
class Budget:
    """Limits per problem, 0: none. `tokens` that are generated, `scores` that are asked, `seconds` since it began
    (other problems in flight take part of them). Raises BadInput on a limit below 0."""

    tokens: int = 0
    scores: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("tokens", "scores", "seconds"):
            if getattr(self, name) < 0:
                raise BadInput(f"search.budget.{name} must be at least 0 (0: no limit), got {getattr(self, name)}")

    @property
    def is_watched_within_responses(self) -> bool:
        """Whether whole responses must be drawn step by step, so that they can be ended."""
        return bool(self.tokens or self.seconds)

    def is_spent(self, tree: Tree, began: float, counts_tokens: bool = True) -> bool:
        """Say whether a limit is reached, that of tokens only where they count; `began` by `time.monotonic`."""
        limits = ((self.tokens, tree.num_tokens if counts_tokens else 0), (self.scores, tree.num_scores),
                  (self.seconds, time.monotonic() - began))  # fmt: skip
        return any(limit and spent >= limit for limit, spent in limits)

    def num_scores(self, tree: Tree, wanted: int) -> int:
        """Return how many of `wanted` scores are still paid for."""
        return min(wanted, max(0, self.scores - tree.num_scores)) if self.scores else wanted
