"""The group that weights are sent over: this process and every worker of every engine, and a delivery in it."""

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar, cast

import torch

from espalier.rl.delivery.live_engine import LiveEngine
from espalier.sampling.client import LOOPBACK, ServerGone
from espalier.sampling.weight_buckets import Streamed, kinds_of
from espalier.sampling.weight_chain import StreamBroken, own_address
from espalier.sampling.weight_stream import WeightSender

log = logging.getLogger(__name__)

R = TypeVar("R")


async def each(asked: Iterable[Coroutine[Any, Any, R]]) -> list[R]:
    """Return the results in order, once all have ended; raises the first error of them."""
    found = await asyncio.gather(*asked, return_exceptions=True)
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return cast(list[R], found)


@dataclass(frozen=True)
class Serving:
    """An engine as the process that it is now."""

    engine: LiveEngine
    process: int

    @property
    def is_there(self) -> bool:
        """Whether it is that process still."""
        return self.engine.process == self.process


@dataclass
class WeightGroup:
    """`stream` is this process' end; `members` are the others."""

    stream: WeightSender
    members: list[Serving]
    num_sent: int = 0

    async def send(self, weights: Mapping[str, torch.Tensor] | Streamed, dtype: torch.dtype | None) -> list[Any]:
        """Send the weights, rounded to `dtype`, to all engines; return the digests of what was sent and, behind them,
        what each engine's `load` returns. Raises what those raise, ServerGone."""
        self.num_sent += 1
        loads = [one.engine.load(self.stream.invitation.key, self.num_sent) for one in self.members]
        sending = asyncio.to_thread(self.stream.send, kinds_of(weights, dtype), weights.items())
        return await _together(loads, sending, self.stream)


async def join_engines(
    members: Sequence[Serving], device: torch.device | None = None, may_group: bool = True
) -> WeightGroup:
    """Return the group once every worker of every engine is in it; `device`: of the weights; `may_group`: as
    `WeightSender`. Raises ServerGone."""
    engines = [one.engine for one in members]
    workers = await each(engine.worker_ranks() for engine in engines)
    hosts = [engine.host for engine in engines]
    try:
        address = next((found for found in map(own_address, hosts) if found != LOOPBACK), LOOPBACK)
        stream = WeightSender(address, sum(map(len, workers)), device=device, may_group=may_group)
    except OSError as error:
        raise ServerGone(f"weights do not reach the engines at {', '.join(hosts)}: {error}") from error
    pairs = zip(engines, accumulate(map(len, workers), initial=1), strict=False)
    asked = [engine.join_weights(stream.invitation, rank) for engine, rank in pairs]
    await _together(asked, asyncio.to_thread(stream.join), stream)
    log.debug(
        "weights go to %d workers of %d engines by %s", stream.invitation.world_size - 1, len(engines), stream.way
    )
    return WeightGroup(stream, [*members])


def _is_consequence(error: BaseException) -> tuple[bool, bool]:
    """Say whether an engine, or this process, knows only that weights stopped coming or going: not what lies behind."""
    return StreamBroken.__name__ in f"{type(error).__name__}: {error}", isinstance(error, StreamBroken)


async def _together(asked: Iterable[Awaitable[R]], own: Awaitable[Any], stream: WeightSender) -> list[Any]:
    """Return what this process and, behind it, the engines give; where one of them fails the others wait no more.
    Raises an engine's error before others', ServerGone where weights do not get through."""
    failed: list[BaseException] = []

    async def one_of(part: Awaitable[Any]) -> Any:
        try:
            return await part
        except BaseException as error:
            failed.append(error)
            await asyncio.to_thread(stream.give_up)
            raise

    # this process first: an engine may hold up the loop until its part is done
    sent, *found = await asyncio.gather(one_of(own), *map(one_of, asked), return_exceptions=True)
    errors = sorted(failed, key=_is_consequence)  # an engine says more of itself
    if errors and isinstance(errors[0], StreamBroken):
        raise ServerGone(f"weights do not reach the engines: {errors[0]}") from errors[0]
    if errors:
        raise errors[0]
    return [sent, *found]
