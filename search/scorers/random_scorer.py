"""A score that knows nothing: a hash of the state. The floor that a scorer is compared with."""

import hashlib
from collections.abc import Sequence

from espalier.search.expander import Expander
from espalier.search.tree import Node, Tree


class RandomScorer:
    """Uniform in [0, 1); the same state has the same score under the same `seed`."""

    aggregate = "last"

    def __init__(self, seed: int = 0):
        self.seed = seed

    async def open(self) -> None:
        """Nothing to load."""

    async def score(self, nodes: Sequence[Node], expander: Expander) -> list[float]:
        """Return a number for each state."""
        return [self._score(node) for node in nodes]

    def _score(self, node: Node) -> float:
        text = f"{self.seed}/{node.tree.problem.id}/{node.response_ids()}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") / 2**56

    def forget(self, tree: Tree) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        """Nothing to release."""
