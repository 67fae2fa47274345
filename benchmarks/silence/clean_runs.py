"""Clean runs of reinforcement learning over lengths, families of models and learning rates: an alarm is a false one.

    python -m benchmarks.silence.clean_runs FOLDER [--iterations 30] [--cells short-llama medium ...]

Every cell is `main.py` itself on a policy after a short SFT of its own, with a vLLM engine without a server: 8
problems an iteration, 8 rollouts each. Three lengths of word arithmetic (2 to 5, 5 to 7, 8 to 10 operations), two
families, two learning rates (the recipe's and three times as much), GRPO in all of them and VinePPO at each length. An
alarm is a run that ends early, or a warning that engine and trainer differ. A cell that is done is kept in
FOLDER/NAME.json, and so are the policies: the same command goes on. On two quiet cores about half an hour, most of it
SFT.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes.forked import ROOT
from benchmarks.result import count
from benchmarks.rl.policy import run_program, train

HOW = "bash scripts/bench.sh silence clean"
LENGTHS = {"short": (2, 5), "medium": (5, 7), "long": (8, 10)}
FAMILIES = ("llama", "qwen3")
RATES = (1e-4, 3e-4)
GRPO, VINEPPO = "grpo", "vineppo"
_SETTINGS = """client=data_parallel_engines client.num_engines=1 server=none params.max_tokens=160 rollout.group_size=8
    update.minibatch_size=64 update.micro_batch_size=64 evaluation.every=0 checkpoints.save_every=0
    samples.num_problems=0 task.num_train=1000"""
# every state of a rollout is completed
_FEW = "rollout.num_problems=2 rollout.group_size=4 advantage.completions_per_state=3"
_WARNINGS = ("the engine's log-probs drift", "engine and trainer")


@dataclass(frozen=True)
class Cell:
    """One run: a length, a family, an algorithm at a learning rate, and how many iterations."""

    length: str
    family: str
    algorithm: str
    rate: float
    iterations: int

    @property
    def name(self) -> str:
        """Of its files."""
        return f"{self.length}-{self.family}-{self.algorithm}-{self.rate:g}"


def cells(num_iterations: int) -> list[Cell]:
    """Return GRPO on every length, family and rate; VinePPO a third as long on every length at the recipe's rate."""
    few = max(1, num_iterations // 3)
    grpo = [Cell(length, family, GRPO, rate, num_iterations) for length in LENGTHS for family in FAMILIES
            for rate in RATES]  # fmt: skip
    vineppo = [Cell(length, family, VINEPPO, RATES[0], few) for length in LENGTHS for family in FAMILIES]
    return grpo + vineppo


def task_settings(length: str) -> list[str]:
    """Of word arithmetic at this length."""
    lowest, highest = LENGTHS[length]
    return [f"task.min_operations={lowest}", f"task.max_operations={highest}"]


def make_policy(folder: Path, length: str, family: str, num_steps: int) -> Path:
    """Return a policy after SFT; what is there already is kept."""
    own, log = folder / f"policy-{length}-{family}", folder / "programs.log"
    model, demonstrations, base = own / "sft" / "model", own / "demonstrations.jsonl", own / "base"
    if model.is_dir():
        return model
    if not demonstrations.is_file():
        run_program(
            log,
            "run_stage.py",
            "-cn",
            "problems/make_demonstrations",
            f"output={demonstrations}",
            *task_settings(length),
        )
    if not base.is_dir():
        words = ["-cn", "training/make_policy", f"input={demonstrations}", f"output={base}", f"stage.family={family}"]
        run_program(log, "run_stage.py", *words)
    train(own / "sft", base, demonstrations, log, "exp/sft/word_arithmetic", [f"max_steps={num_steps}"])
    return model


def run_cell(cell: Cell, policy: Path, folder: Path) -> dict[str, Any]:
    """Return what the run left; read where it is there already."""
    result, run = folder / f"{cell.name}.json", folder / cell.name
    if result.is_file():
        found: dict[str, Any] = json.loads(result.read_text())
        return found
    shutil.rmtree(run, ignore_errors=True)
    words = [*_SETTINGS.split(), *task_settings(cell.length), f"model.path={policy}", f"output_dir={run}",
             f"update.learning_rate={cell.rate}", f"num_iterations={cell.iterations}",
             *(_FEW.split() if cell.algorithm == VINEPPO else ["rollout.num_problems=8"])]  # fmt: skip
    command = [sys.executable, "main.py", "-cn", f"exp/ppo/{cell.algorithm}_word_arithmetic", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    began = time.monotonic()
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    found = read_run(cell, run, ended.returncode, ended.stderr)
    found["seconds"] = round(time.monotonic() - began, 1)
    result.write_text(json.dumps(found) + "\n")
    shutil.rmtree(run, ignore_errors=True)
    return found


def read_run(cell: Cell, run: Path, exit_code: int, said: str) -> dict[str, Any]:
    """Iterations, alarms, and the largest of what was measured. A run that could not begin raises SystemExit:
    that is no alarm and no clean iteration."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    rows = [row for row in map(json.loads, lines) if "engine/gap_mean" in row]
    last = said.strip().splitlines()[-1:] or [""]
    if exit_code and not rows:
        raise SystemExit(f"{cell.name} did not begin (exit code {exit_code}): {last[0]}")
    log = run / "run.log"
    warned = [line for line in (log.read_text().splitlines() if log.is_file() else []) if _is_warning(line)]
    alarms = warned + ([f"exit code {exit_code}: {last[0]}"] if exit_code else [])
    ratios = {"gap_over_rounding": ("gap_mean", "rounding"), "canary_over_rounding": ("canary_gap", "canary_rounding")}
    return {
        "cell": cell.name, "iterations": len(rows), "asked": cell.iterations, "alarms": alarms,
        "reward": [rows[0]["rollout/reward"], rows[-1]["rollout/reward"]],
        **{f"largest_{name}": max((row.get(f"engine/{name}", 0.0) for row in rows), default=0.0)
           for name in ("gap_mean", "canary_gap", "policy_moved")},
        **{name: max((row[f"engine/{one}"] / row[f"engine/{other}"] for row in rows if row.get(f"engine/{other}")),
                     default=0.0) for name, (one, other) in ratios.items()},
    }  # fmt: skip


def _is_warning(line: str) -> bool:
    return any(part in line for part in _WARNINGS)


def measure(
    folder: Path, num_iterations: int = 30, sft_steps: int = 300, only: Sequence[str] = ()
) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """Return (figures, detail, tables): `clean_iterations_without_alarm`, and the false alarms. `only`: cells whose
    names hold one of these words."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for cell in cells(num_iterations):
        if not only or any(word in cell.name for word in only):
            policy = make_policy(folder, cell.length, cell.family, sft_steps)
            rows.append(run_cell(cell, policy, folder))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    clean = sum(row["iterations"] for row in rows if not row["alarms"])
    alarms = sum(len(row["alarms"]) for row in rows)
    figures = {
        "clean_iterations_without_alarm": count(clean, 400, "iterations", how=HOW),
        "false_alarms_of_clean_runs": count(alarms, 0, f"in {len(rows)} clean runs", how=HOW, better="lower"),
    }
    shown = (
        "cell",
        "iterations",
        "largest_gap_mean",
        "gap_over_rounding",
        "largest_canary_gap",
        "canary_over_rounding",
    )
    table = {"title": "Clean runs", "columns": list(shown), "rows": [[row[name] for name in shown] for row in rows]}
    return figures, {"cells": rows, "sft_steps": sft_steps}, [table]


def main() -> None:
    """Measure and print; `benchmarks.silence.silence` writes the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--sft-steps", type=int, default=300)
    parser.add_argument("--cells", nargs="*", default=[])
    arguments = parser.parse_args()
    figures, _, _ = measure(arguments.folder.resolve(), arguments.iterations, arguments.sft_steps, arguments.cells)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
