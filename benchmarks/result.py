"""The result file of a benchmark: machine, commit, versions and figures with goal and command; and what a run that was
cut has kept of it."""

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from espalier.data.jsonl import write_json
from espalier.runtime.run_dir import code_commit, versions

RESULTS = Path(__file__).parent / "results"


def machine() -> str:
    """Return cores, matrix extensions and memory, from /proc."""
    info = Path("/proc/cpuinfo").read_text()
    extensions = [label for flag, label in (("avx512f", "AVX-512"), ("avx512_bf16", "bf16"), ("amx_bf16", "AMX"))
                  if flag in info]  # fmt: skip
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores, {' '.join(extensions) or 'no AVX-512'}, {gib:.0f} GiB"


def figure(ratios: list[float], *, goal: float, how: str) -> dict[str, Any]:
    """Return a ratio measured several times, higher is better: median, lowest, highest, and whether it meets its
    goal."""
    middle = median(ratios)
    return {
        "value": round(middle, 4),
        "low": round(min(ratios), 4),
        "high": round(max(ratios), 4),
        "unit": "ratio",
        "goal": goal,
        "better": "higher",
        "met": middle >= goal,
        "how": how,
    }


def count(value: int, goal: int, unit: str, *, how: str, better: str = "higher") -> dict[str, Any]:
    """Return a number of things, and whether it reaches its goal (or, where lower is better, stays within it)."""
    is_met = value >= goal if better == "higher" else value <= goal
    return {"value": value, "low": value, "high": value, "unit": unit, "goal": goal, "better": better, "met": is_met,
            "how": how}  # fmt: skip


def stamp_of_now() -> dict[str, str]:
    """Return the machine, the commit of the code and the day."""
    return {"machine": machine(), "commit": code_commit(), "date": time.strftime("%Y-%m-%d")}


def made_now() -> str:
    """Return that stamp in words."""
    stamp = stamp_of_now()
    return f"{stamp['date']}, commit {stamp['commit']}, {stamp['machine']}"


def kept(
    path: Path, settings: Mapping[str, Any], stamp: Mapping[str, Any], make: Callable[[], Any]
) -> tuple[Any, dict[str, Any]]:
    """Return what an earlier run made with these settings, on this machine at this commit, and its stamp, from a file;
    else make it and keep it with this stamp. Code that differs from its commit names nothing: it makes all anew."""
    settings = {**settings, **{key: stamp[key] for key in ("commit", "machine")}}
    is_named = stamp["commit"] != "unknown" and not stamp["commit"].endswith("-dirty")
    if is_named and path.is_file():
        found = json.loads(path.read_text())
        if found["settings"] == settings and "stamp" in found:
            return found["made"], found["stamp"]
    made = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"settings": settings, "stamp": stamp, "made": made})
    return made, dict(stamp)


def write_result(
    name: str,
    figures: dict[str, Any],
    detail: dict[str, Any],
    *,
    more_versions: dict[str, str] | None = None,
    tables: list[dict[str, Any]] | None = None,
    folder: Path | None = None,
) -> Path:
    """Write `<name>.json` in `folder` (`RESULTS`).

    `detail` says how the runs were made, `more_versions` is what they ran beside ours. `tables` (title, columns, rows)
    are shown in docs/benchmarks.md below the figures.
    """
    path = (folder or RESULTS) / f"{name}.json"
    found = {**versions(), **(more_versions or {})}
    shown = {"tables": tables} if tables else {}
    write_json(path, {**stamp_of_now(), "versions": found, "detail": detail, "figures": figures, **shown})
    return path
