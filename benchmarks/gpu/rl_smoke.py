"""GRPO with a policy of about 1B random parameters, learner and engine on one GPU: the engine sleeps while the learner
computes, and follows it by deliveries that are proven (receipts, canaries; docs/reinforcement.md).

The real program for a few iterations, on word problems that a random policy cannot solve: what its rewards tell apart
is the length of responses, so that every row has a gradient; speeds, seconds, memory and the agreement of engine and
trainer are what is read. The GPU's memory is read from nvidia-smi while the run goes on, and set beside its plan
(`training/plan_gpu`), and which processes compute on it: where the engine was placed. What stays taken while the engine
sleeps it says itself. On a CPU the same run without sleep, which vLLM has on GPUs alone.
"""

import json
import re
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import Row
from benchmarks.processes.forked import ROOT
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.tiny import build_tiny
from espalier.sampling.placement import deal_gpus

REAL = {"hidden_size": 2048, "num_layers": 15, "num_heads": 16}
SMALL = {"hidden_size": 64, "num_layers": 2, "num_heads": 2}
ITERATIONS, WARM = 4, 1


def settings(is_rehearsal: bool, model: Path, run: Path) -> list[str]:
    """Return what main.py is called with."""
    given = ["-cn", "exp/ppo/grpo_gsm8k_one_gpu", "task=word_arithmetic", f"model.path={model}", f"output_dir={run}",
             "reward=outcome_and_form", "reward.terms.length.free_tokens=8", f"num_iterations={ITERATIONS}",
             "checkpoints.save_every=0", "evaluation.every=0"]  # fmt: skip
    if not is_rehearsal:
        return given
    return [*given, "engine.sleeps=false", "~client.options.gpu_memory_utilization", "client.max_model_len=128",
            "params.max_tokens=32", "rollout.num_problems=4", "rollout.group_size=4", "update.minibatch_size=16",
            "update.micro_batch_size=4", "engine.concurrency=16"]  # fmt: skip


@dataclass
class Watched:
    """Of a run: the most bytes of the first GPU that were taken, the most processes that computed on it."""

    most: int = 0
    processes: int = 0

    def look(self) -> None:
        """Ask nvidia-smi once."""
        self.most = max([self.most, *(size * 2**20 for size in asked("--query-gpu=memory.used"))])
        self.processes = max(self.processes, len(asked("--query-compute-apps=pid")))


def asked(query: str) -> list[int]:
    """Return what nvidia-smi says of the first GPU, by whomever; nothing without one."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "--id=0"]
    done = subprocess.run(command, capture_output=True, text=True)
    return [int(line) for line in done.stdout.split() if line.isdecimal()] if done.returncode == 0 else []


def run_watched(command: list[str], log: Path) -> Watched:
    """Run to the end, watched. Raises SystemExit where the run fails."""
    watched = Watched()
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                watched.look()
                time.sleep(0.5)
        finally:
            process.terminate()
            process.wait(60)
    if process.returncode:
        raise SystemExit(f"error: main.py ended with exit code {process.returncode}: {log.read_text()[-1500:]}")
    return watched


def placement(watched: Watched) -> list[Row]:
    """Return where engine and learner computed, and what they took."""
    dealt = deal_gpus(1, None, (), {})[0]
    note = f"the engine is dealt GPU {dealt}, learner and engine compute there" if dealt else "no GPU"
    hidden = "" if watched.processes or not dealt else "nvidia-smi names no process here"
    most = round(watched.most / 2**30, 3) if watched.most else None
    return [
        Row("engine placement", watched.processes or None, "processes on the GPU", hidden or note),
        Row("GPU memory at most", most, "GiB", "" if watched.most else hidden or "no GPU"),
    ]


def asleep(log: str) -> list[Row]:
    """Return what vLLM says in an engine's log of every sleep but the first, the median."""
    found = re.findall(r"Sleep mode freed ([\d.]+) GiB memory, ([\d.]+) GiB memory is still in use", log)[WARM:]
    rows = []
    for place, name in enumerate(("GPU memory freed by the engine's sleep", "GPU memory in use while it sleeps")):
        value = round(statistics.median(float(one[place]) for one in found), 3) if found else None
        rows.append(Row(name, value, "GiB", "" if found else "no sleep in the engine's log"))
    return rows


def planned(given: list[str], folder: Path) -> float:
    """Return what the plan says that the run takes at most, in GiB."""
    overrides = json.dumps([setting for setting in given[2:] if not setting.startswith("output_dir=")])
    command = [sys.executable, str(ROOT / "run_stage.py"), "-cn", "training/plan_gpu", f"output={folder}/plan.json",
               f"stage.experiment={given[1]}", f"stage.overrides={overrides}"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: training/plan_gpu: {done.stderr.strip()[-1000:]}")
    phases = json.loads((folder / "plan.json").read_text())["phases"]
    return max(phase["bytes"] for phase in phases.values()) / 2**30


def figures(rows: list[dict[str, Any]]) -> list[Row]:
    """Return medians of the iterations after the warm-up."""
    kept = rows[WARM:]

    def median(name: str) -> float | None:
        values = [row[name] for row in kept if name in row]
        return round(statistics.median(values), 4) if values else None

    found = [Row("iteration", median("seconds/iteration"), "s")]
    for name, unit in (("tokens_per_second/rollout", "tokens/s"), ("tokens_per_second/update", "tokens/s"),
                       ("seconds/weight_sync", "s"), ("seconds/engine_sleep", "s"), ("seconds/engine_wake", "s"),
                       ("engine/gap_mean", "nats"), ("engine/rounding", "nats"), ("engine/canary_gap", "nats"),
                       ("engine/serving", "engines")):  # fmt: skip
        value = median(name)
        found.append(Row(name, value, unit, "" if value is not None else "no such phase in this run"))
    total, sent = median("seconds/iteration"), median("seconds/weight_sync")
    share = round(sent / total, 4) if total and sent is not None else None
    return [*found, Row("share of weight delivery", share, "of an iteration")]


def measure(is_rehearsal: bool, folder: Path) -> list[Row]:
    """Run it."""
    task = WordArithmetic(num_train=500, num_dev=20, num_test=20, num_demonstrations=500)
    texts = [f"{row.prompt}{row.completion}" for row in task.demonstrations("train")]
    size = SMALL if is_rehearsal else REAL
    model = build_tiny(folder / "model", texts, **size, vocab_size=400, max_length=1024, seed=0)
    given = settings(is_rehearsal, model, folder / "run")
    plan = planned(given, folder)
    watched = run_watched([sys.executable, str(ROOT / "main.py"), *given], folder / "main.log")
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    log = (folder / "run" / "engine-0.log").read_text()
    return [*figures([row for row in rows if "seconds/iteration" in row]), *placement(watched), *asleep(log),
            Row("planned", round(plan, 3), "GiB", "without an engine's share" if is_rehearsal else "")]  # fmt: skip
