"""Two launchers, as on two machines, whose ranks end at different times: one failure is one start more on both."""

import os
import socket
from pathlib import Path

import pytest
import torch.distributed  # noqa: F401, loaded before the fork

from benchmarks.processes.forked import exit_code, start_program

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


@pytest.mark.slow
@pytest.mark.parametrize("late", ["none", "0", "1"])
def test_a_failure_is_one_start_more_on_every_machine_whichever_notices_it_first(late: str, tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = []
    for machine in range(2):
        place = [f"--node_rank={machine}", "--master_addr=127.0.0.1", f"--master_port={port}"]
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
