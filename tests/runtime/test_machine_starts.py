"""Two launchers, as on two machines, whose ranks end at different times: one failure is one start more on both."""

import logging
import os
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed  # noqa: F401, loaded before the fork

from benchmarks.processes.forked import exit_code, start_program
from espalier.runtime import machine_starts
from espalier.runtime.machine_starts import MachinesApart, MachineStarts

CHILD = """
import os, signal, sys, time
from espalier.runtime.company import company
from espalier.runtime.peers import RankFailed
rank, late = os.environ["RANK"], sys.argv[1]
path = os.path.join(os.path.dirname(__file__), f"starts-{rank}")
open(path, "a").write("x")
start = len(open(path).read())
try:
    with company():
        from espalier.runtime.distributed import barrier
        barrier()
        if start == 1 and rank == "1":
            if late == "1":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                raise RuntimeError("lost")
            os.kill(os.getpid(), signal.SIGKILL)
        barrier()
        assert start == int(sys.argv[2]), start
except (RankFailed, RuntimeError):
    if rank == late:
        time.sleep(8)
    sys.exit(3)
"""


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize("late", ["none", "0", "1"])
def test_a_failure_is_one_start_more_on_every_machine_whichever_notices_it_first(
    late: str, free_port: int, tmp_path: Path
) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    pids = []
    for machine in range(2):
        place = [f"--node_rank={machine}", "--master_addr=127.0.0.1", f"--master_port={free_port}"]
        settings = [
            "--nnodes=2",
            *place,
            "--nproc_per_node=1",
            "--max-restarts=1",
            str(tmp_path / "child.py"),
            late,
            "2",
        ]
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
        pids.append(start_program("launch.py", settings, tmp_path / f"log-{machine}", environment))
    codes = [exit_code(pid) for pid in pids]
    said = [(tmp_path / f"log-{machine}").read_text() for machine in range(2)]
    assert codes == [0, 0], said
    assert [text.count("started again (1 of 1)") for text in said] == [1, 1], said
    assert [(tmp_path / f"starts-{rank}").read_text() for rank in range(2)] == ["xx", "xx"], said


def test_a_taken_port_ends_the_machine_of_the_store_at_once() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        started = time.monotonic()
        with pytest.raises(MachinesApart, match=f"127.0.0.1:{port}: "):
            MachineStarts("127.0.0.1", port, holds=True, num_machines=2).next()
    assert time.monotonic() - started < 20


def test_a_machine_that_waits_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, free_port: int
) -> None:
    limits = {"START_SECONDS": 4.0, "_SAY_SECONDS": 0.2, "_REACH": timedelta(seconds=0.3)}
    for name, limit in limits.items():
        monkeypatch.setattr(machine_starts, name, limit)
    with caplog.at_level(logging.WARNING), pytest.raises(MachinesApart):
        MachineStarts("127.0.0.1", free_port, holds=False, num_machines=2).next()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1, said
    assert said[0].startswith(f"waiting for the machine of 127.0.0.1:{free_port}"), said


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_an_ipv6_address_may_stand_in_brackets(free_port: int) -> None:
    assert MachineStarts("[::1]", free_port, holds=True, num_machines=2).next()
