"""Beam search whose states are judged by where they lead (Snell et al. 2024, arXiv 2408.03314, section 5.2): from every
drawn step `steps` more are taken greedily, and the score of the state reached there is the step's value.

With `steps` 0 it is beam search. What was looked at stays in the tree, with 0 visits.
"""

from dataclasses import dataclass

from espalier.search.asks import Draw, Growth, check_sizes, draw, rate
from espalier.search.choices import check_choice, choose_solution
from espalier.search.tree import Node, Tree


@dataclass(frozen=True)
class Lookahead:
    """`width` and `siblings` as of `step_beam`; `temperature` is that of the steps that look ahead."""

    width: int = 4
    siblings: int = 4
    steps: int = 1
    temperature: float = 0.0
    choice: str = "best"

    def __post_init__(self) -> None:
        check_sizes(width=self.width, siblings=self.siblings)
        check_sizes(0, steps=self.steps, temperature=self.temperature)
        check_choice(self.choice)

    def grow(self, tree: Tree) -> Growth[None]:
        """Draw, look ahead, keep, until every beam is finished."""
        beam, room = [tree.root], self.width
        while beam:
            each = self.siblings * self.width if beam == [tree.root] else self.siblings
            drawn = yield from draw([Draw(node, each) for node in beam])
            nodes = list(dict.fromkeys(node for of_one in drawn for node in of_one))
            yield from self._value(nodes)
            kept = sorted(nodes, key=lambda node: (-(node.value or 0.0), node.number))[:room]
            for node in kept:
                node.visits += 1
            room -= sum(node.is_finished for node in kept)
            beam = [node for node in kept if not node.is_finished]

    def _value(self, nodes: list[Node]) -> Growth[None]:
        """Set the value of every node to the rank of the state that it leads to; finished ones lead nowhere."""
        ahead = list(nodes)
        for _ in range(self.steps):
            drawn = yield from draw([Draw(node, 1, temperature=self.temperature) for node in ahead])
            ahead = [of_one[0] for of_one in drawn]
        targets = list(dict.fromkeys([*ahead, *(node for node in nodes if node.is_finished)]))
        ranks = dict(zip(targets, (yield from rate(targets)), strict=True))
        for node, end in zip(nodes, ahead, strict=True):
            node.value = ranks[end]

    def choose(self, tree: Tree) -> Node:
        """Return the best solution."""
        return choose_solution(tree, self.choice)
