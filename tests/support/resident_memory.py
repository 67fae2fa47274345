"""The resident memory of this process, on Linux."""

from collections.abc import Callable
from pathlib import Path


def peak_mib(call: Callable[[], object]) -> float:
    """Return by how much the resident memory of this process rises while `call` runs, at most."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    call()
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
