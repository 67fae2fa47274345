"""How many of the tree's responses agree with a state (self-consistency, Wang et al. 2023): of a finished state the
share of finished samples that give its answer, of another the largest share among the responses behind it, 0 where
there is none."""

from collections.abc import Sequence

from espalier.search.choices import is_vote_for
from espalier.search.expander import Expander
from espalier.search.tree import Node, Tree


class MajorityScorer:
    """Reads answers alone: no model, no gold answer."""

    aggregate = "last"

    async def open(self) -> None:
        """Nothing to load."""

    async def score(self, nodes: Sequence[Node], expander: Expander) -> list[float]:
        """Return shares of the finished samples that the tree has now."""
        finished = nodes[0].tree.finished()
        total = sum(leaf.draws for leaf in finished)
        return [max((_share(leaf, finished, total) for leaf in _behind(node)), default=0.0) for node in nodes]

    def forget(self, tree: Tree) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        """Nothing to release."""


def _share(leaf: Node, finished: Sequence[Node], total: int) -> float:
    answer = leaf.answered().answer
    return sum(one.draws for one in finished if is_vote_for(one, answer)) / total


def _behind(node: Node) -> list[Node]:
    """Return the finished nodes of the subtree of a node, itself included."""
    found, stack = list[Node](), [node]
    while stack:
        one = stack.pop()
        stack += one.children
        found += [one] if one.is_finished else []
    return found
