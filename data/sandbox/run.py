"""Runs untrusted programs in confined processes (`confine`) and says what came of it.

    run_script(program, stdin)        its output, as `python program.py < stdin` would print it
    run_tests(program, tests)         one bool per test: an `AssertTest` or a `FunctionCall`

A process is killed at its deadline, when it has more threads, files or output than its limits allow, and with the
program that started it. Scratch folders are removed. Nothing runs where the kernel cannot confine: BadInput with the
remedy, unless ESPALIER_SANDBOX_WITHOUT=landlock says by name that files may be unprotected.
"""

import json
import math
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import espalier
from espalier.data.records import BadInput
from espalier.data.sandbox.called_names import AssertTest
from espalier.data.sandbox.confine import Limits, missing_parts

_ROOT = Path(espalier.__file__).resolve().parent.parent
_WITHOUT = "ESPALIER_SANDBOX_WITHOUT"
_START_SECONDS, _TICK_SECONDS, _END_SECONDS = 60.0, 0.05, 10.0
_MAX_FILES, _PATIENCE = 200, 6.0
_TICKS = os.sysconf("SC_CLK_TCK")
_SLOTS = threading.BoundedSemaphore(max(2, os.cpu_count() or 1))


class SandboxBroken(RuntimeError):
    """The confined process does not start; the message says why. Never a verdict on a program."""

    exit_code = 2


@dataclass(frozen=True)
class FunctionCall:
    """A test by one call: `expected` is JSON, and so are the arguments. `may_be_bare`: the one element of the list
    `expected` is right too."""

    call: str
    args: list[Any]
    expected: Any
    may_be_bare: bool = False


@dataclass(frozen=True)
class ScriptRun:
    """What a program printed; `reason` is empty where it ended by itself with exit code 0. `seconds`: wall clock."""

    output: str
    reason: str
    seconds: float


class _Stopped(Exception):
    """A process was stopped; the message says for what."""


def check_sandbox() -> None:
    """Raise BadInput, with the remedy, where this machine cannot confine a program."""
    allowed = {name for name in os.environ.get(_WITHOUT, "").split(",") if name}
    if allowed - {"landlock"}:
        raise BadInput(f"{_WITHOUT} may name landlock alone, got '{','.join(sorted(allowed))}'")
    lacking = [name for name in missing_parts() if name not in allowed]
    if lacking:
        remedy = "run code verifiers on Linux 5.13 or later, x86-64, with 'landlock' in the kernel's lsm= list"
        waiver = f", or set {_WITHOUT}=landlock to let programs read your files" if lacking == ["landlock"] else ""
        raise BadInput(f"programs cannot be confined here: {' and '.join(lacking)} missing: {remedy}{waiver}")


@dataclass
class _Child:
    """A confined process: `output` is the read end of what it prints."""

    process: "subprocess.Popen[bytes]"
    scratch: Path
    limits: Limits

    @property
    def output(self) -> int:
        """Its file descriptor."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def check(self) -> None:
        """Raise _Stopped where it has more threads or files than it may."""
        with suppress(OSError, ValueError, IndexError):
            status = Path(f"/proc/{self.process.pid}/status").read_text()
            if int(status.split("\nThreads:")[1].split()[0]) > self.limits.threads:
                raise _Stopped(f"more than {self.limits.threads} threads")
        entries = list(os.scandir(self.scratch))
        with suppress(OSError):
            size = sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
            if len(entries) > _MAX_FILES or size > 2 * self.limits.file_bytes:
                raise _Stopped("more files than it may write")

    def end(self) -> int:
        """Kill it; return its exit code."""
        with suppress(OSError):
            self.process.kill()
        code = self.process.wait(_END_SECONDS)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        return code


@contextmanager
def _child(
    role: str, files: dict[str, str], limits: Limits, stdin: Any = subprocess.DEVNULL, pipes: Sequence[int] = (-1, -1)
) -> Iterator[_Child]:
    """Start a process of `child.py` with these files in its scratch folder; it is confined when this returns."""
    check_sandbox()
    scratch = Path(tempfile.mkdtemp(prefix="espalier-sandbox-"))
    try:
        for name, text in files.items():
            (scratch / name).write_text(text, encoding="utf-8", errors="surrogatepass")
        ready, theirs = os.pipe()
        has_landlock = "landlock" not in missing_parts()
        arguments = [role, str(scratch), json.dumps(asdict(limits)), str(int(has_landlock)), str(theirs)]
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-s", "-S", "-B", "-m", "espalier.data.sandbox.child", *arguments,
                 *map(str, pipes)],
                pass_fds=[theirs, *(pipe for pipe in pipes if pipe >= 0)],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={"PYTHONPATH": str(_ROOT), "PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "HOME": str(scratch)},
                cwd=scratch,
                start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(theirs)
        child = _Child(process, scratch, limits)
        try:
            _await_ready(child, ready)
            yield child
        finally:
            child.end()
            os.close(ready)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _await_ready(child: _Child, ready: int) -> None:
    is_readable = select.select([ready], [], [], _START_SECONDS)[0]
    if is_readable and os.read(ready, 16) == b"ready":
        return
    child.process.kill()
    said = child.process.stderr.read().decode(errors="replace").strip() if child.process.stderr else ""
    raise SandboxBroken(f"the sandbox does not start: {said.splitlines()[-1] if said else 'no answer in time'}")


@dataclass
class _Clock:
    """How long children may go on in one test: `seconds` of processor time, three times that and 2 s by the wall clock;
    longer, up to six times that, while one of them waits for a processor that others have. Nothing ends after `end`.
    """

    children: Sequence[_Child]
    seconds: float
    end: float = math.inf

    def __post_init__(self) -> None:
        self.started = time.monotonic()
        self.before = self._used()[0]

    def _used(self) -> tuple[float, bool]:
        """Return (processor seconds of all children, whether one could run now)."""
        used, is_runnable = 0.0, False
        for child in self.children:
            with suppress(OSError):
                fields = Path(f"/proc/{child.process.pid}/stat").read_text().rpartition(")")[2].split()
                used += (int(fields[11]) + int(fields[12])) / _TICKS
                is_runnable |= fields[0] == "R"
        return used, is_runnable

    def check(self) -> None:
        """Raise _Stopped where time is up, or a child is beyond a limit."""
        for child in self.children:
            child.check()
        used, is_runnable = self._used()
        if used - self.before > self.seconds:
            raise _Stopped(f"more than {self.seconds:g} s of processor time")
        wall = (3 * self.seconds + 2) * (_PATIENCE if is_runnable else 1)
        if time.monotonic() > min(self.started + wall, self.end):
            raise _Stopped("no end in time")

    def read(self, source: int) -> bytes:
        """Return what comes next from a pipe, b"" at its end. Raises as `check`."""
        while True:
            is_ready = select.select([source], [], [], _TICK_SECONDS)[0]
            self.check()
            if is_ready:
                return os.read(source, 65536)

    def wait(self, child: _Child) -> int:
        """Return the exit code of a child. Raises as `check`."""
        while True:
            with suppress(subprocess.TimeoutExpired):
                return child.process.wait(_TICK_SECONDS)
            self.check()


def run_script(program: str, stdin: str, seconds: float = 4.0, limits: Limits | None = None) -> ScriptRun:
    """Run a program once. Raises SandboxBroken or BadInput where it cannot be confined, never for the program."""
    limits = replace(limits or Limits(), cpu_seconds=max(1, round(seconds + 0.49)))
    output = b""
    with _SLOTS, tempfile.TemporaryFile() as given:
        given.write(stdin.encode(errors="surrogatepass"))
        given.seek(0)
        with _child("script", {"program.py": program}, limits, given) as child:
            clock = _Clock([child], seconds)
            try:
                while piece := clock.read(child.output):
                    output += piece
                    if len(output) > limits.output_bytes:
                        raise _Stopped(f"more than {limits.output_bytes:,} bytes of output")
                code = clock.wait(child)
                reason = "" if code == 0 else f"exit code {code}"
            except _Stopped as stopped:
                reason = str(stopped)
    return ScriptRun(output.decode(errors="replace"), reason, time.monotonic() - clock.started)


@dataclass
class _TestRun:
    """The results so far; `deadline` is that of the whole program."""

    seconds: float
    deadline: float
    results: list[bool] = field(default_factory=list)

    def go_on(self, tester: _Child, server: _Child, num_tests: int) -> None:
        """Read results until there is one per test, or the program has ended or run out of time in one."""
        wanted, rest = len(self.results) + num_tests, b""
        while len(self.results) < wanted:
            try:
                piece = _Clock([tester, server], self.seconds, self.deadline).read(tester.output)
            except _Stopped:
                self.results.append(False)
                return
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                self.results.append(line == b"ok")
            if not piece:
                if not lines and rest == b"" and tester.process.poll() not in (0, None):
                    self.results.append(False)  # the tests themselves ended their process
                return


def run_tests(
    program: str,
    tests: Sequence[AssertTest] | Sequence[FunctionCall],
    seconds: float = 4.0,
    max_seconds: float = 60.0,
    limits: Limits | None = None,
) -> list[bool]:
    """Say of each test whether the program passes it. A program that ends or hangs in a test is started anew for the
    next; at `max_seconds`, which begin with the first, the tests that are left have failed. Raises as `run_script`."""
    limits = replace(limits or Limits(), cpu_seconds=max(1, round(min(seconds * len(tests), max_seconds) + 0.49)))
    with _SLOTS:
        run = _TestRun(seconds, time.monotonic() + max_seconds)
        while len(run.results) < len(tests) and time.monotonic() < run.deadline:
            left = [asdict(test) for test in tests[len(run.results) :]]
            before = len(run.results)
            with ExitStack() as stack:
                asked, answered = os.pipe(), os.pipe()
                ours = stack.enter_context(ExitStack())
                for end in (*asked, *answered):
                    ours.callback(os.close, end)
                server = stack.enter_context(
                    _child("serve", {"program.py": program}, limits, pipes=(asked[0], answered[1]))
                )
                tester = stack.enter_context(
                    _child("test", {"tests.json": json.dumps(left)}, limits, pipes=(asked[1], answered[0]))
                )
                ours.close()  # only the two processes hold the pipes now
                run.go_on(tester, server, len(left))
            if len(run.results) == before:
                run.results.append(False)
    return run.results + [False] * (len(tests) - len(run.results))
