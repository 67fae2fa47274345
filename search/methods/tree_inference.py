"""The tree that VinePPO's code base draws (`tree`, `fish_bone`; Kazemnejad et al. 2024, arXiv 2410.01679): every state
is expanded, nothing is pruned, and no score is asked.

Branch factors are piecewise constant in the depth. With `spine` one solution is drawn step by step, and whole solutions
from every state on it ("fish bone").
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from espalier.data.records import BadInput
from espalier.search.asks import Draw, Growth, check_sizes, draw
from espalier.search.choices import check_choice, choose_solution
from espalier.search.methods.siblings import INDEPENDENT, Siblings, visited
from espalier.search.tree import Node, Tree


def factor_at(depth: int, factors: Sequence[Sequence[int]]) -> int:
    """Return what holds at a depth, the prompt's being 0: of (depth, number) the number of the last depth that is not
    greater."""
    return max(pair for pair in map(tuple, factors) if pair[0] <= depth)[1]


@dataclass(frozen=True)
class TreeInference:
    """`branch_factors`: (depth, children of a state from this depth on). From `branching_depth` steps on (0: nowhere)
    whole responses are drawn; states behind `max_depth` steps (0: none) are not expanded. `siblings`: how the children
    of a state are drawn. Raises BadInput on factors without one of depth 0."""

    branch_factors: Sequence[Sequence[int]] = ((0, 3), (6, 1))
    branching_depth: int = 0
    max_depth: int = 0
    siblings: Siblings = INDEPENDENT
    spine: bool = False
    choice: str = "vote"

    def __post_init__(self) -> None:
        check_choice(self.choice)
        pairs = self.branch_factors
        if any(len(pair) != 2 for pair in pairs) or 0 not in [pair[0] for pair in pairs]:
            raise BadInput("search.method.branch_factors must be pairs of a depth and a number, one of depth 0, as "
                           "[[0,3],[6,1]]")  # fmt: skip
        check_sizes(branch_factors=min(factor for _, factor in pairs))
        check_sizes(0, branching_depth=self.branching_depth, max_depth=self.max_depth)

    def grow(self, tree: Tree) -> Growth[None]:
        """Expand depth by depth until every response has ended, or `max_depth` is reached."""
        heads = [tree.root]
        while heads:
            drawn = yield from self.siblings.children([self._draw(node) for node in heads])
            kept = dict.fromkeys(node for of_one in drawn for node in of_one)
            if self.spine:
                visited((yield from draw([Draw(node, self._factor(node), is_whole=True) for node in heads])))
            heads = [node for node in kept if not node.is_finished and not 0 < self.max_depth <= node.depth]
        if self.siblings.are_samples_of_the_policy:
            deal_completions(tree)

    def _factor(self, node: Node) -> int:
        return factor_at(node.depth, self.branch_factors)

    def _draw(self, node: Node) -> Draw:
        is_whole = bool(self.branching_depth) and node.depth >= self.branching_depth
        return Draw(node, 1 if self.spine else self._factor(node), is_whole)

    def choose(self, tree: Tree) -> Node:
        """Return the chosen solution. Where some of the samples were no children, these have no vote."""
        if self.siblings.are_samples_of_the_policy:
            return choose_solution(tree, self.choice)
        return choose_solution(tree, self.choice, votes=lambda node: node.visits)


def deal_completions(tree: Tree) -> None:
    """Give every state of a tree of which nothing was pruned its completions: for each sample drawn from it one
    response behind that sample, taken by chance, seeded by the problem, from those that the child has itself.

    Each is a sample of the policy, and those behind different children are independent: counting all the leaves below
    would weigh a child by how often its own steps branch. States that have completions of their own keep these. Where
    the budget cut a response, nothing is dealt: those that are there are the short ones.
    """
    if any(not node.is_finished and not node.children for node in tree.nodes):
        return
    rng = random.Random(tree.problem.id)
    behind: dict[Node, list[Node]] = {}
    for node in reversed(tree.nodes):  # children come after their parents
        if node.is_finished:
            continue
        dealt: list[Node] = []
        for child in node.children:
            ends = [child] * child.draws if child.is_finished else behind[child]
            times, rest = divmod(child.draws, len(ends))
            dealt += [*(ends * times), *rng.sample(ends, rest)]
        behind[node] = dealt
        node.completions = node.completions or dealt
