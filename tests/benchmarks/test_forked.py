"""Forked children of a benchmark end with it."""

import os
import signal
import time

from benchmarks.processes.forked import exit_code, start
from espalier.runtime.process_lifetime import is_running


def test_a_child_ends_with_a_benchmark_that_is_killed() -> None:
    read, write = os.pipe()

    def benchmark() -> None:
        os.write(write, f"{start(lambda: time.sleep(60))}\n".encode())
        time.sleep(60)

    parent = start(benchmark)
    child = int(os.read(read, 20))
    os.kill(parent, signal.SIGKILL)
    assert exit_code(parent) == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)
