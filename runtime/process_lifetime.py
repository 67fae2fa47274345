"""How programs of one pipeline live and die together: a lock on what is written, and an owner to die with.

A script exports its process id in ESPALIER_OWNER. When that process is gone, even by kill -9, every program
it started stops as by SIGTERM, so that a second run from the top never meets a first one's leftovers.
"""

import ctypes
import fcntl
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from espalier.runtime.ranks import STARTED_AGAIN

OWNER_VARIABLE = "ESPALIER_OWNER"
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded here: between fork and exec it could deadlock
_WAIT_SECONDS = 60.0
_WAIT_AGAIN_SECONDS = 300.0  # for a rank of before that still saves
REPEAT_SECONDS = 2.0  # signals that follow one another within these are one: of a launcher and of a scheduler


class Busy(RuntimeError):
    """Another process writes the same output."""

    exit_code = 2


@contextmanager
def exclusive(output: Path, wait_seconds: float | None = None) -> Iterator[None]:
    """Hold `output`'s lock for the length of the block; the lock ends with the process that holds it.

    Waits for another holder (one that is just being stopped; null: a minute, five where the run was started again and
    ranks of before may still save). Raises Busy where that holds it after `wait_seconds`.
    """
    if wait_seconds is None:
        wait_seconds = _WAIT_AGAIN_SECONDS if os.environ.get(STARTED_AGAIN) else _WAIT_SECONDS
    output.parent.mkdir(parents=True, exist_ok=True)
    path = output.with_name(f".{output.name}.lock")
    deadline = time.monotonic() + wait_seconds
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Busy(f"{output} is being written by another process: wait for it, or stop it") from None
                time.sleep(0.2)
        yield


def is_running(pid: int) -> bool:
    """Say whether the process exists and is not a zombie (killed, but not yet reaped by its parent)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def die_with_parent() -> None:
    """To be called in a child, before the program starts: SIGTERM to it when the thread that started it is gone."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class _Unread(io.FileIO):
    """A stream that forgets what is written once nobody can read it any more."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            return len(memoryview(data).cast("B"))


def outlive_reader() -> None:
    """Have this process go on, and save, where who reads what it prints is gone: no print fails from then on."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw = io.BufferedWriter(_Unread(number, "wb", closefd=False))
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        setattr(sys, name, stream)


def die_with_owner(poll_seconds: float = 0.5) -> None:
    """Watch the process named by ESPALIER_OWNER, if any, and stop this one when it is gone."""
    owner = os.environ.get(OWNER_VARIABLE, "")
    if not owner.isdigit():
        return

    def watch() -> None:
        while is_running(int(owner)):
            time.sleep(poll_seconds)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20.0)
        os._exit(143)

    threading.Thread(target=watch, name="owner-watch", daemon=True).start()
