"""Runs whose size is planned, in three sections: the memory that `explain` plans, beside what tensors took at most, in
sixteen runs of a Llama of 42M random parameters; checkpoints of four ranks that go on on fewer
(`benchmarks.sizes.resume`); and a network of half a billion parameters beside TRL (`benchmarks.sizes.peers`).

    bash scripts/bench.sh sizes [memory [CASE ...]] [resume] [peers]

Figures of a section that is not run stay in benchmarks/results/sizes.json, with their machine and commit. Of memory,
bytes of tensors are counted in the third step of each run, on every rank (`benchmarks.sizes.tensor_memory`); the plan
says the same and nothing of the process, which is shown beside it: what it takes more than after its imports, with
pages that the C library keeps. With names of cases (a whole one, or a part of several) the others stay as they were;
with `--quick` nothing is written.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.training import Shape, write_model
from benchmarks.processes.sides import load_before
from benchmarks.result import RESULTS, made_now, write_result
from benchmarks.sizes import peers, resume
from benchmarks.sizes.memory_runs import CASES, Case, measure

HOW = "bash scripts/bench.sh sizes memory"
SECTIONS = ("memory", "resume", "peers")
GOAL = 0.1
SHAPE = Shape(512, 1536, 8, 8, 4, 16_384, length=256, batch=8, micro=2, num_steps=3, num_warm=0)
QUICK = Shape(64, 128, 2, 2, 1, 400, length=64, batch=8, micro=2, num_steps=3, num_warm=0)
MIB = 2**20


def figure(errors: list[float]) -> dict[str, Any]:
    """Return the largest error of a plan, in shares of what was measured."""
    worst = max(errors)
    return {"value": round(worst, 4), "low": round(min(errors), 4), "high": round(worst, 4), "unit": "share",
            "goal": GOAL, "better": "lower", "met": worst <= GOAL, "how": HOW}  # fmt: skip


def table(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a row for each case, of the rank that took the most."""
    rows = []
    for name, run in found.items():
        worst = max(run["ranks"], key=lambda rank: int(rank["measured"]))
        sizes = [round(worst[key] / MIB, 1) for key in ("planned", "measured", "process")]
        seconds = round(worst["cpu_seconds"], 2)
        rows.append([name, *sizes, round(worst["planned"] / worst["measured"], 3), seconds, run["made"]])
    return {
        "title": "Memory that is planned and that tensors took, MiB per rank.",
        "columns": ["run", "planned", "tensors", "process", "planned / tensors", "CPU seconds of a step", "made"],
        "rows": rows,
    }


def run(cases: list[Case], shape: Shape) -> dict[str, dict[str, Any]]:
    """Measure the cases one after the other; name → (`made`, and what `ranks` found)."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="sizes-") as name:
        write_model(Path(name) / "model", shape)
        for case in cases:
            found[case.name] = {"made": made_now(), "ranks": measure(case, shape, Path(name))}
            print(f"sizes: {case.name}: {json.dumps(found[case.name])}", flush=True)
    return found


def memory(words: Sequence[str]) -> dict[str, Any] | None:
    """Measure the memory of all cases, or of some beside what is stored; None, printed, with `--quick`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", help="names of cases, or parts of several")
    parser.add_argument("--quick", action="store_true", help="a tiny network: does it run; prints, writes no result")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    load = load_before()
    found = run(chosen_of(options.cases), QUICK if options.quick else SHAPE)
    if not options.quick:
        found = stored_parts(RESULTS / "sizes.json").get("memory", {}).get("runs", {}) | found
        found = {case.name: found[case.name] for case in CASES if case.name in found}
    errors = [abs(rank["planned"] / rank["measured"] - 1) for run in found.values() for rank in run["ranks"]]
    figures = {"planned_memory_error": figure(errors)}
    if options.quick:
        print(json.dumps({"figures": figures, "table": table(found)}, indent=1))
        return None
    return {"figures": figures, "tables": [table(found)], "load_before": load, "shape": vars(SHAPE), "runs": found}


def chosen_of(words: Sequence[str]) -> list[Case]:
    """Return the cases that are named, all where none is. Raises SystemExit where a word names none."""
    names = [case.name for case in CASES]
    for word in words:
        if not any(word in name for name in names):
            raise SystemExit(f"error: no case is called {word}: choose of {'; '.join(names)}")
    chosen = [name for name in names if any(word == name or (word in name and word not in names) for word in words)]
    return [case for case in CASES if not words or case.name in chosen]


def stored_parts(path: Path) -> dict[str, dict[str, Any]]:
    """Return the sections of a result file, none where there is no file."""
    if not path.is_file():
        return {}
    return {name: part for name, part in json.loads(path.read_text())["detail"].items() if name in SECTIONS}


def write_parts(parts: dict[str, dict[str, Any]], folder: Path = RESULTS) -> Path:
    """Write all sections, each of whose tables says where and when it was made."""
    figures = {name: one for part in parts.values() for name, one in part["figures"].items()}
    tables = [{**one, "title": f"{one['title']} {part['made']}"} for part in parts.values() for one in part["tables"]]
    return write_result("sizes", figures, parts, tables=tables, folder=folder)


def main() -> None:
    """Measure one section, or all, and write them beside what was stored of the others."""
    wanted = sys.argv[1:2] if sys.argv[1:2] and sys.argv[1] in SECTIONS else []
    words = sys.argv[1 + len(wanted) :]
    if not wanted and not words:
        wanted = [*SECTIONS]
    measures = {"memory": memory, "resume": resume.measure, "peers": peers.measure}
    stored, written = stored_parts(RESULTS / "sizes.json"), False
    for name in wanted or ["memory"]:
        part = measures[name](words)
        if part is not None:
            stored, written = stored | {name: {"made": f"{made_now()}.", **part}}, True
    if written:
        print(write_parts({name: stored[name] for name in SECTIONS if name in stored}))


if __name__ == "__main__":
    main()
