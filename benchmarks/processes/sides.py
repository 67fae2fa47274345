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

    def stop(self) -> None:
        """End its process group."""
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        self.process.wait(60)


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
