"""How the children of a state are drawn: the expanders of VinePPO's code base (Kazemnejad et al. 2024, arXiv
2410.01679).

Its expanders that only differ in their requests (one per child, or n in one) are `IndependentSiblings` here. That which
puts another system message before each child is left out: a tree has one prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from espalier.data.bleu import bleu, grams
from espalier.data.records import BadInput
from espalier.search.asks import Draw, Growth, check_sizes, draw
from espalier.search.tree import Node


class Siblings(Protocol):
    """Built from conf/search/."""

    @property
    def are_samples_of_the_policy(self) -> bool:
        """Whether children come as the run's own sampling draws them."""

    def children(self, draws: Sequence[Draw]) -> Growth[list[list[Node]]]:
        """Draw, of every draw as many children as it says; each is a visit of its node."""


def visited(children: list[list[Node]]) -> list[list[Node]]:
    """Return the children, each counted as a visit of its node."""
    for node in (node for of_one in children for node in of_one):
        node.visits += 1
    return children


@dataclass(frozen=True)
class IndependentSiblings:
    """Children that know nothing of one another."""

    are_samples_of_the_policy = True

    def children(self, draws: Sequence[Draw]) -> Growth[list[list[Node]]]:
        """Draw all at once."""
        return visited((yield from draw(draws)))


INDEPENDENT = IndependentSiblings()


@dataclass(frozen=True)
class HighLowSiblings:
    """The first `tokens` of every child are drawn at the temperature `high`, the rest at `low`."""

    tokens: int = 10
    high: float = 1.3
    low: float = 0.9
    are_samples_of_the_policy = False

    def __post_init__(self) -> None:
        check_sizes(**{"siblings.tokens": self.tokens})

    def children(self, draws: Sequence[Draw]) -> Growth[list[list[Node]]]:
        """Draw all at once."""
        opening = self.tokens, self.high
        return visited((yield from draw([replace(one, temperature=self.low, opening=opening) for one in draws])))


@dataclass(frozen=True)
class UnlikeSiblings:
    """A child is kept where its BLEU against those of the same state that are kept already is at most `largest_bleu`,
    and others are drawn in place of the rest, in `rounds` rounds at most; the last keeps whatever it draws. Raises
    BadInput on a BLEU outside [0, 1)."""

    largest_bleu: float = 0.5
    rounds: int = 20
    are_samples_of_the_policy = False

    def __post_init__(self) -> None:
        check_sizes(**{"siblings.rounds": self.rounds})
        if not 0 <= self.largest_bleu < 1:
            raise BadInput(f"search.method.siblings.largest_bleu must be in [0, 1), got {self.largest_bleu}")

    def children(self, draws: Sequence[Draw]) -> Growth[list[list[Node]]]:
        """Draw round by round what is missing."""
        kept: list[list[Node]] = [[] for _ in draws]
        for number in range(1, self.rounds + 1):
            missing = [(place, one.n - len(kept[place])) for place, one in enumerate(draws)]
            todo = [(place, count) for place, count in missing if count]
            if not todo:
                break
            drawn = yield from draw([replace(draws[place], n=count, depends_on_others=True) for place, count in todo])
            for (place, _), nodes in zip(todo, drawn, strict=True):
                for node in nodes:
                    if number == self.rounds or self._is_unlike(node, kept[place], draws[place].node):
                        kept[place] += visited([[node]])[0]
        return kept

    def _is_unlike(self, node: Node, others: Sequence[Node], parent: Node) -> bool:
        start = len(parent.response())
        texts = [grams(one.response()[start:]) for one in (node, *others)]
        return not others or bleu(texts[0], texts[1:]) <= self.largest_bleu
