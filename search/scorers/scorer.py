"""What every scorer offers, and how those that compute answer the problems in flight together."""

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar, runtime_checkable

import torch

from espalier.sampling.engine_arguments import has_gpu
from espalier.search.expander import Expander
from espalier.search.tree import Node, Tree

A = TypeVar("A")
B = TypeVar("B")


class Scorer(Protocol):
    """Built from conf/scorer/. `aggregate` says how the scores on the way to a node become the one that it is ranked by
    (rewards/aggregate.py); "last" is the node's own."""

    aggregate: str

    async def open(self) -> None:
        """Load what it needs; called once."""

    async def score(self, nodes: Sequence[Node], expander: Expander) -> list[float]:
        """Return a score for each of several nodes of one tree; `expander` draws from them where that is how it
        scores."""

    def forget(self, tree: Tree) -> None:
        """Let go of what was kept of a tree that is searched no more."""

    async def close(self) -> None:
        """Release what `open` took."""


@runtime_checkable
class HoldsNetworks(Protocol):
    """A scorer with networks that are given the sampled token ids."""

    def models(self) -> dict[str, str]:
        """Return, by folder or hub name, at the ends of what their heads are read (`data.training_layout`: steps or
        responses); "" of a network without such a head."""

    def longest(self) -> int:
        """Return how many tokens of prompt and response all of them take."""


@runtime_checkable
class ComputesScores(Protocol):
    """A scorer that computes in this process, or has engines of its own do so: whoever draws is not asked meanwhile."""

    @property
    def is_computing(self) -> bool:
        """Whether scores are under way."""


def take_half_of_the_cores() -> None:
    """Have torch compute on half of a CPU's cores at most: an engine draws beside it, and on two cores two threads of
    each were seven times slower than one."""
    if not has_gpu():
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(min(torch.get_num_threads(), max(1, cores // 2)))


class Batches(Generic[A, B]):
    """Has `compute` answer what several problems ask for in one call, in a thread of its own: what is asked while a
    call runs is answered by the next one."""

    def __init__(self, compute: Callable[[list[A]], list[B]]):
        self._compute = compute
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: list[tuple[list[A], asyncio.Future[list[B]]]] = []
        self._task: asyncio.Task[None] | None = None
        self.num_calls = 0

    @property
    def is_computing(self) -> bool:
        """Whether a call runs."""
        return self._task is not None and not self._task.done()

    async def ask(self, items: Sequence[A]) -> list[B]:
        """Return the answer to every item. Raises what `compute` raises."""
        if not items:
            return []
        answer: asyncio.Future[list[B]] = asyncio.get_running_loop().create_future()
        self._waiting.append((list(items), answer))
        self._thread = self._thread or ThreadPoolExecutor(1, "scoring", take_half_of_the_cores)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())
        return await answer

    async def _work(self) -> None:
        await asyncio.sleep(0)  # what other problems ask for in this turn of the loop goes with it
        while self._waiting:
            batch, self._waiting = self._waiting, []
            items = [item for asked, _ in batch for item in asked]
            self.num_calls += 1
            try:
                found = await asyncio.get_running_loop().run_in_executor(self._thread, self._compute, items)
            except Exception as error:  # of any kind: whoever waits for these answers gets it
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            start = 0
            for asked, answer in batch:
                if not answer.done():
                    answer.set_result(found[start : start + len(asked)])
                start += len(asked)

    def close(self) -> None:
        """Let go of the thread; what it works on ends. Who asks again gets another one."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None
