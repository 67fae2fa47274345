"""SIGTERM and SIGINT as a wish: the loop finishes its step, saves and ends with 128 + the signal's number.

A second signal ends the process at once, as without this module, unless it follows within two seconds: Ctrl-C and
schedulers signal a launcher and its ranks, and the launcher signals the ranks again. So does the first one where
another rank has failed already: there is nothing to save together.
"""

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from espalier.runtime import process_lifetime as life
from espalier.runtime.company import peers
from espalier.runtime.distributed import sum_over_ranks
from espalier.runtime.errors import Stopped

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """`with StopSignals() as stop: ... if stop.agreed(): ...`."""

    def __init__(self) -> None:
        self.number = 0
        self._noted_at = math.inf
        self._is_waiting = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # the only one that may set handlers
            self._old = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now, others = time.monotonic(), peers()
        is_alone = others is not None and others.failure is not None
        if is_alone or now - self._noted_at > life.REPEAT_SECONDS:
            self._restore()
            os.kill(os.getpid(), number)
            return
        self.number, self._noted_at = number, now
        if self._is_waiting:
            raise Stopped

    @contextmanager
    def interrupts(self) -> Iterator[None]:
        """Raise Stopped as soon as a signal comes within the block, or where one has come: for waits of the main thread
        that nothing is lost by."""
        self._is_waiting = True
        try:
            if self.number:
                raise Stopped
            yield
        finally:
            self._is_waiting = False

    def _restore(self) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._old = {}

    def agreed(self) -> bool:
        """Say whether any rank got a signal; called on every rank at the same place."""
        counts = sum_over_ranks([float(self.number == number) for number in SIGNALS])
        numbers = [number for number, count in zip(SIGNALS, counts, strict=True) if count]
        if numbers:  # else nothing is written: a signal may have come since
            self.number = numbers[0]
        return bool(numbers)

    @property
    def exit_code(self) -> int:
        """143 after SIGTERM, 130 after SIGINT."""
        return 128 + self.number

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
