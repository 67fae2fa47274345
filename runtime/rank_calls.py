"""What a thread of rank 0 has the main threads of all ranks do: collectives that come up while rank 0 talks to others.

Rank 0 does something that other ranks have no part in (it sends weights to engines, say) and needs, again and again,
what only all ranks together can give. So that part runs in a thread of its own there, and every rank's main thread
makes one call after the other that is asked for, in the same order. Between two calls the others wait as they wait for
rank 0 anywhere (`runtime.distributed.from_main_rank`): without a limit, with signs of life. Nobody is left in a
collective when what rank 0 does fails, because none is begun before it asks. Where the main thread of rank 0 itself
asks, it is `runtime.leading`.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from espalier.runtime.distributed import from_main_rank, is_main_rank

T = TypeVar("T")
_Asked = queue.SimpleQueue[tuple[str, tuple[Any, ...]] | None]


class RankCalls:
    """`target`: an object that every rank has, whose methods are called by name, with picklable arguments; its method
    `rest` ends every `serve`. What they return is rank 0's alone."""

    def __init__(self, target: Any):
        self.target = target
        self._lock = threading.Lock()
        self._asked: _Asked | None = None  # where `serve` runs, on rank 0
        self._replies: deque[Future[Any]] = deque()

    def ask(self, method: str, *arguments: Any) -> Any:
        """Return what the method gives on rank 0: where `serve` runs, called on all ranks for a thread of rank 0; else
        called by this rank, as by all others, from its main thread. Raises RuntimeError where nobody serves any
        more."""
        is_main_thread = threading.current_thread() is threading.main_thread()
        reply: Future[Any] = Future()
        with self._lock:
            if is_main_thread == (self._asked is not None):
                raise RuntimeError(f"'{method}' of all ranks is asked for by a thread for which they do not serve")
            if self._asked is not None:
                self._replies.append(reply)
                self._asked.put((method, arguments))
        return getattr(self.target, method)(*arguments) if is_main_thread else reply.result()

    def serve(self, call: Callable[[], T]) -> T:
        """Return what `call` returns (picklable) on rank 0, which makes it in a thread of its own; on every rank, from
        its main thread, which meanwhile does what is asked. What it raises rises on rank 0, as by `from_main_rank`."""
        done: Future[T] = Future()
        asked: _Asked = queue.SimpleQueue()

        def work() -> None:
            try:
                done.set_result(call())
            except BaseException as error:
                done.set_exception(error)
            asked.put(None)

        if is_main_rank():
            self._asked = asked
            threading.Thread(target=work, name="asks all ranks", daemon=True).start()
        try:
            while (order := from_main_rank(asked.get)) is not None:
                found = getattr(self.target, order[0])(*order[1])
                if is_main_rank():
                    self._replies.popleft().set_result(found)
                del found
        finally:
            self._end()
        self.target.rest()
        return from_main_rank(done.result)

    def _end(self) -> None:
        """Whoever still waits for an answer gets none."""
        with self._lock:
            self._asked = None
            while self._replies:
                self._replies.popleft().set_exception(RuntimeError("the ranks do not serve any more"))
