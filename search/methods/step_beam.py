"""Beam search over steps (Snell et al. 2024, arXiv 2408.03314, section 5.2; Yao et al. 2023, arXiv 2305.10601, breadth
first).

Of every state of the beam `siblings` steps are drawn, all are scored, and the `width` best go on. A response that ended
leaves the beam at once and its place with it: the beam gets narrower as solutions are found.
"""

from dataclasses import dataclass

from espalier.search.asks import Draw, Growth, check_sizes, draw, rate
from espalier.search.choices import best_of, check_choice, choose_solution
from espalier.search.tree import Node, Tree


@dataclass(frozen=True)
class StepBeam:
    """`width` states go on, of `siblings` steps from each; the first draws are `width` times `siblings` from the
    prompt. `choice` as in `search.choices`."""

    width: int = 4
    siblings: int = 4
    choice: str = "best"

    def __post_init__(self) -> None:
        check_sizes(width=self.width, siblings=self.siblings)
        check_choice(self.choice)

    def grow(self, tree: Tree) -> Growth[None]:
        """Draw, score, keep, until every beam is finished."""
        beam, room = [tree.root], self.width
        while beam:
            each = self.siblings * self.width if beam == [tree.root] else self.siblings
            drawn = yield from draw([Draw(node, each) for node in beam])
            beam = yield from keep_best([node for nodes in drawn for node in nodes], room)
            room -= sum(node.is_finished for node in beam)
            beam = [node for node in beam if not node.is_finished]

    def choose(self, tree: Tree) -> Node:
        """Return the best solution."""
        return choose_solution(tree, self.choice)


def keep_best(nodes: list[Node], number: int) -> Growth[list[Node]]:
    """Return the `number` best of the distinct nodes, scored; their visits are counted."""
    left = list(dict.fromkeys(nodes))
    yield from rate(left)
    kept = list[Node]()
    while left and len(kept) < number:
        kept.append(best_of(left))
        left.remove(kept[-1])
    for node in kept:
        node.visits += 1
    return kept
