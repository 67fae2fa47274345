"""Programs of this project in forked children: the libraries are loaded once, so that a start takes no seconds."""

import gc
import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from espalier.runtime.process_lifetime import die_with_parent

ROOT = Path(__file__).resolve().parent.parent.parent


def start(work: Callable[[], None]) -> int:
    """Return the process id of a child that does `work` and ends with its exit code; 99 after an error. It is stopped
    (SIGTERM) when the thread that called this is gone."""
    gc.collect()
    pid = os.fork()
    if pid:
        return pid
    die_with_parent()
    gc.freeze()  # what the parent leaves (groups of processes, with threads that are not here) is not ended here too
    code = 99
    try:
        work()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def start_program(
    name: str, settings: Sequence[str], log: Path, environment: Mapping[str, str] | None = None, root: Path = ROOT
) -> int:
    """Start `python <name> <settings>`, a program of the tree at `root`; its process id. What it prints is appended to
    `log`."""

    def work() -> None:
        os.environ.update(environment or {})
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = [str(root / name), *settings]
        sys.orig_argv = [sys.executable, *sys.argv]  # what a message calls the command
        try:
            runpy.run_path(str(root / name), run_name="__main__")
        finally:
            sys.stdout.flush()
            sys.stderr.flush()

    return start(work)


def run_ranks(name: str, settings: Sequence[str], log: Path, num_ranks: int) -> list[int]:
    """Run a program on CPUs, on `num_ranks` ranks as a launcher would (1: without one); their exit codes."""
    return [exit_code(pid) for pid in start_ranks(name, settings, log, num_ranks)]


def start_ranks(name: str, settings: Sequence[str], log: Path, num_ranks: int) -> list[int]:
    """Return the process ids of the ranks of `run_ranks`."""
    import torch._inductor.compile_fx  # noqa: F401, which DeepSpeed's optimizers load: a second, once

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    pids = []
    for rank in range(num_ranks):
        environment = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        if num_ranks > 1:
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(num_ranks)}
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        pids.append(start_program(name, settings, log, environment))
    return pids


def exit_code(pid: int) -> int:
    """Wait for a child; its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
