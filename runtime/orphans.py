"""A watcher that ends what a process has started and left behind: vLLM's own processes do not notice that the one which
asked for them was killed (kill -9, the kernel short of memory), and keep their memory, a GPU's too.

It is a process of its own that reads /proc, written with the standard library alone, and started by its file: it must
cost nothing and outlive the process it watches.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

POLL_SECONDS = 0.5
STARTS_SECONDS = 120.0  # in which it looks at every poll for what is started, and every LATER_SECONDS from then on
LATER_SECONDS = 10.0
GRACE_SECONDS = 5.0
_WATCHERS: dict[int, "subprocess.Popen[bytes]"] = {}  # by the process that they watch


def end_children_left_behind() -> None:
    """Start the watcher of this process, which has at most one: once it is gone, however that came, whatever it has
    started since the watch began, and whatever that started, gets SIGTERM, and SIGKILL five seconds later. Does nothing
    where there is no /proc."""
    owner = os.getpid()  # a fork of a process that is watched is not
    if owner not in _WATCHERS and Path("/proc/self/stat").is_file():
        command = [sys.executable, "-I", "-S", __file__, str(owner)]
        nowhere = subprocess.DEVNULL
        _WATCHERS[owner] = subprocess.Popen(
            command, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True
        )


def _running(pid: int) -> tuple[int, str] | None:
    """Return (parent, when it began, in the kernel's ticks) of a process; None where it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[1]), fields[19]) if fields[0] != "Z" else None


def _processes() -> dict[int, tuple[int, str]]:
    """Return pid → (parent, when it began) of all that run."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return {pid: found for pid in pids if (found := _running(pid)) is not None}


def _descendants(owner: int, processes: dict[int, tuple[int, str]]) -> dict[int, str]:
    """Return pid → when it began, of all that the owner and its children have started, but for this process."""
    below, found = {owner}, dict[int, str]()
    while new := {pid for pid, (parent, _) in processes.items() if parent in below and pid not in below}:
        below |= new
        found |= {pid: processes[pid][1] for pid in new}
    found.pop(os.getpid(), None)
    return found


def watch(owner: int) -> None:
    """Wait until the owner, which must be this process's parent, is gone; then end what it has left."""
    before = set(_descendants(owner, _processes()).items())
    left: set[tuple[int, str]] = set()
    since = looked = time.monotonic()
    while os.getppid() == owner:
        now = time.monotonic()
        if now - since < STARTS_SECONDS or now - looked > LATER_SECONDS:  # to read /proc costs most where much runs
            left = set(_descendants(owner, _processes()).items()) - before | {one for one in left if _runs(*one)}
            looked = now
        time.sleep(POLL_SECONDS)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid, began in left:
            if _runs(pid, began):
                with suppress(OSError):
                    os.kill(pid, number)
        deadline = time.monotonic() + GRACE_SECONDS
        while any(_runs(*one) for one in left) and time.monotonic() < deadline:
            time.sleep(0.1)


def _runs(pid: int, began: str) -> bool:
    """Say whether the process that began then runs: another one may have its number by now."""
    found = _running(pid)
    return found is not None and found[1] == began


if __name__ == "__main__":
    watch(int(sys.argv[1]))
