"""What the ranks of a run owe one another beside their collectives: signs of life, errors, and waits without a limit.

Rank 0 listens and the others connect to it. A thread on every rank sends a sign of life several times within
`limit` seconds, whatever the rank is at. So one that is killed is noticed at once, by its closed connection, and one
that is stopped, or whose machine is, within the limit; a rank that works for hours while the others wait for it
(`meet`) is not. What one rank raises ends all of them, with its exit code and its line: those that wait raise it where
they wait, those in a collective lose their partner, and those that are at something else are interrupted as by SIGTERM
and, where that does not help, ended.

What it does not notice is a rank that lives and does nothing, outside a collective: rank 0 then says every so often
for whom the others wait.
"""

import json
import logging
import os
import re
import selectors
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

from espalier.runtime.errors import exit_code_of, line_of
from espalier.runtime.ranks import rank, says_errors

log = logging.getLogger(__name__)

START_SECONDS = 600.0  # the limit until a config says its own
SETTLE_SECONDS = 1.0  # after an error that may follow from another rank's
ASK_SECONDS = 3.0  # after another rank's error, until this one is interrupted
FORCE_SECONDS = 20.0  # ... until it is ended
UNWIND_SECONDS = 60.0  # ... until it is ended although it is on its way out
LEAVE_SECONDS = 30.0  # for the others to come to their end too, after an error
END = "the end"
_OF_A_COLLECTIVE = re.compile(r"gloo|nccl|connection (closed|reset)|timed out|broken pipe|c10d", re.I)


@dataclass(frozen=True)
class Failure:
    """Why the run ends: the error of `rank`, or that it is gone (`is_lost`)."""

    rank: int
    line: str
    exit_code: int
    is_lost: bool = False


class RankFailed(RuntimeError):
    """Another rank failed, and this one ends with it and with its exit code."""

    def __init__(self, failure: Failure):
        super().__init__(failure.line if failure.is_lost else f"rank {failure.rank}: {failure.line}")
        self.failure = failure
        self.exit_code = failure.exit_code


class RankStuck(RuntimeError):
    """A rank that lives has not come where it was to come within the limit."""

    exit_code = 3


class Peers:
    """The connections of this rank: `lines` by rank (of rank 0 to all others, of these to rank 0) and `names` of who is
    at their other ends."""

    def __init__(self, lines: dict[int, socket.socket], names: dict[int, str], limit: float = START_SECONDS):
        self.limit = limit
        self.failure: Failure | None = None
        self._lines, self._names = lines, names
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._heard = dict.fromkeys(lines, time.monotonic())
        self._texts = dict.fromkeys(lines, b"")
        self._met, self._opened = 0, 0  # meetings that this rank came to, and that all came to
        self._last = 0  # who came last to the newest of these
        self._arrived: dict[int, dict[int, str]] = {}  # on rank 0: of those that are not complete
        self._left: set[int] = set()
        self._failed_at = 0.0
        self._is_unwinding, self._is_interrupted, self._is_over, self._is_at_end = False, False, False, False
        self._waker, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="peers", daemon=True)
        self._thread.start()

    def meet(self, place: str, is_limited: bool = False) -> int:
        """Wait until every rank is at the same `place`, however long that takes, as long as they give signs of life;
        where it `is_limited`, for as long as a collective may take. Return the rank of which rank 0 heard last.

        Raises RankFailed where another rank fails, is lost, or is at another place, and RankStuck.
        """
        self._met += 1
        self._is_at_end = place == END
        if rank() == 0:
            self._arrive(0, self._met, place)
        else:
            self._send(0, meet=self._met, place=place)
        started = said = time.monotonic()
        with self._changed:
            while self._opened < self._met and self.failure is None:
                self._changed.wait(1.0)
                if is_limited and time.monotonic() - started > self.limit and self._opened < self._met:
                    raise RankStuck(f"{place}: a rank has not come within {self.limit:g} s (rank_timeout_seconds): is "
                                    "it stuck, or slower than the others by more than that?")  # fmt: skip
                if rank() == 0 and time.monotonic() - said > self.limit:
                    said = time.monotonic()
                    late = [str(peer) for peer in self._lines if peer not in self._arrived.get(self._met, {})]
                    log.warning("%s: waiting for rank %s for %.0f s; it is alive", place, ", ".join(late),
                                said - started)  # fmt: skip
            if self.failure is not None:
                self._is_unwinding = True
                raise RankFailed(self.failure)
            return self._last

    def settle(self, error: BaseException) -> RankFailed | None:
        """Tell every rank of this one's error, unless another rank's was first: that one, or None for its own."""
        self._is_unwinding = True
        own = Failure(rank(), *_described(error))
        if self.failure is None and (exit_code_of(error) is None or isinstance(error, SystemExit)):
            self._wait_for_failure(SETTLE_SECONDS)  # a lost partner, a launcher's SIGTERM
        if self.failure is None:
            self._publish(own)
        found = self.failure or own
        if found.rank == rank() or (found.line, found.exit_code) == (own.line, own.exit_code):
            is_explained = exit_code_of(error) is not None or isinstance(error, SystemExit | KeyboardInterrupt)
            is_first = found.rank == rank() and not _is_of_a_collective(error)
            return None if is_explained or is_first else RankFailed(found)
        return RankFailed(found)

    def leave(self) -> None:
        """Close the connections: at once after a meeting at the end, after an error when all ranks know of it."""
        if self.failure is not None:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of a launcher that saw another rank end first
            if rank() != 0:
                self._send(0, left=True)
            is_gone = self.failure.is_lost and self.failure.rank == 0
            with self._changed:
                self._changed.wait_for(lambda: is_gone or self._left >= self._lines.keys(), LEAVE_SECONDS)
        self._is_over = True
        self._waker.send(b".")
        self._thread.join()
        for line in (*self._lines.values(), self._waker, self._woken):
            line.close()

    def _publish(self, failure: Failure) -> None:
        """Rank 0 decides which failure was the first."""
        if rank() == 0:
            self._accept(failure)
        else:
            self._send(0, failed=asdict(failure))
            self._wait_for_failure(ASK_SECONDS)
        if self.failure is None:
            self._accept(failure)

    def _wait_for_failure(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None, seconds)

    def _accept(self, failure: Failure) -> None:
        with self._changed:
            if self.failure is not None:
                return
            self.failure, self._failed_at = failure, time.monotonic()
            self._changed.notify_all()
        if rank() == 0:
            for peer in self._lines:
                self._send(peer, failed=asdict(failure))

    def _arrive(self, peer: int, number: int, place: str) -> None:
        """On rank 0: who came to which meeting; the last one opens it."""
        with self._changed:
            places = self._arrived.setdefault(number, {})
            places[peer] = place
            if len(places) <= len(self._lines):
                return
            del self._arrived[number]
            strange = next((other for other, found in places.items() if found != places[0]), None)
            if strange is None:
                self._opened, self._last = number, peer
                self._changed.notify_all()
        if strange is not None:
            where = f"rank {strange} is at '{places[strange]}', rank 0 at '{places[0]}'"
            self._accept(Failure(0, f"the ranks do not do the same: {where}: do all see the same files?", 2))
            return
        for other in self._lines:
            self._send(other, opened=number, last=peer)

    def _send(self, peer: int, **message: Any) -> None:
        """A message is a JSON object in a line; an empty line is a sign of life."""
        text = (json.dumps(message) if message else "") + "\n"
        try:
            with self._sending:
                self._lines[peer].sendall(text.encode())
        except OSError:  # its end is noticed where it is read
            return

    def _serve(self) -> None:
        beaten = 0.0
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for peer, line in self._lines.items():
                selector.register(line, selectors.EVENT_READ, peer)
            while not self._is_over:
                interval = min(0.5, self.limit / 6)
                for key, _ in selector.select(interval):
                    if key.data is not None and not self._read(key.data):
                        selector.unregister(key.fileobj)
                now = time.monotonic()
                if now - beaten >= interval:
                    beaten = now
                    for peer in self._lines:
                        self._send(peer)
                self._look_for_silence(now)
                self._end_if_stuck(now)

    def _read(self, peer: int) -> bool:
        """Take in what a peer sent; False where its connection is closed."""
        try:
            data = self._lines[peer].recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._hang_up(peer)
            return False
        self._heard[peer] = time.monotonic()
        *lines, self._texts[peer] = (self._texts[peer] + data).split(b"\n")
        try:
            for line in filter(None, lines):
                self._take(peer, json.loads(line))
        except (ValueError, TypeError, KeyError):
            self._lose(peer, "says what cannot be read: is it of the same version?")
        return True

    def _hang_up(self, peer: int) -> None:
        is_done = self._is_at_end and self._opened == self._met
        is_expected = is_done or self.failure is not None or self._is_over
        with self._changed:
            self._left.add(peer)
            self._changed.notify_all()
        if not is_expected:
            self._lose(peer, "has ended without a word: was it killed, for want of memory perhaps?")

    def _take(self, peer: int, message: dict[str, Any]) -> None:
        if "meet" in message:
            self._arrive(peer, message["meet"], message["place"])
        elif "failed" in message:
            self._accept(Failure(**message["failed"]))
        else:
            with self._changed:
                self._opened = message.get("opened", self._opened)
                self._last = message.get("last", self._last)
                if "left" in message:
                    self._left.add(peer)
                self._changed.notify_all()

    def _look_for_silence(self, now: float) -> None:
        for peer, heard in self._heard.items():
            if now - heard > self.limit and peer not in self._left:
                self._left.add(peer)
                self._lose(peer, f"has given no sign of life for {self.limit:g} s (rank_timeout_seconds): is it, or "
                                 "its machine, stopped?")  # fmt: skip

    def _lose(self, peer: int, what: str) -> None:
        line = f"rank {peer} ({self._names[peer]}) {what} The same command goes on"
        self._accept(Failure(peer, line, 3, is_lost=True))

    def _end_if_stuck(self, now: float) -> None:
        """After a failure the main thread has some seconds to come to its end; what it waits for may never come."""
        if self.failure is None:
            return
        waited = now - self._failed_at
        if not self._is_unwinding and not self._is_interrupted and waited > ASK_SECONDS:
            self._is_interrupted = True
            if callable(signal.getsignal(signal.SIGTERM)):
                os.kill(os.getpid(), signal.SIGTERM)
        if waited > (UNWIND_SECONDS if self._is_unwinding else FORCE_SECONDS):
            if says_errors(self.failure.rank if self.failure.is_lost else None):
                print(f"error: {RankFailed(self.failure)}", file=sys.stderr, flush=True)
            os._exit(self.failure.exit_code)


def _described(error: BaseException) -> tuple[str, int]:
    """Return (line, exit code) of what a rank raises."""
    if isinstance(error, KeyboardInterrupt):
        return "stopped by a signal", 130
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 0
        return ("stopped by a signal", code) if code > 128 else ("has ended before the others", code or 1)
    stated = exit_code_of(error)
    if stated is None and _is_of_a_collective(error):
        return f"a collective between the ranks failed ({line_of(error)[:200]}): is a rank stuck, or slower than the " \
               "others by more than rank_timeout_seconds?", 3  # fmt: skip
    return line_of(error), 1 if stated is None else stated


def _is_of_a_collective(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and exit_code_of(error) is None and bool(_OF_A_COLLECTIVE.search(str(error)))
