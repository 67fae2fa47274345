"""One watch over requests in flight: it ends a run from which no results come, and no sign of life either."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from espalier.sampling.client import ServerGone

log = logging.getLogger("sample")
R = TypeVar("R")


class StallWatch:
    """Waits for tasks that call `saw_result` at every result.

    Where none came for `stall_seconds`, `is_working` (None: nobody can be asked) is asked whether the sampler is slow
    or gone. `check` is called at every look, twice a second at least, and raises what ends the run besides. `remedy`
    ends the line of a stall.
    """

    def __init__(
        self,
        stall_seconds: float,
        check: Callable[[], None],
        is_working: Callable[[], Awaitable[bool]] | None,
        remedy: str = "run the same command to go on",
    ):
        self.stall_seconds = stall_seconds
        self.check = check
        self.is_working = is_working
        self.remedy = remedy
        self._last_result = time.monotonic()

    def saw_result(self) -> None:
        """A result came."""
        self._last_result = time.monotonic()

    async def wait_for(self, tasks: Sequence[asyncio.Task[R]]) -> list[R]:
        """Return what the tasks return, in order; whatever is undone at the end is cancelled.

        Raises the first error of a task, ServerGone at a stall, and what `check` raises.
        """
        self.saw_result()
        everyone = asyncio.gather(*tasks)
        watch = asyncio.create_task(self._watch())
        waited: list[asyncio.Future[Any]] = [everyone, watch]
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not everyone.done():
                await watch
            return await everyone
        finally:
            for task in (*tasks, watch):
                task.cancel()
            await asyncio.gather(*tasks, watch, everyone, return_exceptions=True)

    async def _watch(self) -> None:
        """End only by raising."""
        asked: asyncio.Task[bool] | None = None
        try:
            while True:
                await asyncio.sleep(min(0.5, self.stall_seconds / 4))
                self.check()
                if time.monotonic() - self._last_result <= self.stall_seconds:
                    continue
                if asked is None and self.is_working is not None:
                    asked = asyncio.create_task(_answer_of(self.is_working))
                if asked is not None and not asked.done():
                    continue
                if asked is None or not asked.result():
                    raise ServerGone(f"no answer for {self.stall_seconds:g} s: {self.remedy}")
                log.info("no answer for %g s, but the sampler works: waiting on", self.stall_seconds)
                self._last_result, asked = time.monotonic(), None
        finally:
            if asked is not None:
                asked.cancel()


async def _answer_of(question: Callable[[], Awaitable[bool]]) -> bool:
    return await question()
