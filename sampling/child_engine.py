"""An engine in another process, seen from the program that started it: calls and answers over a socket.

Messages are those of `sampling.engine_process`, which is the other end. `ChildEngine` is one in a child process, at the
other end of a socket pair; `sampling.ray_engines` has one on any node of a cluster.
"""

import asyncio
import itertools
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from espalier.sampling.child_process import ChildProcess
from espalier.sampling.client import LOOPBACK, EngineFailed, ServerGone, one_line
from espalier.sampling.engine_process import CANCEL, DRAWN, receive, send

_DYING_SECONDS = 5.0


class Silent(ServerGone):
    """It did not answer within the time that it had."""


class EngineConnection(ABC):
    """Args: `name` in messages; `settings` of its engine; `on_lost` is called once where it was loaded and answers no
    more, unless it was closed.

    `num_owed`: samples that it was asked for and has not given. `is_taking`: whether it takes weights, in silence;
    `has_weights`: whether it serves those of the policy that it follows. `asleep`: the parts of its memory that it has
    let go of.
    `drawn`: how many tokens it has drawn for samples that it owes, by the ids of requests, as it last said.
    `gone`: why it answers no more, "" while it does.
    `host`: where it runs, as this machine reaches it.
    """

    name: str
    log: Path
    host = LOOPBACK

    def __init__(self, settings: dict[str, Any], on_lost: Callable[[Any], None] = lambda engine: None):
        self.settings = settings
        self.on_lost = on_lost
        self.num_owed = 0
        self.is_taking = False
        self.has_weights = False
        self.drawn: dict[str, int] = {}
        self.asleep: set[str] = set()
        self.gone = ""
        self._is_loaded = False
        self._last_sign = 0.0
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None

    @abstractmethod
    async def start(self, environment: dict[str, str], seconds: float) -> None:
        """Start it and wait until it has loaded the model. Raises ServerGone."""

    @abstractmethod
    def stop(self) -> None:
        """End the process."""

    @abstractmethod
    async def last_lines(self) -> str:
        """Return the end of its log."""

    @abstractmethod
    async def why_it_ended(self) -> str:
        """Wait until its end is known and say why, with the log's first error and its last lines."""

    async def load(self, end: socket.socket, seconds: float) -> None:
        """Talk over this socket from now on; return when the engine has loaded its model. Raises ServerGone."""
        reader, self._writer = await asyncio.open_connection(sock=end)
        self._reading = asyncio.create_task(self._read(reader))
        _, opened = self._expect()
        send(self._writer, self.settings)
        await self._within(seconds, opened, "was not loaded")
        if self.gone:
            raise ServerGone(self.gone)
        self._is_loaded = True

    async def call(self, name: str, *arguments: Any) -> Any:
        """Return what the method of its `OneProcessEngine` returns. Raises Refused as that does; ServerGone where it
        failed or died."""
        if not self._waiting:
            self._last_sign = asyncio.get_running_loop().time()
        number, future = self._expect()
        assert self._writer is not None
        send(self._writer, (number, name, arguments))
        try:
            return await future
        except asyncio.CancelledError:
            if self._waiting.pop(number, None) is not None and not self.gone:
                send(self._writer, (number, CANCEL, ()))
            raise

    async def ask(self, name: str, *arguments: Any, seconds: float) -> Any:
        """Return `call` with a deadline, which raises Silent."""
        return await self._within(seconds, self.call(name, *arguments), f"did not answer {name}")

    async def is_working(self, seconds: float) -> bool:
        """Say whether it says within `seconds` that it samples."""
        try:
            return await self.ask("is_working", seconds=seconds) is True
        except ServerGone:
            return False

    async def watch(self, silence_seconds: float, probe_seconds: float) -> None:
        """Return when it is gone; it is given up where it owes samples, said nothing for `silence_seconds` and gives no
        sign of life in `probe_seconds`."""
        while not self.gone:
            await asyncio.sleep(min(1.0, silence_seconds / 4))
            silence = asyncio.get_running_loop().time() - self._last_sign
            if (
                not self.num_owed
                or self.is_taking
                or silence <= silence_seconds
                or await self.is_working(probe_seconds)
            ):
                continue
            silent = f"gave no answer for {silence_seconds:g} s, nor a sign of life in {probe_seconds:g} s"
            self.give_up(await self._with_log(f"{self.name} {silent}"))

    def give_up(self, why: str) -> None:
        """Expect nothing of it any more: all who wait, and all who come, get ServerGone with `why`."""
        if self.gone:
            return
        self.gone = why
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ServerGone(why))
        self._waiting.clear()
        if self._is_loaded:
            self.on_lost(self)

    async def close(self) -> None:
        """End the process."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
        self._is_loaded = False
        self.give_up(f"{self.name} was closed")
        await asyncio.to_thread(self.stop)

    def _expect(self) -> tuple[int, asyncio.Future[Any]]:
        """Return the number of the next message, and what its answer will be."""
        if self.gone:
            raise ServerGone(self.gone)
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        return number, self._waiting[number]

    async def _within(self, seconds: float, asked: Any, failed: str) -> Any:
        """Raises Silent."""
        try:
            async with asyncio.timeout(seconds):  # wait_for of Python 3.11 forgets a cancellation as an answer comes
                return await asked
        except TimeoutError:
            raise Silent(await self._with_log(f"{self.name} {failed} in {seconds:g} s")) from None

    async def _with_log(self, message: str) -> str:
        return f"{message}\nthe end of {self.log}:\n{await self.last_lines()}"

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hand on what it answers until it dies; then all who wait get the error."""
        while True:
            try:
                number, value, error = await receive(reader)
            except EOFError:
                break
            except Exception as wrong:  # no message of ours
                self.give_up(f"{self.name} answered what cannot be read: {one_line(wrong)}")
                return
            if number == DRAWN:
                self.drawn = value
                continue
            self._last_sign = asyncio.get_running_loop().time()
            await self._hand_on(number, value, error)
        self.give_up(await self.why_it_ended())

    async def _hand_on(self, number: int, value: Any, error: Exception | None) -> None:
        """One answer to the one who waits for it, and to all where the engine itself has failed."""
        if isinstance(error, EngineFailed):  # who waits stands in `_waiting` while the log is read: it may be given up
            self.give_up(await self._with_log(f"{self.name}: {error}"))
            return
        future = self._waiting.pop(number, None)
        if isinstance(error, ServerGone):
            error = ServerGone(f"{self.name}: {error}")
        if future is None or future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)


class ChildEngine(ChildProcess, EngineConnection):
    """Args: `name` and `log` as of every child; `program`, the module to run; the rest as of every connection."""

    def __init__(
        self,
        name: str,
        log: str,
        program: str,
        settings: dict[str, Any],
        on_lost: Callable[["ChildEngine"], None] = lambda engine: None,
    ):
        ChildProcess.__init__(self, name, log)
        EngineConnection.__init__(self, settings, on_lost)
        self.program = program

    async def start(self, environment: dict[str, str], seconds: float) -> None:
        """Start it and wait until it has loaded the model. Raises ServerGone."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", self.program, str(theirs.fileno())]  # not what lies around here
            try:
                self.begin(command, environment, [theirs.fileno()])
            except BaseException:
                ours.close()
                raise
        await self.load(ours, seconds)

    async def last_lines(self) -> str:
        """Return the end of its log."""
        return self.tail()

    async def why_it_ended(self) -> str:
        """Wait until its end is known and say why, with the log's first error and its last lines."""
        if self.process is not None:
            await asyncio.to_thread(_wait, self.process)
        return self.death_message()


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Until its end is known."""
    try:
        process.wait(_DYING_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_DYING_SECONDS)
