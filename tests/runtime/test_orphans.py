"""What a killed process has started ends too; what another one started, or it started itself before, does not."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from espalier.runtime.orphans import _descendants, _processes
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


@pytest.mark.parametrize("how", ["waits", pytest.param("ends", marks=pytest.mark.slow)])
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


ENGINE = """
import asyncio, sys, time
from espalier.sampling.offline_client import OfflineClient

if __name__ == "__main__":
    client = OfflineClient(sys.argv[1], max_model_len=64)
    asyncio.run(client.open())
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_the_processes_of_a_real_engine_end_with_a_killed_program(tiny_policy: Path, tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(ENGINE)
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "engine.py"), str(tiny_policy)]
    process = subprocess.Popen(
        command, cwd=ROOT, env=path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    assert any(line == "ready\n" for line in process.stdout), "the engine did not start"
    started = {pid for pid in _descendants(process.pid, _processes()) if "VLLM" in name_of(pid)}
    assert started
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while any(map(is_running, started)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_running, started))


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text()
