"""One writer an output, and programs that stop when the script that started them is gone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from espalier.runtime import process_lifetime
from espalier.runtime.process_lifetime import Busy, exclusive, is_running
from espalier.runtime.ranks import STARTED_AGAIN

HOLD = "import sys, time, pathlib\nfrom espalier.runtime.process_lifetime import exclusive\n"
HOLD += "with exclusive(pathlib.Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)\n"
WATCHED = "import time\nfrom espalier.runtime.process_lifetime import die_with_owner\n"
WATCHED += "die_with_owner(0.1)\nprint('up', flush=True)\ntime.sleep(60)\n"


def test_a_second_writer_waits_and_is_then_refused(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "x.jsonl")], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with (
        pytest.raises(Busy, match=r"x\.jsonl is being written by another process"),
        exclusive(tmp_path / "x.jsonl", 0.3),
    ):
        pass
    holder.kill()
    holder.wait()
    with exclusive(tmp_path / "x.jsonl", 5.0):
        pass


def test_a_run_that_is_started_again_waits_longer_for_the_ranks_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank whose node is out of reach may still save."""
    monkeypatch.setattr(process_lifetime, "_WAIT_SECONDS", 0.1)
    monkeypatch.setenv(STARTED_AGAIN, "1")
    command = [sys.executable, "-c", HOLD.replace("sleep(60)", "sleep(1)"), str(tmp_path / "x")]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with exclusive(tmp_path / "x"):
        assert holder.wait(20) == 0


def test_a_program_stops_when_its_owner_is_killed() -> None:
    owner = subprocess.Popen(["sleep", "60"])
    environment = {**os.environ, "ESPALIER_OWNER": str(owner.pid)}
    program = subprocess.Popen([sys.executable, "-c", WATCHED], stdout=subprocess.PIPE, env=environment)
    assert program.stdout is not None
    assert program.stdout.readline() == b"up\n"
    owner.kill()  # not reaped yet: a zombie counts as gone
    assert program.wait(10) == -signal.SIGTERM
    owner.wait()


def test_a_process_that_ended_is_not_running() -> None:
    process = subprocess.Popen(["true"])
    time.sleep(0.2)
    assert not is_running(process.pid)
    process.wait()
    assert is_running(os.getpid())
