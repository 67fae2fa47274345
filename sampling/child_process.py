"""A program of our own in a session of its own, its output in a log.

It dies with the process that started it, even when that is killed with -9 (Linux parent-death signal), so nothing is
left behind.
"""

import atexit
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import espalier
from espalier.runtime.process_lifetime import die_with_parent
from espalier.sampling.client import ServerGone

_ROOT = str(Path(espalier.__file__).resolve().parent.parent)
_ERROR = re.compile(r"\w+(?:Error|Exception): (?!.*Consider increasing with ulimit).+(?:\n  .+)?")
# What a library says of itself at every end of vLLM, after the lines that matter.
_NOISE = re.compile(r"^nanobind: .*\n|^ - (?:leaked|\.\.\. skipped).*\n|^See https://nanobind.*\n?", re.MULTILINE)


class CannotStart(RuntimeError):
    """A program of ours cannot be started; the message says why and where the log is."""

    exit_code = 3


def engine_environment(kv_cache_gib: int, devices: str = "") -> dict[str, str]:
    """Of a program with a vLLM engine: quiet, offline-friendly, CPU cache size; it sees the GPUs `devices` ("0,1";
    empty: all) and is no rank of this program's."""
    environment = dict(os.environ)
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", str(kv_cache_gib))
    environment.update(VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", TOKENIZERS_PARALLELISM="false")
    # the engine may load a part of ours: sampling.partial_block_cache
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [_ROOT, environment.get("PYTHONPATH", "")]))
    if devices:
        environment["CUDA_VISIBLE_DEVICES"] = devices
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    return environment


def numbered(path: Path, number: int) -> Path:
    """Return `run-1.log` for `run.log`."""
    return path.with_name(f"{path.stem}-{number}{path.suffix}")


def group_members(group: int) -> list[int]:
    """Return the running processes of a process group (zombies, which hold nothing any more, left out)."""
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, process_group = path.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(process_group) == group and state != "Z":
            members.append(int(path.parent.name))
    return members


class ChildProcess:
    """`name` is what it is called where it died ("the vLLM server")."""

    def __init__(self, name: str, log: str):
        self.name = name
        self.log = Path(log)
        self.process: subprocess.Popen[bytes] | None = None

    def begin(self, command: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int] = ()) -> None:
        """Start it; `descriptors` stay open in it, under their numbers."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=die_with_parent,
                pass_fds=descriptors,
            )
        atexit.register(self.stop)

    def is_alive(self) -> bool:
        """Say whether the process runs."""
        return self.process is not None and self.process.poll() is None

    def tail(self, lines: int = 12) -> str:
        """Return the last lines of its log."""
        try:
            text = self.log.read_text(errors="replace")
        except OSError:
            return "(no log)"
        cleaned = _NOISE.sub("", text + "\n").rstrip()
        return "\n".join("  | " + line for line in cleaned.split("\n")[-lines:])

    def first_error(self) -> str:
        """Return the first exception its log names: the last lines seldom hold the cause."""
        try:
            match = _ERROR.search(self.log.read_text(errors="replace"))
        except OSError:
            return ""
        return f": {match.group()}" if match else ""

    def death_message(self) -> str:
        """Say why there is none, with the log's first error and its last lines."""
        code = self.process.returncode if self.process is not None else None
        died = f"{self.name} died (exit code {code}){self.first_error()}"
        return f"{died}\nthe end of {self.log}:\n{self.tail()}"

    def check(self) -> None:
        """Raise ServerGone where the process has ended."""
        if not self.is_alive():
            raise ServerGone(self.death_message())

    def stop(self, grace_seconds: float = 15.0) -> None:
        """SIGTERM to its session, then SIGKILL after `grace_seconds`; returns when no process of it runs."""
        if self.process is None:
            return
        group = self.process.pid
        for number, seconds in ((signal.SIGTERM, grace_seconds), (signal.SIGKILL, 10.0)):
            try:
                os.killpg(group, number)
            except ProcessLookupError:
                break
            deadline = time.monotonic() + seconds
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                continue
            # the engine's own processes outlive the one we started by a moment
            while number == signal.SIGKILL and group_members(group) and time.monotonic() < deadline:
                time.sleep(0.02)
        self.process = None
        atexit.unregister(self.stop)
