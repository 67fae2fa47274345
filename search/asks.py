"""What a search asks for: more of the tree, or scores of it. A method is a generator of such questions, so that a
driver answers those of many problems together, and a test answers them by hand."""

from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeVar

from espalier.data.records import BadInput
from espalier.search.tree import Node, Tree

R = TypeVar("R")


@dataclass(frozen=True)
class Draw:
    """`n` samples from one node: of one step each, or, where `is_whole`, of all steps to the end of the response.
    `temperature` None: the run's. `opening`: the number of first tokens of each sample that are drawn at a temperature
    of their own, and that temperature. `depends_on_others`: how many are drawn hangs on what was drawn before, so that
    whole responses are no completions that the state could be valued by."""

    node: Node
    n: int
    is_whole: bool = False
    temperature: float | None = None
    opening: tuple[int, float] | None = None
    depends_on_others: bool = False


@dataclass(frozen=True)
class Expand:
    """Samples from several nodes at once. The answer: of every draw its samples' last nodes, one for each sample; equal
    ones are the same node."""

    draws: Sequence[Draw]


@dataclass(frozen=True)
class Rate:
    """Scores of several nodes at once, which `Node.score` holds afterwards. The answer: what `Node.rank` says of
    each."""

    nodes: Sequence[Node]


Growth = Generator[Expand | Rate, Any, R]


def draw(draws: Sequence[Draw]) -> Growth[list[list[Node]]]:
    """Ask for samples."""
    found: list[list[Node]] = yield Expand(draws)
    return found


def draw_each(nodes: Sequence[Node], n: int, is_whole: bool = False) -> Growth[list[list[Node]]]:
    """Ask for `n` samples for each of several nodes, of which some may be the same: those are one request, whose
    samples are dealt to them in order."""
    times = Counter(nodes)
    found = yield from draw([Draw(node, n * num, is_whole) for node, num in times.items()])
    left = dict(zip(times, map(iter, found), strict=True))
    return [list(islice(left[node], n)) for node in nodes]


def rate(nodes: Sequence[Node]) -> Growth[list[float]]:
    """Ask for scores; those of nodes that have one already cost nothing."""
    found: list[float] = yield Rate(nodes)
    return found


class SearchMethod(Protocol):
    """Built from conf/search/. It holds settings alone: many problems are searched by one at a time."""

    def grow(self, tree: Tree) -> Growth[None]:
        """Grow a tree that holds the prompt alone. May be ended between any two questions."""

    def choose(self, tree: Tree) -> Node:
        """Return the node to answer with, of a tree that is grown or was cut anywhere; unfinished where no response
        ended."""


def check_sizes(least: int = 1, **sizes: float) -> None:
    """Raise BadInput where a setting of a method is below its `least`."""
    for name, size in sizes.items():
        if size < least:
            raise BadInput(f"search.method.{name} must be at least {least}, got {size:g}")
