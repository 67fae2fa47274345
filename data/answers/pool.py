"""A pool of processes for symbolic work and patterns, with a deadline that really kills.

The deadline is processor time of the worker, which on a machine at rest is wall clock; where others keep the processor
from a worker, or all workers are taken, it comes later, so that load turns no answer into an unparseable one.

Usable from any thread and from asyncio alike (no signals, no event loop). A worker that misses its deadline,
dies of memory or hangs is killed by the process it was forked from and replaced by a fresh fork; the caller
gets a verdict in any case. Nothing is started before the first call.
"""

import atexit
import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import LifoQueue
from typing import Any

import espalier

_ROOT = Path(espalier.__file__).resolve().parent.parent
NOT_EQUAL = "not equal by math-verify"
_START_SECONDS = 120.0
_FORK_SECONDS = 30.0
_PATIENCE = 6.0  # deadlines that may pass on the clock while a worker has no processor time at all
_GRAIN_SECONDS = 0.03  # what the kernel counts of a process is this coarse
_TICKS = os.sysconf("SC_CLK_TCK")
_STILLBORN_SECONDS = 0.05


class PoolBroken(RuntimeError):
    """The symbolic workers cannot be started; the message says why."""

    exit_code = 2


def _processor_seconds(pid: int) -> float:
    """Return processor time a process has had; infinite where it is gone or stopped, and will get none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return float("inf")
    if fields[0] in "TtZX":
        return float("inf")
    return (int(fields[11]) + int(fields[12])) / _TICKS


@dataclass
class Budget:
    """What is left of the processor time for one answer, in seconds, over all that workers are asked about it."""

    seconds: float


@dataclass
class _Worker:
    """One worker: its process id and our end of its socket."""

    pid: int
    connection: socket.socket


@dataclass
class SymbolicPool:
    """`num_workers` processes; `seconds` of a worker's processor are the deadline of one comparison."""

    num_workers: int = 8
    seconds: float = 0.85
    _control: socket.socket | None = None
    _process: "subprocess.Popen[bytes] | None" = None
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _free: "LifoQueue[_Worker | None]" = field(default_factory=LifoQueue)
    _owner: int = 0

    def __post_init__(self) -> None:
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """In a fork: the lock may be held by a thread that is not here, and the sockets are the parent's; held
        open here, they would keep the workers alive after it."""
        if self._control is not None:
            self._control.close()
        while self._free.queue:
            worker = self._free.queue.pop()
            if worker is not None:
                worker.connection.close()
        self._lock, self._free = threading.RLock(), LifoQueue()
        self._control = self._process = None

    def _ask(self, command: str, descriptor: int | None = None) -> str:
        """Send one command to the forking process, get one line back. Raises OSError where it is gone."""
        assert self._control is not None
        if descriptor is None:
            self._control.sendall(command.encode())
        else:
            socket.send_fds(self._control, [command.encode()], [descriptor])
        answer = b""
        while not answer.endswith(b"\n"):
            piece = self._control.recv(64)
            if not piece:
                raise OSError("the forking process has ended")
            answer += piece
        return answer.decode().strip()

    def start(self) -> None:
        """Start the forking process and wait until it is warm; do nothing where it runs.

        Raises PoolBroken where it does not start.
        """
        with self._lock:
            if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
                return
            self._free = LifoQueue()
            for _ in range(self.num_workers):
                self._free.put(None)
            ours, theirs = socket.socketpair()
            environment = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
            environment.pop("LD_PRELOAD", None)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "espalier.data.answers.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=environment,
                cwd=_ROOT,
                start_new_session=True,
            )
            theirs.close()
            self._owner = os.getpid()
            self._control = ours
            ours.settimeout(_START_SECONDS)
            atexit.register(self.stop)
            try:
                if ours.recv(64) != b"ready\n":
                    raise OSError("no answer")
            except OSError as error:
                self._process.kill()
                said = (self._process.stderr.read() if self._process.stderr else b"").decode(errors="replace")
                last = said.strip().split("\n")[-1] if said.strip() else str(error)
                raise PoolBroken(f"the symbolic grader does not start: {last}") from None
            ours.settimeout(_FORK_SECONDS)

    def _fork(self) -> _Worker:
        with self._lock:
            self.start()
            ours, theirs = socket.socketpair()
            try:
                pid = int(self._ask("fork", theirs.fileno()))
            except (OSError, ValueError):
                self._abandon()
                self.start()
                pid = int(self._ask("fork", theirs.fileno()))
            finally:
                theirs.close()
            return _Worker(pid, ours)

    def _kill(self, worker: _Worker) -> None:
        worker.connection.close()
        with self._lock:
            try:
                self._ask(f"kill {worker.pid}")
            except (OSError, ValueError):
                self._abandon()

    def _abandon(self) -> None:
        """Give up a forking process that does not answer; its workers die with it."""
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.wait(10)
        self._process = None

    def compare(
        self, gold: str, answer: str, forms: list[tuple[bool, bool]], budget: Budget | None = None
    ) -> tuple[str, str]:
        """Return (verdict, reason) of `symbolic.compare`; "unparseable" where the deadline passes or the worker dies.

        `budget` replaces the pool's own deadline; what the worker used is taken from it.
        """
        request = {"gold": gold, "answer": answer, "forms": forms}
        answered = self._ask_worker(request, budget or Budget(self.seconds))
        if answered is None:
            return "unparseable", f"no verdict within {self.seconds:g} s, or out of memory"
        return answered["verdict"], answered["reason"]

    def matches(self, pattern: str, text: str) -> bool | None:
        """Say whether a regular expression (`.` is any character) matches a text from its beginning; None where the
        deadline passes: some patterns take years on some texts, and Python cannot stop one in its own process."""
        answered = self._ask_worker({"pattern": pattern, "text": text}, Budget(self.seconds))
        return None if answered is None or answered["verdict"] == "unparseable" else answered["verdict"] == "right"

    def _ask_worker(self, request: dict[str, Any], budget: Budget) -> dict[str, Any] | None:
        """Return what a worker answers; None where the deadline passes or the worker dies."""
        self.start()
        free = self._free
        worker = free.get()
        try:
            if worker is None:
                worker = self._fork()
            started = time.monotonic()
            answered = self._exchange(worker, request, budget)
            if answered is None and time.monotonic() - started < _STILLBORN_SECONDS:
                worker.connection.close()  # it was dead before it was asked: that is not this answer's doing
                worker = self._fork()
                answered = self._exchange(worker, request, budget)
            if answered is None:
                # its memory can take long to give back: nobody waits for that
                threading.Thread(target=self._kill, args=(worker,), daemon=True).start()
                worker = None
                return None
            if answered["is_last"]:
                worker.connection.close()
                worker = None
            return answered
        finally:
            free.put(worker)

    def _exchange(self, worker: _Worker, request: dict[str, Any], budget: Budget) -> dict[str, Any] | None:
        started, before = time.monotonic(), _processor_seconds(worker.pid)
        last_ran, last = started, before
        seconds = left = max(budget.seconds, _GRAIN_SECONDS)
        try:
            worker.connection.settimeout(seconds)
            worker.connection.sendall(json.dumps(request).encode() + b"\n")
            answer = b""
            while not answer.endswith(b"\n"):
                worker.connection.settimeout(left)
                try:
                    piece = worker.connection.recv(65536)
                except TimeoutError:
                    now, had = time.monotonic(), _processor_seconds(worker.pid)
                    last_ran, last, left = now if had > last else last_ran, had, seconds - (had - before)
                    is_hung = now - last_ran > _PATIENCE * seconds
                    if is_hung or not left >= _GRAIN_SECONDS:  # nan: it was stopped before it was asked
                        return None
                    continue
                if not piece:
                    return None
                answer += piece
        except OSError:
            return None
        finally:
            used = _processor_seconds(worker.pid) - before
            budget.seconds -= used if math.isfinite(used) else time.monotonic() - started
        answered: dict[str, Any] = json.loads(answer)
        return answered

    def stop(self) -> None:
        """End all processes; the pool starts anew when it is asked again."""
        if self._owner != os.getpid():
            return
        with self._lock, suppress(OSError):
            if self._control is not None:
                self._control.close()
                self._control = None
            if self._process is not None:
                try:
                    self._process.wait(2)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait(10)
                if self._process.stderr is not None:
                    self._process.stderr.close()
            self._process = None


# More workers than cores: where some hang, the others need not wait for them, and an idle one costs a few MiB.
POOL = SymbolicPool(num_workers=max(8, os.cpu_count() or 1))
