"""Diverse verifier tree search (Beeching, Tunstall and Rush 2024, "Scaling test-time compute with open models"):
subtrees that know nothing of one another, in each of which the best of `siblings` steps goes on.

A subtree chooses among its own samples alone, even where two subtrees have come to the same state: then both ask in one
request, whose samples are dealt to them.
"""

from dataclasses import dataclass

from espalier.search.asks import Growth, check_sizes, draw_each, rate
from espalier.search.choices import best_of, check_choice, choose_solution
from espalier.search.tree import Node, Tree


@dataclass(frozen=True)
class DVTS:
    """`subtrees` times `siblings` steps per depth; each subtree ends in one solution, of which `choice` chooses."""

    subtrees: int = 4
    siblings: int = 4
    choice: str = "best"

    def __post_init__(self) -> None:
        check_sizes(subtrees=self.subtrees, siblings=self.siblings)
        check_choice(self.choice)

    def grow(self, tree: Tree) -> Growth[None]:
        """Let every subtree go on until its solution is finished."""
        heads = [tree.root] * self.subtrees
        while heads:
            drawn = yield from draw_each(heads, self.siblings)
            yield from rate(list(dict.fromkeys(node for nodes in drawn for node in nodes)))
            kept = [best_of(nodes) for nodes in drawn]
            for node in kept:
                node.visits += 1
            heads = [node for node in kept if not node.is_finished]

    def choose(self, tree: Tree) -> Node:
        """Return the best solution."""
        return choose_solution(tree, self.choice)
