"""Dynamic sampling (DAPO, Yu et al. 2025): groups that teach nothing are replaced by groups of other problems, while
others of their batch are still drawn.

Candidates stand in an order that seed and iteration give. Those trained on are the first that differ, `wanted` of them:
the same whatever finishes first. How many are asked follows from how many of those scored so far differ, so that few
rollouts are drawn one behind the other, and few in vain: what is asked behind the last one that is trained on is
surplus.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from operator import itemgetter
from typing import Any

from espalier.data.records import Problem
from espalier.rl.rollout_checks import Refusal
from espalier.rl.types import RolloutGroup

_LOOK_SECONDS = 1.0  # parts that were begun meanwhile are waited for from then on
Drawn = tuple[list[RolloutGroup], list[Refusal]]


def num_to_ask(wanted: int, asked: int, scored: int, good: int) -> int:
    """Return how many more to ask where `good` of `scored` groups differ and `asked` were asked: as many as are missing
    of `wanted`, and, once three of four asked are scored, as many as make it likely that `wanted` differ, by the share
    of those scored and a quarter of `wanted` that are taken to differ. What is scored first is short."""
    missing, assumed = wanted - good, wanted / 4
    if missing <= 0:
        return 0
    share = (good + assumed) / (scored + assumed) if 4 * scored >= 3 * asked else 1.0
    return max(0, math.ceil(missing / share) - (asked - scored))


def needed(groups: Sequence[RolloutGroup], wanted: int, is_good: Callable[[RolloutGroup], bool]) -> list[RolloutGroup]:
    """Return the groups, in the order of candidates, up to the last of the first `wanted` good ones; all where there
    are fewer."""
    good = [index for index, group in enumerate(groups) if is_good(group)]
    return list(groups[: good[wanted - 1] + 1] if len(good) >= wanted else groups)


@dataclass
class Asked:
    """What is asked for one batch. `candidates`: (name, problem) in order; `draw` asks problems under a name; `is_good`
    says which groups are no candidates for replacement."""

    wanted: int
    candidates: Iterator[tuple[str, Problem]]
    draw: Callable[[list[Problem], str], Coroutine[Any, Any, Drawn]]
    is_good: Callable[[RolloutGroup], bool]
    parts: list[asyncio.Task[Drawn]] = field(default_factory=list)
    """In the order of candidates; they grow until enough groups differ, or no candidate is left."""
    order: list[str] = field(default_factory=list)
    """Problems that were asked."""
    _num_scored: int = 0
    _num_good: int = 0
    _is_over: bool = False
    _verdicts: dict[str, bool] = field(default_factory=dict)  # by problem; one that was refused is not good
    _undecided: dict[str, RolloutGroup] = field(default_factory=dict)

    def ask(self) -> None:
        """Begin to ask as many more as are wanted now, as far as there are candidates."""
        number = num_to_ask(self.wanted, len(self.order), self._num_scored, self._num_good)
        if self._is_over:
            return
        for name, rows in groupby(islice(self.candidates, number), itemgetter(0)):
            problems = [problem for _, problem in rows]
            self.order += [problem.id for problem in problems]
            self.parts.append(asyncio.create_task(self.draw(problems, name)))

    def look(self, groups: Sequence[RolloutGroup], refused: Sequence[Refusal] = ()) -> list[RolloutGroup]:
        """Take in scored groups and refusals, and ask more in their place; return the groups that are certain by now to
        be trained on."""
        good = {group.problem.id: group for group in groups if self.is_good(group)}
        self._num_scored += len(groups) + len(refused)
        self._num_good += len(good)
        self._verdicts |= {one.problem_id: False for one in refused}
        self._verdicts |= {group.problem.id: group.problem.id in good for group in groups}
        self._undecided |= good
        first = islice((problem for problem in self.order if self._verdicts.get(problem, True)), self.wanted)
        certain = [self._undecided.pop(problem) for problem in first if problem in self._undecided]
        self.ask()
        return certain

    async def drawn(self, part: asyncio.Task[Drawn]) -> Drawn:
        """Return what a part has drawn. Raises what any part raises, as soon as it does."""
        while not part.done():
            running = [one for one in self.parts if not one.done()]
            await asyncio.wait(running, timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            for one in self.parts:
                if one.done():
                    one.result()
        return part.result()

    def up_to(self, group: RolloutGroup, refused: Sequence[Refusal]) -> tuple[list[Refusal], int]:
        """Return (the refusals of candidates up to the one of `group`, how many candidates these are)."""
        places = {problem: place for place, problem in enumerate(self.order)}
        last = places[group.problem.id]
        return [one for one in refused if places[one.problem_id] < last], last + 1

    @property
    def is_drawn(self) -> bool:
        """Whether nothing is asked any more for now."""
        return all(part.done() for part in self.parts)

    async def give_up(self) -> None:
        """Cancel what still runs, and ask nothing more."""
        self._is_over = True
        for part in self.parts:
            part.cancel()
        await asyncio.gather(*self.parts, return_exceptions=True)
