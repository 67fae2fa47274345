"""What a killed process has started ends too; what another one started, or it started itself before, does not."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from espalier.runtime.process_lifetime import is_running

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import subprocess, sys, time
from espalier.runtime.orphans import end_children_left_behind
sleep = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]
before = subprocess.Popen(sleep, start_new_session=True)
end_children_left_behind()
time.sleep(1.5)
code = f"import subprocess, time; print(subprocess.Popen({sleep!r}).pid, flush=True); time.sleep(600)"
child = [sys.executable, "-c", code]
after = subprocess.Popen(child, start_new_session=True, stdout=subprocess.PIPE, text=True)
print(before.pid, after.pid, after.stdout.readline().strip(), flush=True)
time.sleep(1.5)
print("ready", flush=True)
time.sleep(600 if sys.argv[1] == "waits" else 0)
"""


@pytest.mark.parametrize("how", ["waits", "ends"])
def test_what_a_process_has_started_ends_with_it(how: str) -> None:
    """By kill -9 and by itself; a child that does not listen to SIGTERM, and what a child has started."""
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, how], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    before, after, below = map(int, process.stdout.readline().split())
    try:
        assert process.stdout.readline() == "ready\n"
        if how == "waits":
            assert is_running(after)
            assert is_running(below)
            process.kill()
        process.wait(timeout=20)
        deadline = time.monotonic() + 20
        while (is_running(after) or is_running(below)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not is_running(after)
        assert not is_running(below)
        assert is_running(before), "of before the watch"
    finally:
        process.kill()
        for pid in (before, after, below):
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
