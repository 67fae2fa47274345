"""Whole solutions, drawn on their own: best of n (Cobbe et al. 2021, arXiv 2110.14168), majority (Wang et al. 2023,
self-consistency, arXiv 2203.11171), weighted vote (Lightman et al. 2023, arXiv 2305.20050).

All `n` are one request.
"""

from dataclasses import dataclass

from espalier.search.asks import Draw, Growth, check_sizes, draw, rate
from espalier.search.choices import check_choice, choose_solution
from espalier.search.tree import Node, Tree


@dataclass(frozen=True)
class Samples:
    """`n` solutions, of which `choice` chooses (`search.choices`); "vote" asks for no scores."""

    n: int = 16
    choice: str = "best"

    def __post_init__(self) -> None:
        check_sizes(n=self.n)
        check_choice(self.choice)

    def grow(self, tree: Tree) -> Growth[None]:
        """Draw them, and score them where scores choose."""
        (leaves,) = yield from draw([Draw(tree.root, self.n, is_whole=True)])
        for leaf in leaves:
            for node in leaf.way():
                node.visits += 1
        if self.choice != "vote":
            yield from rate(list(dict.fromkeys(leaves)))

    def choose(self, tree: Tree) -> Node:
        """Return the solution that they choose."""
        return choose_solution(tree, self.choice)
