"""How programs of one pipeline live and die together: a lock on what is written, and an owner to die with.

A script exports its process id in ESPALIER_OWNER. When that process is gone, even by kill -9, every program
it started stops as by SIGTERM, so that a second run from the top never meets a first one's leftovers.
"""

import ctypes
import fcntl
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OWNER_VARIABLE = "ESPALIER_OWNER"
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded here: between fork and exec it could deadlock
REPEAT_SECONDS = 2.0  # signals that follow one another within these are one: of a launcher and of a scheduler


class Busy(RuntimeError):
    """Another process writes the same output."""

    exit_code = 2


@contextmanager
def exclusive(output: Path, wait_seconds: float = 60.0) -> Iterator[None]:
    """Hold `output`'s lock for the length of the block; the lock ends with the process that holds it.

    Waits for another holder (one that is just being stopped). Raises Busy where that holds it after `wait_seconds`.
    """
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
