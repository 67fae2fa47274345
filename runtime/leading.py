"""Work that rank 0 does alone, and what it has all ranks do for it.

Rank 0 leads (`lead`): it holds what the work is about, decides, and asks (`ask`) whenever all ranks have to compute: a
call for each of them, which may carry what that rank computes with (its rows, say). Meanwhile the other ranks make the
calls that they get, and hold nothing between them. What ranks have alike, networks and all that goes with them, does
not travel: it is `held`, and a call names it. Here the main thread of rank 0 asks; where a thread of its own does
(weights on their way to engines), it is `runtime.rank_calls`.

Before each call the ranks wait for rank 0 as they wait for it anywhere (`runtime.distributed.from_main_rank`): without
a limit, with signs of life. Collectives of all ranks are made in calls alone: outside them one is an error, not a wait
that never ends.
"""

import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from espalier.runtime.answers import packed, unpacked
from espalier.runtime.distributed import (
    alone,
    gather_on_main_rank,
    is_main_rank,
    scatter_from_main_rank,
    together,
    world_size,
)
from espalier.runtime.errors import Stopped

T = TypeVar("T")


class Phases(Protocol):
    """Counts seconds (`rl.iteration_metrics.Clock`)."""

    @property
    def current(self) -> str:
        """Name the innermost phase, "" outside all."""

    def call(self, name: str) -> AbstractContextManager[None]:
        """Count the seconds of the block as computed by this rank, for that phase ("": none) unless it is in one."""


class _Led:
    """What a rank needs while rank 0 leads."""

    def __init__(self, held: Sequence[Any], phases: Phases):
        self.held, self.phases = list(held), phases


_led: _Led | None = None


def lead(work: Callable[[], T], held: Sequence[Any], phases: Phases) -> T | None:
    """Return on rank 0 what `work` returns; None on the others, which do meanwhile what it asks for. Called on every
    rank, from its main thread.

    `held`: objects that are alike on every rank, in one order (None: not there). `phases`: every rank's own clock: what
    is asked counts for the phase that rank 0 is in. What `work` raises rises on rank 0, and ends the others; Stopped
    rises on all.
    """
    global _led
    if world_size() == 1:
        return work()
    if _led is not None:
        raise RuntimeError("rank 0 leads already")
    _led = _Led(held, phases)
    try:
        if is_main_rank():
            return _work(work)
        _serve(_led)
        return None
    finally:
        _led = None


def ask(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Have rank i make `calls[i]` (picklable, but for what is held); return what they return (picklable), in order. On
    rank 0, from `work` of `lead`, in its thread. Raises RuntimeError elsewhere."""
    if world_size() == 1:
        return [calls[0]()]
    if _led is None or not is_main_rank():
        raise RuntimeError("all ranks are asked for something where rank 0 does not lead")
    orders = {id(call): _order(_led.phases.current, call, _led.held) for call in calls[1:]}
    with together():
        scatter_from_main_rank([b"", *(orders[id(call)] for call in calls[1:])])
        del orders
        with _led.phases.call(_led.phases.current):
            found = calls[0]()
        answers = gather_on_main_rank(b"")
    return [found, *(unpacked(answer) for answer in answers[1:])]


def ask_alike(call: Callable[[], T]) -> T:
    """Have every rank make the same call; return what rank 0's returns. As `ask`."""
    calls: list[Callable[[], Any]] = [call, *[_Silent(call)] * (world_size() - 1)]
    found: T = ask(calls)[0]
    return found


class _Silent:
    """A call whose answer nobody needs."""

    def __init__(self, call: Callable[[], Any]):
        self.call = call

    def __call__(self) -> None:
        self.call()


def _order(phase: str, call: Callable[[], Any], held: Sequence[Any]) -> bytes:
    try:
        return packed((phase, call), held)
    except (pickle.PicklingError, AttributeError) as error:
        raise TypeError(f"other ranks cannot be sent this call ({error}): make it a method, or a function of a "
                        "module") from error  # fmt: skip


def _work(work: Callable[[], T]) -> T:
    try:
        with alone():
            found = work()
    except Stopped as stopped:
        _end(stopped)
        raise
    _end(None)
    return found


def _end(how: Stopped | None) -> None:
    scatter_from_main_rank([packed(how)] * world_size())


def _serve(led: _Led) -> None:
    while (order := unpacked(scatter_from_main_rank(None), led.held)) is not None:
        if isinstance(order, Stopped):
            raise order
        phase, call = order
        with led.phases.call(phase):
            found = call()
        gather_on_main_rank(packed(found))
        del order, call, found
