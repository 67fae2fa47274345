"""All engines that follow the policy: weights go to every one of them, questions to those that have them.

Delivery: all weights as a stream to every worker of every engine at once (`sampling.weight_stream`), then prefix caches
are emptied. Every name is sent, `lm_head.weight` of a tied head too: without it vLLM (0.32, CPU) goes on with its own
stale copy and says nothing. An engine whose process is gone takes no part: deliveries go to those that are there,
and to one that was started in its place from the next one on.

The engine answers with a **receipt**, a digest of every tensor it read: all, one, or an older file is noticed at once,
however small the step was, if it changes what the engine keeps. The engine is then **stamped** with the policy's
version.

Engines that share their devices with the learner **sleep** between the last request of an iteration and the delivery
(`sleep`): their weights are lost, and their caches. They take the memory of the weights again before the stream, that
of the cache behind it.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import torch

from espalier.rl.delivery.live_engine import DrawingEngine, LiveEngine, PausingEngine, SleepingEngine, StampedEngine
from espalier.rl.delivery.receipts import StaleWeights, check_receipt
from espalier.rl.delivery.weight_group import Serving, WeightGroup, each, join_engines
from espalier.sampling.client import CACHE, WEIGHTS, ServerGone
from espalier.sampling.weight_buckets import Streamed

log = logging.getLogger(__name__)

_GLANCE_SECONDS = 0.1

R = TypeVar("R")


class FollowingEngines:
    """`dtype`: what the engines compute in, where that is known: they are sent no more digits than they keep.
    `device`: of the weights; engines that are there share its memory."""

    def __init__(
        self,
        engines: LiveEngine | Sequence[LiveEngine],
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ):
        self.engines = list(engines) if isinstance(engines, Sequence) else [engines]
        self.dtype = dtype
        self.device = device
        self.is_received = False  # what was sent last, by receipts of it
        self.wake_seconds = 0.0  # in which engines were woken, in all
        self._sent: deque[dict[str, str]] = deque(maxlen=4)  # digests of the last deliveries
        self._may_group = True
        self._group: WeightGroup | None = None  # once there was a first delivery

    async def deliver(self, weights: Mapping[str, torch.Tensor] | Streamed, stamp: str = "") -> None:
        """Send the weights to every engine that is there (one that sleeps is woken), compare every receipt, and stamp
        the engines; those that can draw no token meanwhile. Where an engine is gone under it, the others (and, where
        none is left, those that are being started in their place) get the whole delivery again, once. Raises
        StaleWeights, ServerGone."""
        await self._wake(WEIGHTS)
        before = await self._present()
        try:
            await self._deliver(before, weights, stamp)
        except ServerGone as error:
            self.close()
            if all(one.is_there for one in before):
                raise
            log.warning("a delivery of weights is made again: %s", str(error).split("\n")[0])
            await self._deliver(await self._present(), weights, stamp)

    async def _deliver(
        self, engines: list[Serving], weights: Mapping[str, torch.Tensor] | Streamed, stamp: str
    ) -> None:
        await each(one.engine.pause() for one in engines if isinstance(one.engine, PausingEngine))
        if self._group is None or self._group.members != engines:
            self.close()
            self._group = await join_engines(engines, self.device, self._may_group)
            self._may_group = self._group.stream.may_group  # what failed once is not tried at every replacement
        sent, *receipts = await self._group.send(weights, self.dtype)
        for one, of_workers in zip(engines, receipts, strict=True):
            if of_workers is not None and not of_workers:
                raise StaleWeights(f"{one.engine.name} took a delivery and gave no receipt")
            for receipt in of_workers or []:
                check_receipt(sent, receipt, self._sent, one.engine.name)
        self.is_received = all(receipts)
        self._sent.append(sent)
        await self._wake(CACHE)
        if stamp:
            await each(_to_it(one, lambda engine: engine.stamp(stamp)) for one in engines
                       if isinstance(one.engine, StampedEngine))  # fmt: skip
        # where a delivery failed they stay as they are: the run ends
        await each(_to_it(one, lambda engine: engine.resume()) for one in engines
                   if isinstance(one.engine, PausingEngine))  # fmt: skip

    async def sleep(self) -> None:
        """Have every engine that shares its device with the learner let go of its memory until the next delivery.
        Raises ServerGone."""
        await each(engine.sleep() for engine in self.engines if isinstance(engine, SleepingEngine))

    async def _wake(self, part: str) -> None:
        """Have every engine that sleeps take the memory of that part again; one that is gone under it is left out.
        Raises ServerGone."""
        began = time.monotonic()
        sleeping = [(one, one.process) for one in self.engines if isinstance(one, SleepingEngine)]
        found = await asyncio.gather(*(one.wake(part) for one, _ in sleeping), return_exceptions=True)
        self.wake_seconds += time.monotonic() - began
        for (engine, process), error in zip(sleeping, found, strict=True):
            is_lost = isinstance(error, ServerGone) and engine.process != process
            if isinstance(error, BaseException) and not is_lost:
                raise error

    async def _present(self) -> list[Serving]:
        """Return the engines that are there; where none is, wait for those that are being started. Raises
        ServerGone."""
        while not (found := [Serving(one, number) for one in self.engines if (number := one.process) is not None]):
            if not any(engine.is_coming for engine in self.engines):
                raise ServerGone("no engine is left that weights could be sent to")
            await asyncio.sleep(_GLANCE_SECONDS)
        return found

    @property
    def num_serving(self) -> int:
        """How many engines took the last delivery and are still there."""
        return len(self._serving())

    def _serving(self) -> list[Serving]:
        if self._group is None:  # nothing was delivered yet
            return [Serving(one, number) for one in self.engines if (number := one.process) is not None]
        return [one for one in self._group.members if one.is_there]

    def close(self) -> None:
        """Send no more."""
        if self._group is not None:
            self._group.stream.close()
            self._group = None

    async def _ask(
        self, call: Callable[[Any], Coroutine[Any, Any, R]], kind: Any = LiveEngine
    ) -> list[tuple[LiveEngine, R]]:
        """Return what each engine of that kind answers that serves the policy; one that is gone meanwhile answers
        nothing. Raises an engine's error, ServerGone where none is left."""
        engines = self._serving()
        asked = [one for one in engines if isinstance(one.engine, kind)]
        found = await asyncio.gather(*(call(one.engine) for one in asked), return_exceptions=True)
        answers: list[tuple[LiveEngine, R]] = []
        lost: BaseException = ServerGone("no engine is left that has the policy's weights")
        for one, answer in zip(asked, found, strict=True):
            if isinstance(answer, ServerGone) and not one.is_there:
                lost = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                answers.append((one.engine, answer))
        if not answers and (asked or not engines):
            raise lost
        return answers

    async def logprobs_of(self, rows: Sequence[list[int]]) -> list[tuple[LiveEngine, list[list[float]]]]:
        """Of every engine: the log-probs of every token but the first of each row."""

        async def by(engine: LiveEngine) -> list[list[float]]:
            return await each(engine.prompt_logprobs(row) for row in rows)

        return await self._ask(by)

    async def keep_random_state(self) -> None:
        """Have every engine remember what it draws by, where it has a random state of its own. Raises ServerGone."""
        await self._ask(lambda engine: engine.keep_random_state(), DrawingEngine)

    async def put_random_state_back(self) -> None:
        """Have every engine draw as if nothing had been asked since. Raises ServerGone."""
        await self._ask(lambda engine: engine.put_random_state_back(), DrawingEngine)

    @property
    def takes_in_flight(self) -> bool:
        """Whether every engine takes weights in the middle of its requests; they need not run."""
        # by their classes: isinstance would ask engines that other ranks have never opened where they run
        return all(callable(getattr(type(one), "pause", None)) for one in self.engines)


async def _to_it(one: Serving, call: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
    """Make the call of the process that took the delivery, and of no other that was started in its place meanwhile.
    Raises ServerGone."""
    if not one.is_there:
        raise ServerGone(f"{one.engine.name} was lost behind its receipt")
    await call(one.engine)
