"""How fast a process reward model of about 1B random parameters scores trajectories, all their steps at once: by
transformers in one process, and by a vLLM engine, whose scores the stage itself holds against transformers' first.
"""

import re
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.gpu.rows import Row
from benchmarks.gpu.training import SHAPES, Shape, step_values, write_model
from benchmarks.processes.forked import ROOT
from espalier.data.jsonl import write_records
from espalier.data.records import Trajectory
from espalier.models.scalar_head import load_process_reward
from espalier.rewards.process import score_trajectories


def trajectories(shape: Shape, count: int) -> list[Trajectory]:
    """Return `count` of eight steps."""
    values = [row for number in range(-(-count // shape.batch)) for row in step_values(shape, 2 + number)]
    return [
        Trajectory(f"t{number}/0", f"t{number}", row.prompt, "".join(row.steps), row.steps, row.prompt_ids,
                   row.response_ids, row.step_ends, "stop", "1", "1", True)
        for number, row in enumerate(values[:count])
    ]  # fmt: skip


def write_prm(folder: Path) -> Path:
    """Give the policy's body a random head."""
    model = load_process_reward(str(folder / "model"), 1)
    torch.nn.init.normal_(model.score.weight, std=0.05)
    model.save_pretrained(folder / "prm")
    for path in (folder / "model").glob("tokenizer*"):
        (folder / "prm" / path.name).write_bytes(path.read_bytes())
    return folder / "prm"


def by_transformers(prm: Path, rows: list[Trajectory], device: torch.device) -> float:
    """Return seconds for all of them, in bf16, the model loaded."""
    model = load_process_reward(str(prm)).to(device)
    with torch.autocast(device.type, torch.bfloat16):
        score_trajectories(model, rows[:2], pad_id=0)
        started = time.perf_counter()
        score_trajectories(model, rows, pad_id=0)
    return time.perf_counter() - started


def by_engine(prm: Path, folder: Path, length: int) -> float:
    """Return seconds by one engine, as the stage says them. Raises SystemExit where it fails, or the two differ."""
    given = ["client=data_parallel_engines", "client.num_engines=1", f"client.max_model_len={length}",
             f"stage.model={prm}", f"input={folder}/trajectories.jsonl", f"output={folder}/scores.jsonl"]  # fmt: skip
    command = [sys.executable, str(ROOT / "run_stage.py"), "-cn", "prm/score_steps", *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = re.search(r"engines scored \d+ solutions in ([\d.]+) s", done.stderr)
    if done.returncode or found is None:
        raise SystemExit(f"error: scoring by an engine: {done.stderr.strip()[-1000:]}")
    return float(found.group(1))


def measure(is_rehearsal: bool, folder: Path) -> list[Row]:
    """Score with both."""
    shape, count = (SHAPES["tiny"], 6) if is_rehearsal else (SHAPES["1b"], 256)
    device = torch.device("cpu" if is_rehearsal else "cuda")
    write_model(folder / "model", shape)
    prm, rows = write_prm(folder), trajectories(shape, count)
    write_records(folder / "trajectories.jsonl", rows)
    tokens = sum(len(row.prompt_ids) + len(row.response_ids) for row in rows)
    seconds = {"transformers": by_transformers(prm, rows, device)}
    torch.cuda.empty_cache()
    seconds["a vLLM engine"] = by_engine(prm, folder, shape.length)
    note = f"{count} trajectories, {tokens:,} tokens"
    return [Row(f"{name}: speed", round(tokens / max(one, 1e-3), 1), "tokens/s", note) for name, one in seconds.items()]
