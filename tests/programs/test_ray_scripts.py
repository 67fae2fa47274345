"""scripts/ray_ssh.sh and ray_slurm.sh: a cluster of two nodes (of this machine, over a stand-in for ssh and srun), a
program on it, its exit code and its signals. Nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.ray_head import free_port

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = """
import signal, sys, time
import ray
def stop(number, frame):
    print("saved", flush=True)
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, stop)
ray.init(address="auto", logging_level="ERROR")
signal.signal(signal.SIGTERM, stop)
print("nodes", len([node for node in ray.nodes() if node["Alive"]]), flush=True)
time.sleep(float(sys.argv[1]))
sys.exit(5)
"""
SSH = '#!/usr/bin/env bash\nshift\nexec bash -c "$1"\n'
SRUN = '#!/usr/bin/env bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n'
SCONTROL = '#!/usr/bin/env bash\n[[ $1 == show ]] && printf "127.0.0.1\\n127.0.0.1\\n" || echo "$@" >>"$0.log"\n'


def hear_signals() -> None:
    """A shell cannot trap what was ignored when it began, as behind nohup."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)


def begin(folder: Path, command: list[str], **variables: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    for name, text in (("ssh", SSH), ("srun", SRUN), ("scontrol", SCONTROL), ("program.py", PROGRAM)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "scripts").symlink_to(ROOT / "scripts")
    (folder / ".venv").symlink_to(Path(sys.prefix))
    environment |= {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        ["bash", *command], cwd=folder, env=environment | variables, stdout=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=hear_signals,
    )  # fmt: skip


def wait_for_line(process: subprocess.Popen[str], begins: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(begins):
            return line.strip()
    raise AssertionError(f"ended with {process.wait()} before it said '{begins}'")


def left(folder: Path) -> list[str]:
    """What of it still runs, after a while."""
    end = time.monotonic() + 30
    while True:
        rows = subprocess.run(["ps", "-ww", "-eo", "args="], capture_output=True, text=True).stdout.splitlines()
        found = [row for row in rows if "ray_node.sh" in row or str(folder) in row]
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, signal.SIGTERM, signal.SIGINT])
def test_a_program_on_machines_over_ssh_gets_signals_and_gives_its_exit_code(number: int, tmp_path: Path) -> None:
    command = ["scripts/ray_ssh.sh", "127.0.0.1 127.0.0.1", "program.py", "100" if number else "0"]
    port = str(free_port())
    process = begin(tmp_path, command, PORT=port, TMPDIR="/tmp", REMOTE_SHELL=str(tmp_path / "ssh"))
    assert wait_for_line(process, "nodes") == "nodes 2"
    if number:
        os.kill(process.pid, number)
        wait_for_line(process, "saved")
    assert process.wait(60) == (143 if number else 5)
    assert left(tmp_path) == []
    assert not list(Path("/tmp").glob(f"espalier-ray-*-{port}.pid"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, signal.SIGTERM, signal.SIGUSR1])
def test_a_slurm_job_saves_before_its_time_is_up_and_is_put_into_the_queue_again(number: int, tmp_path: Path) -> None:
    """SIGUSR1 is that of the time limit; SIGTERM somebody's wish to end it."""
    job = str(free_port() % 10000)
    variables = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "two"}
    process = begin(tmp_path, ["scripts/ray_slurm.sh", "program.py", "100" if number else "0"], **variables)
    assert wait_for_line(process, "nodes") == "nodes 2"
    if number:
        os.kill(process.pid, number)
        wait_for_line(process, "saved")
    assert process.wait(60) == (143 if number else 5)
    log = tmp_path / "scontrol.log"
    said = log.read_text() if log.is_file() else ""
    assert said == (f"requeue {job}\n" if number == signal.SIGUSR1 else "")
    assert left(tmp_path) == []


@pytest.mark.slow
def test_a_node_that_cannot_come_ends_the_program_with_a_line(tmp_path: Path) -> None:
    """Its machine's Ray never starts."""
    words = "from espalier.runtime.ray_cluster import await_nodes; raise SystemExit(await_nodes('127.0.0.1:1', 2, 3))"
    run = subprocess.run([sys.executable, "-c", words], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert run.returncode == 3
    assert "after 3 s: client.address=127.0.0.1:1 cannot be had" in run.stderr


def test_a_signal_that_comes_before_the_command_is_not_forgotten() -> None:
    lines = "source scripts/signals.sh; kill -TERM $$; run sleep 30; echo $? $stopped"
    run = subprocess.run(
        ["bash", "-c", lines], cwd=ROOT, timeout=20, capture_output=True, text=True, preexec_fn=hear_signals
    )
    assert run.stdout.split() == ["143", "TERM"]


@pytest.mark.parametrize(("command", "code"), [
    ("exit 7", 7), ("kill -USR1 $PARENT; sleep 0.5; exit 7", 143), ("trap 'exit 9' TERM; kill -HUP $PARENT; "
     "while true; do sleep 0.1; done", 9), ("trap '' TERM; kill -INT $PARENT; sleep 0.5; exit 7", 7),
])  # fmt: skip
def test_a_command_that_is_run_gets_signals_and_its_exit_code_comes_back(command: str, code: int) -> None:
    lines = f'source scripts/signals.sh; export PARENT=$$; run bash -c "{command.replace("$", chr(92) + "$")}"; exit $?'
    run = subprocess.run(["bash", "-c", lines], cwd=ROOT, timeout=20, preexec_fn=hear_signals)
    assert run.returncode == code
