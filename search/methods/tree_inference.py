"""The tree that VinePPO's code base draws (`tree`, `fish_bone`; Kazemnejad et al. 2024, arXiv 2410.01679): every state
is expanded, nothing is pruned, and no score is asked.

`branch_factors` are piecewise constant in the depth. With `spine` one solution is drawn step by step, and whole
solutions from every state on it ("fish bone").
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from espalier.data.records import BadInput
from espalier.search.asks import Draw, Growth, check_sizes, draw
from espalier.search.choices import check_choice, choose_solution
from espalier.search.tree import Node, Tree


def factor_at(depth: int, factors: Mapping[int, int]) -> int:
    """Return the branch factor of a depth: that of the greatest depth named that is not greater. Depths from 0, the
    prompt's."""
    return factors[max(start for start in factors if start <= depth)]


@dataclass(frozen=True)
class TreeInference:
    """`branch_factors`: depth → children of a state from this depth on. Behind `branching_depth` steps (0: nowhere)
    whole responses are drawn. `temperatures` by depth likewise; without, the run's. Raises BadInput on factors without
    one of depth 0."""

    branch_factors: Mapping[int, int] = field(default_factory=lambda: {0: 3, 6: 1})
    branching_depth: int = 0
    temperatures: Mapping[int, float] = field(default_factory=dict)
    spine: bool = False
    choice: str = "vote"

    def __post_init__(self) -> None:
        check_choice(self.choice)
        check_sizes(**{f"branch_factors.{depth}": factor for depth, factor in self.branch_factors.items()})
        if 0 not in self.branch_factors or (self.temperatures and 0 not in self.temperatures):
            raise BadInput("search.method.branch_factors and temperatures must say those of depth 0")

    def grow(self, tree: Tree) -> Growth[None]:
        """Expand depth by depth until every response has ended."""
        heads = [tree.root]
        while heads:
            drawn = yield from draw([self._draw(node) for node in heads])
            for node in dict.fromkeys(node for of_one in drawn for node in of_one):
                node.visits = node.draws
            if self.spine:
                yield from draw([Draw(node, factor_at(node.depth, self.branch_factors), True) for node in heads])
            heads = [node for node in dict.fromkeys(n for of_one in drawn for n in of_one) if not node.is_finished]

    def _draw(self, node: Node) -> Draw:
        number = 1 if self.spine else factor_at(node.depth, self.branch_factors)
        is_whole = bool(self.branching_depth) and node.depth >= self.branching_depth
        temperature = None
        if self.temperatures:
            temperature = self.temperatures[max(start for start in self.temperatures if start <= node.depth)]
        return Draw(node, number, is_whole, temperature)

    def choose(self, tree: Tree) -> Node:
        """Return the chosen solution."""
        return choose_solution(tree, self.choice)
