"""An event loop in a thread of its own, for what goes on while the program computes."""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self, TypeVar

R = TypeVar("R")
_END_SECONDS = 30.0


class BackgroundLoop:
    """Runs coroutines one call at a time or side by side, and tasks that they leave behind until it is closed. The
    thread is started by the first call."""

    def __init__(self) -> None:
        self.interrupts: Callable[[], AbstractContextManager[None]] = nullcontext
        """What every wait for a coroutine stands within; may raise, and interrupt it so."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Return what the coroutine returns, or raise what it raises; called from any thread but the loop's own. What
        interrupts the wait (a signal's exception) cancels the coroutine first."""
        loop = self._started()
        ended: concurrent.futures.Future[R] = concurrent.futures.Future()
        tasks: list[asyncio.Task[R]] = []

        def begin() -> None:
            tasks.append(loop.create_task(coroutine))
            tasks[0].add_done_callback(lambda task: _copy_end(task, ended))

        loop.call_soon_threadsafe(begin)
        try:
            with self.interrupts():
                return ended.result()
        except BaseException:
            if not ended.done():
                loop.call_soon_threadsafe(lambda: tasks[0].cancel())
                concurrent.futures.wait([ended], _END_SECONDS)  # until what it does at its end is done
            raise

    def close(self) -> None:
        """Cancel what is left and end the thread."""
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        if loop is None or thread is None:
            return
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result(_END_SECONDS)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_END_SECONDS)
        if not thread.is_alive():
            loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="events", daemon=True)
            self._thread.start()
        return self._loop


def _copy_end(task: asyncio.Task[R], ended: concurrent.futures.Future[R]) -> None:
    if task.cancelled():
        ended.set_exception(concurrent.futures.CancelledError())
    elif (error := task.exception()) is not None:
        ended.set_exception(error)
    else:
        ended.set_result(task.result())


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
    await asyncio.get_running_loop().shutdown_default_executor()
