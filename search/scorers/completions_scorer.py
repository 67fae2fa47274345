"""The value of a state by completions: the share of right answers among whole responses drawn from it (Wang et al.
2024; Kazemnejad et al. 2024).

It reads the gold answer: a ceiling for reward models, and how trees become data. The completions stay in the tree, with
0 visits, and count in its tokens. With `agrees` they are held against the most frequent answer of the tree so far
instead, as far as no gold answer may be read (self-consistency, Wang et al. 2023).
"""

from collections.abc import Sequence

from espalier.data.records import BadInput
from espalier.rewards.votes import majority_answer
from espalier.search.asks import Draw
from espalier.search.choices import is_vote_for
from espalier.search.expander import Expander
from espalier.search.tree import Node, Tree


class CompletionsScorer:
    """`number` completions per state; a finished state is its own. Raises BadInput on none."""

    aggregate = "last"

    def __init__(self, number: int = 4, agrees: bool = False):
        if number < 1:
            raise BadInput(f"search.scorer.number must be at least 1, got {number}")
        self.number, self.agrees = number, agrees

    async def open(self) -> None:
        """Nothing to load."""

    async def score(self, nodes: Sequence[Node], expander: Expander) -> list[float]:
        """Return shares. Raises what drawing raises."""
        drawn = await expander.draw([Draw(node, self.number, is_whole=True) for node in nodes])
        majority = majority_of(nodes[0].tree) if self.agrees else None
        return [sum(self._is_right(leaf, majority) for leaf in leaves) / len(leaves) for leaves in drawn]

    def _is_right(self, leaf: Node, majority: str | None) -> bool:
        if not leaf.is_finished:
            return False
        return is_vote_for(leaf, majority) if self.agrees else leaf.answered().is_correct

    def forget(self, tree: Tree) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        """Nothing to release."""


def majority_of(tree: Tree) -> str | None:
    """Return the most frequent answer of the finished responses of a tree, each as often as it was drawn."""
    return majority_answer([tree.trajectory(node) for node in tree.finished() for _ in range(node.draws)])
