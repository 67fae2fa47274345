"""A Ray cluster of one node in processes of its own, as `ray start --head` makes it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

_START_SECONDS = 90.0


def free_port() -> int:
    """Return one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Head:
    """Of a node with two cores, at that port, with these variables in place of any of Ray's own."""

    def __init__(self, port: int, log: Path, variables: Mapping[str, str]):
        self.address, self.port = f"127.0.0.1:{port}", port
        here = ["--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=2"]
        plain = ["--block", "--include-dashboard=false", "--disable-usage-stats"]
        command = [str(Path(sys.executable).parent / "ray"), "start", "--head", *here, *plain]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment |= variables
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
        end = time.monotonic() + _START_SECONDS
        while "Ray runtime started" not in log.read_text():
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)

    def end(self) -> None:
        """Leave nothing of it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
