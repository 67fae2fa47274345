"""Runs a hostile program against its tests and looks for what it left: files, processes, connections, time."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.grading.hostile_programs import SECRET, HostileProgram
from espalier.data.verifiers.verify import Check, verify, write_checks

MAX_SECONDS = 25.0


@dataclass(frozen=True)
class Escape:
    """What a program did that it must not have: empty where it is contained."""

    found: list[str]
    score: float
    seconds: float


class Surroundings:
    """What programs are let loose beside: a secret, a place where nothing may appear, a listener, a process."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hostile-"))
        self.secret, self.mark, self.scratch = (self.folder / name for name in ("secret", "mark", "tmp"))
        self.scratch.mkdir()
        self.tempdir, tempfile.tempdir = tempfile.tempdir, str(self.scratch)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        os.environ["HOSTILE_SECRET"] = SECRET

    def close(self) -> None:
        """Take all of it away."""
        os.environ.pop("HOSTILE_SECRET", None)
        tempfile.tempdir = self.tempdir
        self.victim.kill()
        self.victim.wait()
        self.listener.close()
        shutil.rmtree(self.folder)

    def program(self, case: HostileProgram) -> str:
        """Return the text of a program with the names of what is here; the secret is in its place again."""
        self.secret.write_text(SECRET)
        names = {"@SECRET@": self.secret, "@MARK@": self.mark, "@PORT@": self.listener.getsockname()[1],
                 "@PID@": self.victim.pid, "@TMP@": self.scratch}  # fmt: skip
        program = case.program
        for name, value in names.items():
            program = program.replace(name, str(value))
        return program

    def run(self, case: HostileProgram) -> Escape:
        """Grade a program in the sandbox."""
        program = self.program(case)
        gold = write_checks([Check("code", {"tests": case.tests, "seconds": 0.5})])
        started = time.monotonic()
        (verdict,) = verify(f"```python\n{program}\n```", gold)
        seconds = time.monotonic() - started
        return Escape(self.traces(verdict.result.score, seconds), verdict.result.score, seconds)

    def traces(self, score: float = 0.0, seconds: float = 0.0) -> list[str]:
        """Return the signs of an escape that are here now."""
        try:
            self.listener.accept()
            is_connected = True
        except BlockingIOError:
            is_connected = False
        is_changed = not self.secret.is_file() or self.secret.read_text() != SECRET
        signs = {
            "graded right": score > 0,
            "wrote a file": self.mark.exists(),
            "changed a file": is_changed or os.stat(self.secret).st_mode & 0o777 == 0,
            "connected": is_connected,
            "killed another process": self.victim.poll() is not None or _state(self.victim.pid) in "TtZ",
            "left a process": bool(left_processes(str(self.scratch))),
            "left a folder": bool(list(self.scratch.iterdir())),
            "hung": seconds > MAX_SECONDS,
        }
        return [name for name, is_there in signs.items() if is_there]


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def left_processes(scratch: str) -> list[int]:
    """Return the sandbox's processes below a folder of scratch folders; none should be there between two programs."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if os.fsencode(scratch) in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found
