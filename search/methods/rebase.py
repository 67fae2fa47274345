"""Reward-balanced search, breadth first under a budget (Wu et al. 2024, REBASE, arXiv 2408.00724): at every depth a
fixed number of samples is dealt out among the open states in proportion to softmax(score / temperature).

A state of low score gets no samples and is pruned; each finished solution takes one sample off the number.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from espalier.data.records import BadInput
from espalier.search.asks import Draw, Growth, check_sizes, draw, rate
from espalier.search.choices import check_choice, choose_solution
from espalier.search.tree import Node, Tree


def shares_of(ranks: Sequence[float], draws: Sequence[int], number: int, temperature: float) -> list[int]:
    """Deal `number` samples out in proportion to draws * softmax(rank / temperature), the largest remainders first."""
    top = max(ranks)
    weights = [num * math.exp((rank - top) / temperature) for rank, num in zip(ranks, draws, strict=True)]
    exact = [number * weight / math.fsum(weights) for weight in weights]
    whole = [math.floor(share) for share in exact]
    order = sorted(range(len(exact)), key=lambda k: (whole[k] - exact[k], k))
    for k in order[: number - sum(whole)]:
        whole[k] += 1
    return whole


@dataclass(frozen=True)
class Rebase:
    """`samples` per depth, and solutions in the end at most. Raises BadInput on a temperature not above 0."""

    samples: int = 16
    temperature: float = 0.2
    choice: str = "weighted_vote"

    def __post_init__(self) -> None:
        check_sizes(samples=self.samples)
        check_choice(self.choice)
        if self.temperature <= 0:
            raise BadInput(f"search.method.temperature must be above 0, got {self.temperature:g}")

    def grow(self, tree: Tree) -> Growth[None]:
        """Deal out, draw and score, depth by depth."""
        shares, left = {tree.root: self.samples}, self.samples
        while shares:
            drawn = yield from draw([Draw(node, num) for node, num in shares.items()])
            dealt = Counter(node for of_one in drawn for node in of_one)  # a scorer's own samples may draw them too
            nodes = list(dealt)
            ranks = dict(zip(nodes, (yield from rate(nodes)), strict=True))
            for node in nodes:
                node.visits += dealt[node] if node.is_finished else 0
            left -= sum(dealt[node] for node in nodes if node.is_finished)
            going = [node for node in nodes if not node.is_finished]
            if not going or left < 1:
                return
            numbers = shares_of([ranks[one] for one in going], [dealt[one] for one in going], left, self.temperature)
            shares = {node: num for node, num in zip(going, numbers, strict=True) if num}
            for node, num in shares.items():
                node.visits += num

    def choose(self, tree: Tree) -> Node:
        """Return the chosen solution."""
        return choose_solution(tree, self.choice)
