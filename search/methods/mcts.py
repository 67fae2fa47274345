"""Monte-Carlo tree search over steps: from the prompt down the most promising children to a state that was not
expanded, whose children are drawn, valued, and counted in every state above.

"uct" (Kocsis and Szepesvari 2006): a child is as promising as Q + c sqrt(ln N / n), Q the mean of its n visits' values
and N the visits of its parent. "puct" (Silver et al. 2017): Q + c P sqrt(N) / (1 + n), where P is the share of the
samples that drew it: what the policy thinks of it. A child is worth its score, or, with `rollouts` above 0, the mean of
the ranks of that many whole responses drawn from it, which stay in the tree.
"""

import math
from dataclasses import dataclass

from espalier.data.records import BadInput
from espalier.search.asks import Growth, check_sizes, draw_each, rate
from espalier.search.choices import check_choice, choose_solution
from espalier.search.tree import Node, Tree


def count_visit(node: Node, value: float) -> None:
    """Count a value in a state and all above it, the prompt's included: `value` becomes the mean over `visits`."""
    for one in (node.tree.root, *node.way()):
        one.visits += 1
        one.value = (one.value or 0.0) + (value - (one.value or 0.0)) / one.visits


@dataclass(frozen=True)
class MCTS:
    """`simulations` walks; `siblings` samples from a state that is expanded; `exploration` is c of `selection`."""

    simulations: int = 32
    siblings: int = 4
    selection: str = "puct"
    exploration: float = 1.0
    rollouts: int = 0
    choice: str = "best"

    def __post_init__(self) -> None:
        check_sizes(simulations=self.simulations, siblings=self.siblings)
        check_sizes(0, rollouts=self.rollouts)
        check_choice(self.choice)
        if self.selection not in ("uct", "puct"):
            raise BadInput(f"search.method.selection must be uct or puct, got '{self.selection}'")

    def grow(self, tree: Tree) -> Growth[None]:
        """Walk, expand, value and count."""
        expanded: dict[Node, list[Node]] = {}
        for _ in range(self.simulations):
            node = tree.root
            while node in expanded:
                node = max(expanded[node], key=lambda child: (self._promise(child), -child.number))
            if node.is_finished:
                count_visit(node, node.value or 0.0)
                continue
            (children,) = yield from draw_each([node], self.siblings)
            expanded[node] = list(dict.fromkeys(children))
            values = yield from self._value(expanded[node])
            for child, value in zip(expanded[node], values, strict=True):
                count_visit(child, value)

    def _promise(self, child: Node) -> float:
        assert child.parent is not None
        above, own = child.parent.visits, child.visits
        if self.selection == "uct":
            return (child.value or 0.0) + self.exploration * math.sqrt(math.log(above) / own)
        prior = child.draws / sum(one.draws for one in child.parent.children if one.visits)
        return (child.value or 0.0) + self.exploration * prior * math.sqrt(above) / (1 + own)

    def _value(self, nodes: list[Node]) -> Growth[list[float]]:
        open_nodes = [node for node in nodes if not node.is_finished]
        if not self.rollouts or not open_nodes:
            return (yield from rate(nodes))
        ends = yield from draw_each(open_nodes, self.rollouts, is_whole=True)
        finished = [node for node in nodes if node.is_finished]
        targets = list(dict.fromkeys([*(leaf for of_one in ends for leaf in of_one), *finished]))
        ranks = dict(zip(targets, (yield from rate(targets)), strict=True))
        means = {node: math.fsum(ranks[leaf] for leaf in of_one) / len(of_one)
                 for node, of_one in zip(open_nodes, ends, strict=True)}  # fmt: skip
        return [means[node] if node in means else ranks[node] for node in nodes]

    def choose(self, tree: Tree) -> Node:
        """Return the chosen solution."""
        return choose_solution(tree, self.choice)
