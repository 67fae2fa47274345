"""Sides of a side-by-side benchmark: a process and session for each, which does one round whenever it is asked.

Every side lives through the whole run, warm, and rests while another one works. Talk is one JSON object a line on
its standard input, and one line `result {...}` on its standard output for each; what else a side prints is let pass.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


class Side:
    """A side in a process and session of its own, as its users run it: a client that shares a process group
    with a busy engine is starved by the kernel's group scheduling."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None):
        pipe = subprocess.PIPE
        surroundings = {**os.environ, **(environment or {})}
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, start_new_session=True, env=surroundings
        )

    def ask(self, question: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Run one round. Raises RuntimeError where the side has ended instead of answering."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(question or {}) + "\n")
            self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("result "):
                return json.loads(line.removeprefix("result "))
        raise RuntimeError(f"a side of the benchmark ended with exit code {self.process.wait()}")

    def cpu_seconds(self) -> float:
        """Return seconds of CPU that it has used with the processes that it started, of those that live."""
        return sum(cpu_seconds(pid) for pid in with_children(self.process.pid))

    def peak_bytes(self) -> int:
        """Return the sum of the most that it and each process that it started have been resident with."""
        return sum(peak_rss(pid) for pid in with_children(self.process.pid))

    def stop(self) -> None:
        """End its process group."""
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        self.process.wait(60)


def with_children(pid: int) -> list[int]:
    """Return the process and all below it, those in sessions of their own too."""
    found = [pid]
    with suppress(FileNotFoundError, ProcessLookupError):  # one that has just ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                found += with_children(int(child))
    return found


def cpu_seconds(pid: int) -> float:
    """Return seconds of CPU that a process has used, in all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def status_bytes(name: str, pid: int | str = "self") -> int:
    """Return a size of /proc's account of a process, in bytes."""
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(rows[name].split()[0]) * 1024


def peak_rss(pid: int | str = "self") -> int:
    """Return the most that a process has been resident with, in bytes (since `reset_peak_rss`, if that was called)."""
    return status_bytes("VmHWM", pid)


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The child's loop: one round for each line of standard input."""
    for line in sys.stdin:
        print("result " + json.dumps(answer(json.loads(line))), flush=True)


def load_before() -> float:
    """Return the machine's load now; says so where it spoils what is about to be measured."""
    load = os.getloadavg()[0]
    if load > 0.3:
        print(f"warning: the machine is busy (load {load:.1f}): the figures will not be worth much", file=sys.stderr)
    return round(load, 2)
