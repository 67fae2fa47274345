"""A Ray cluster of one node in processes of its own, whose head can be lost; no program of the tests is in it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from espalier.runtime.ray_cluster import answers

_START_SECONDS = 90.0


def free_port() -> int:
    """Return one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Head:
    """Of a node with two cores, at that port. `home` has the token that it asks for; without one it asks for none."""

    def __init__(self, port: int, log: Path, home: Path | None = None):
        self.address, self.port = f"127.0.0.1:{port}", port
        here = ["--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=2"]
        plain = ["--block", "--include-dashboard=false", "--disable-usage-stats"]
        command = [str(Path(sys.executable).parent / "ray"), "start", "--head", *here, *plain]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment["RAY_gcs_rpc_server_reconnect_timeout_s"] = "20"  # the node ends soon behind its head
        environment |= {"HOME": str(home)} if home else {"RAY_AUTH_MODE": "disabled"}
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
        end = time.monotonic() + _START_SECONDS
        while not (answers(self.address) and "Ray runtime started" in log.read_text()):
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)

    def lose(self) -> None:
        """Kill the one process of it that a cluster cannot do without."""
        (number,) = filter(self._is_head, Path("/proc").glob("[0-9]*"))
        os.kill(int(number.name), signal.SIGKILL)

    def _is_head(self, process: Path) -> bool:
        try:
            words = (process / "cmdline").read_bytes()
        except OSError:
            return False
        return b"gcs_server" in words.split(b"\0")[0] and f"--gcs_server_port={self.port}".encode() in words

    def end(self) -> None:
        """Leave nothing of it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
