"""Everything that only a GPU can show, by one command, each part in a process of its own with a deadline.

    bash scripts/gpu_check.sh [--rehearse] [--output FOLDER] [--seconds N] [PART ...]

Writes `FOLDER/<part>.json` and `FOLDER/table.md`, and where a GPU was measured also benchmarks/results/gpu_check.json,
which docs/benchmarks.md shows; parts that stand there from the same kind of GPU stay where they are not asked for, each
with its day and its torch, and so does one that fails when it is measured again, which its line says. Without a GPU, or
with `--rehearse`, every part runs its rehearsal: the same code on a CPU with small shapes, whose numbers are no
figures; the table says so. A part that fails is in the table with its last line, the others go on, and the exit code is
1. Ended by SIGTERM, it ends the part at hand and leaves what was measured so far.
"""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import Row
from benchmarks.result import RESULTS, write_result
from espalier.data.jsonl import write_json
from espalier.pipeline.pages.tabulate_benchmarks import markdown_table
from espalier.runtime.run_dir import code_commit, versions

PARTS = {
    "attention": "packed attention: sdpa, flex, varlen and flash beside the CPU's",
    "head": "log-probs over a vocabulary of 151,936, fused beside full logits and liger-kernel",
    "training": "SFT, DPO and process rewards of a 1B shape: tokens/s, MFU, memory; SFT and DPO beside TRL",
    "checkpoint": "a network handed from engine to engine by checkpoints, beside one that never stopped",
    "large": "SFT of a 1B shape with a vocabulary of 151,936, and of rows of 16,384 tokens: tokens/s, MFU, memory",
    "scoring": "process rewards of a 1B shape: transformers and a vLLM engine",
    "delivery": "weights of a 1B shape to an engine: in memory of the GPU that both share, and over connections",
    "rl_smoke": "GRPO of a 1B shape on one GPU with sleep: rollouts, delivery with its proofs, memory and its plan",
}
SECONDS = 600
HOW = "bash scripts/gpu_check.sh"
RESULT = RESULTS / "gpu_check.json"
ENDED = "it was ended by a signal"


class Ended:
    """Whether SIGTERM came."""

    is_asked = False


def device() -> str:
    """Return the first GPU's name, empty without one; asked of another process, which starts CUDA."""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()


def run_part(name: str, gpu: str, output: Path, seconds: float = SECONDS) -> dict[str, Any]:
    """Run one part in a session of its own, rehearsed without a `gpu`; its document, which is written too."""
    is_rehearsal = not gpu
    stamp = {"date": time.strftime("%Y-%m-%d"), "commit": code_commit(), "versions": versions()}
    found: dict[str, Any] = {"part": name, "gpu": gpu, "rehearsal": is_rehearsal, "rows": [], "error": "", **stamp}
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"gpu-{name}-") as scratch:
        answer, log = Path(scratch) / "rows.json", output / f"{name}.log"
        command = [sys.executable, "-m", "benchmarks.gpu.gpu_check", "--one", name, "--output", scratch]
        environment = dict(os.environ) | ({"CUDA_VISIBLE_DEVICES": ""} if is_rehearsal else {})
        with log.open("w") as file:
            process = subprocess.Popen([*command, *(["--rehearse"] if is_rehearsal else [])], stdout=file,
                                       stderr=subprocess.STDOUT, start_new_session=True, env=environment)  # fmt: skip
            try:
                code = wait_for(process, seconds)
                last = [line for line in log.read_text().splitlines() if line.strip()][-1:]
                found["error"] = "" if code == 0 else (last or [f"exit code {code}"])[0][-300:]
                if code is None:
                    found["error"] = f"it was not done after {seconds:g} seconds and was ended"
                if code is None and Ended.is_asked:
                    found["error"] = ENDED
            finally:
                end_session(process)
        if answer.is_file():
            found["rows"] = json.loads(answer.read_text())
    found["seconds"] = round(time.monotonic() - started, 1)
    write_json(output / f"{name}.json", found)
    return found


def wait_for(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Return its exit code; None where it is not done by then, or this command is to end."""
    deadline = time.monotonic() + seconds
    while not Ended.is_asked and (left := deadline - time.monotonic()) > 0:
        try:
            return process.wait(min(left, 0.5))
        except subprocess.TimeoutExpired:
            continue
    return process.poll()


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End a part with all it has started."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, kind)
        except ProcessLookupError:
            return
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            continue


def run_one(name: str, is_rehearsal: bool, scratch: Path) -> None:
    """In the part's own process: measure, and leave the rows, those of a part that fails later too."""
    measured: Iterable[Row] = importlib.import_module(f"benchmarks.gpu.{name}").measure(is_rehearsal, scratch)
    rows = []
    for row in measured:
        rows.append(asdict(row))
        write_json(scratch / "rows.json", rows)


def measured_before(gpu: str, result: Path = RESULT) -> dict[str, dict[str, Any]]:
    """Return the documents of parts that were measured on such a GPU, by their names."""
    stored = json.loads(result.read_text())["detail"]["parts"] if gpu and result.is_file() else []
    return {found["part"]: found for found in stored if found["gpu"] == gpu}


def newest(before: dict[str, Any] | None, part: dict[str, Any]) -> dict[str, Any]:
    """Return the part as it was measured now, or, where it failed, as it was before without an error, and that it
    failed."""
    if not part["error"] or before is None or before["error"]:
        return part
    return before | {"failed": f"{part['date']}: {part['error']}"}


def table_of(parts: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return (columns, rows) of what all parts found."""
    rows: list[list[Any]] = []
    for part in parts:
        measured = f"measured {part['date']}, torch {part['versions']['torch']}"
        state = "rehearsed on a CPU: no figures" if part["rehearsal"] else measured
        failed = f"; FAILED {part['failed']}" if part.get("failed") else ""
        note = part["error"] or f"{state}, {part['seconds']} s{failed}"
        rows.append([part["part"], PARTS[part["part"]], "", "", note])
        for row in part["rows"]:
            is_figure = row["value"] is not None and not part["rehearsal"]
            note = row["note"] if row["value"] is None or is_figure else "ran"
            rows.append(["", row["figure"], row["value"] if is_figure else "", row["unit"], note])
    return ["part", "figure", "value", "unit", "note"], rows


def _end(*_: Any) -> None:
    Ended.is_asked = True


def main() -> None:
    """Run the parts that are asked for, all of them by default."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--rehearse", action="store_true", help="on a CPU with small shapes, whatever is here")
    parser.add_argument("--output", type=Path, default=Path("experiments/gpu_check"))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="a part's deadline")
    parser.add_argument("--one", choices=list(PARTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run_one(options.one, options.rehearse, options.output)
        return
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        print(f"error: there is no part '{unknown[0]}': choose of {', '.join(PARTS)}", file=sys.stderr)
        raise SystemExit(2)
    gpu = "" if options.rehearse else device()
    print(f"gpu_check: on {gpu}" if gpu else "gpu_check: a rehearsal on the CPU: nothing is measured", file=sys.stderr)
    options.output.mkdir(parents=True, exist_ok=True)
    documents, failed = measured_before(gpu), False
    signal.signal(signal.SIGTERM, _end)
    for name in options.parts or PARTS:
        print(f"gpu_check: {name}: {PARTS[name]}", file=sys.stderr, flush=True)
        part = run_part(name, gpu, options.output, options.seconds)
        documents[name] = newest(documents.get(name), part)
        failed = failed or bool(part["error"])
        print(f"gpu_check: {name}: {part['error'] or 'done'}, {part['seconds']} s", file=sys.stderr, flush=True)
        if Ended.is_asked:
            break
    found = [documents[name] for name in PARTS if name in documents]
    columns, rows = table_of(found)
    (options.output / "table.md").write_text(markdown_table(columns, rows))
    if gpu:
        table = {"title": f"On one {gpu}.", "columns": columns, "rows": rows}
        write_result("gpu_check", {}, {"device": gpu, "how": HOW, "parts": found}, tables=[table])
    print(f"gpu_check: {options.output}/table.md", file=sys.stderr)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
