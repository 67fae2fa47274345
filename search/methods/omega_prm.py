"""OmegaPRM's tree search (Luo et al. 2024, arXiv 2406.06592): whole responses, cut again where their first error must
be.

MC(s) is the mean rank of `rollouts` whole responses drawn from state s. A walk takes the pair of a state with MC(s) > 0
and a wrong response r of it that is largest in Q(s, r) + U(s), with Q = alpha^(1 - MC(s)) beta^(len(r) / longest) and U
= c sqrt(sum of all visits) / (1 + visits of s), and looks for the first state on r with MC = 0 by bisection, drawing
`rollouts` responses at every state it looks at. Each of them stays: its wrong responses are searched in later walks.

What is right is what the scorer ranks at 0.5 or more: with scorer=outcome the graded answer, as published (then the
tree is data), else what a reward model believes (then it is a search).
"""

import math
from dataclasses import dataclass

from espalier.search.asks import Growth, check_sizes, draw_each, rate
from espalier.search.choices import check_choice, choose_solution, share_of
from espalier.search.tree import Node, Tree

Pair = tuple[Node, Node]  # a state, and the end of a wrong response drawn from it


@dataclass(frozen=True)
class OmegaPRM:
    """`walks` bisections with `rollouts` responses per state; `alpha`, `beta`, `longest` (tokens), `exploration` (c) as
    published."""

    walks: int = 8
    rollouts: int = 8
    alpha: float = 0.5
    beta: float = 0.9
    longest: int = 500
    exploration: float = 0.125
    choice: str = "weighted_vote"

    def __post_init__(self) -> None:
        check_sizes(walks=self.walks, rollouts=self.rollouts, longest=self.longest)
        check_choice(self.choice)

    def grow(self, tree: Tree) -> Growth[None]:
        """Value the prompt, then walk while a wrong response is left to search."""
        pairs: dict[Pair, None] = {}
        yield from self._value(tree.root, pairs)
        for _ in range(self.walks):
            if not pairs:
                return
            visits = sum(node.visits for node in tree.nodes)
            state, leaf = max(pairs, key=lambda pair: self._promise(pair[0], pair[1], visits))
            del pairs[state, leaf]
            state.visits += 1
            yield from self._bisect(state, leaf, pairs)

    def _bisect(self, state: Node, leaf: Node, pairs: dict[Pair, None]) -> Growth[None]:
        """Find the first state behind `state` on the way to `leaf` that no response is right from."""
        way = [node for node in leaf.way() if node.depth > state.depth and not node.is_finished]
        low, high = 0, len(way)
        while low < high:
            middle = (low + high) // 2
            if way[middle].value is None:
                yield from self._value(way[middle], pairs)
            low, high = (middle + 1, high) if way[middle].value else (low, middle)

    def _value(self, node: Node, pairs: dict[Pair, None]) -> Growth[None]:
        """Draw from a state; set its value, and keep its wrong responses where some are right."""
        (leaves,) = yield from draw_each([node], self.rollouts, is_whole=True)
        distinct = list(dict.fromkeys(leaves))
        yield from rate(distinct)
        ranks = {leaf: share_of(leaf) for leaf in distinct}
        node.value = sum(ranks[leaf] >= 0.5 for leaf in leaves) / len(leaves)
        if node.value:
            pairs.update({(node, leaf): None for leaf in distinct if ranks[leaf] < 0.5 and leaf.is_finished})

    def _promise(self, state: Node, leaf: Node, all_visits: int) -> float:
        length = leaf.num_tokens - state.num_tokens
        quality = self.alpha ** (1 - (state.value or 0.0)) * self.beta ** (length / self.longest)
        return quality + self.exploration * math.sqrt(all_visits) / (1 + state.visits)

    def choose(self, tree: Tree) -> Node:
        """Return the chosen solution."""
        return choose_solution(tree, self.choice)
