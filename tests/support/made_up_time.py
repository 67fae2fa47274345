"""An event loop by a clock of its own: a second passes when nothing is left to do in the one before."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

from espalier.runtime.background_loop import BackgroundLoop

R = TypeVar("R")


class _Events(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found:
            assert timeout is not None, "everybody waits for somebody who never comes"
            self.now += timeout
        return found


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.events = _Events()
        super().__init__(self.events)

    def time(self) -> float:
        return self.events.now

    def run_in_executor(self, executor: Any, func: Callable[..., R], *args: Any) -> asyncio.Future[R]:  # type: ignore[override]
        """Takes no time."""
        done = self.create_future()
        done.set_result(func(*args))
        return done


class MadeUpTime(BackgroundLoop):
    """Stands for a `BackgroundLoop`. What it was left with goes on while `pass_time` passes."""

    def __init__(self) -> None:
        super().__init__()
        self._own = _Loop()

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return self._own.time()

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Return what it returns."""
        return self._own.run_until_complete(coroutine)

    def pass_time(self, seconds: float) -> None:
        """Let others work meanwhile."""
        self.run(asyncio.sleep(seconds))

    def close(self) -> None:
        """Cancel what is left."""
        left = asyncio.all_tasks(self._own)

        async def end() -> None:
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

        self._own.run_until_complete(end())
        self._own.close()

    def __enter__(self) -> Self:
        return self
