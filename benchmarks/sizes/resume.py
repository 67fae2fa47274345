"""Checkpoints of four ranks that go on on two and on one: losses and weights beside those of the four, to the end.

    bash scripts/bench.sh sizes resume [--quick]

The real program, SFT in float32 of a small Llama with random weights, by gloo on CPUs: without DeepSpeed, by ZeRO-2, by
ZeRO-3, and with every layer cut over two ranks (on two). A run of four ranks has a checkpoint at half its steps; from
there it is done again on fewer.
"""

import argparse
import json
import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.gpu.training import Shape, digits, write_model
from benchmarks.processes.forked import run_ranks
from espalier.data.jsonl import write_records
from espalier.data.records import Demonstration

HOW = "bash scripts/bench.sh sizes resume"
GOAL, RANKS, STEPS = 1e-5, 4, 8
ENGINES = {"none": (2, 1), "zero2": (2, 1), "zero3": (2, 1), "tensor_parallel": (2,)}
"""And on how many ranks their checkpoints go on; two share a layer with tensor parallelism."""
SHAPE = Shape(128, 384, 4, 4, 2, 1024, length=64, batch=8, micro=2, num_steps=STEPS, num_warm=0)
QUICK = Shape(64, 128, 2, 2, 1, 400, length=64, batch=8, micro=2, num_steps=STEPS, num_warm=0)


def demonstrations(shape: Shape) -> list[Demonstration]:
    """Return five steps' of them, of a quarter of the length and more: micro-batches differ in tokens."""
    rng, rows = random.Random(0), []
    for number in range(5 * shape.batch // 2):
        size = rng.randrange(shape.length // 4, shape.length - 16)
        rows.append(Demonstration(f"d{number}", digits(rng, 8), digits(rng, size)))
    return rows


def train(run: Path, engine: str, num_ranks: int, shape: Shape, folder: Path) -> None:
    """Train to the end, from the newest checkpoint of `run` where there is one. Raises SystemExit where a rank
    fails."""
    log = folder / "log"
    settings = f"""-cn train model=policy objective=sft examples=demonstrations model.path={folder}/model
        deepspeed={engine} examples.path={folder}/examples.jsonl output_dir={run} max_steps={shape.num_steps}
        precision=fp32 examples.max_length={shape.length} update.batch_size={shape.batch}
        update.micro_batch_size={shape.micro} update.learning_rate=1e-3 update.warmup_steps=1 optimizer.eps=1e-4
        log_every=1 checkpoints.save_every={shape.num_steps // 2}""".split()
    log.unlink(missing_ok=True)
    if any(run_ranks("trainer_base_ds_mul.py", settings, log, num_ranks)):
        raise SystemExit(f"error: {engine} on {num_ranks} ranks: {log.read_text()[-2000:]}")


def losses_of(run: Path) -> list[float]:
    """Return the loss of every step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["train/loss"] for row in rows if "train/loss" in row]


def resumed(engine: str, shape: Shape, folder: Path) -> list[dict[str, Any]]:
    """Return one engine's resumptions. Raises SystemExit where a run did not go on from its checkpoint."""
    run, straight, found = folder / "run", folder / f"straight-{engine}", []
    train(run, engine, RANKS, shape, folder)
    run.rename(straight)
    wanted, weights = losses_of(straight), load_file(straight / "model" / "model.safetensors")
    for num_ranks in ENGINES[engine]:
        shutil.copytree(straight, run, ignore=lambda path, names: {"model"} if Path(path) == straight else set())
        train(run, engine, num_ranks, shape, folder)
        if f"at step {shape.num_steps // 2} of {shape.num_steps}" not in (folder / "log").read_text():
            raise SystemExit(f"error: {engine} on {num_ranks} ranks did not go on from its checkpoint")
        mine, others = losses_of(run), load_file(run / "model" / "model.safetensors")
        found.append({
            "engine": engine, "ranks": num_ranks, "losses": mine, "losses_of_four": wanted,
            "loss_error": max(abs(one - other) for one, other in zip(mine, wanted, strict=True)),
            "weight_error": max(float((others[name] - value).abs().max()) for name, value in weights.items()),
        })  # fmt: skip
        shutil.rmtree(run)
        print(f"sizes: {engine}, {RANKS} to {num_ranks} ranks: {found[-1]['loss_error']:.1e} nats", flush=True)
    shutil.rmtree(straight)
    return found


def figure(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the largest difference of a loss, in nats per token."""
    errors = [row["loss_error"] for row in rows]
    return {"value": max(errors), "low": min(errors), "high": max(errors), "unit": "nats", "goal": GOAL,
            "better": "lower", "met": max(errors) <= GOAL, "how": HOW}  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a row for each resumption."""
    columns = ["deepspeed", "ranks of the checkpoint", "ranks after it", "first and last loss", "loss differs by",
               "weights differ by"]  # fmt: skip
    cells = [[row["engine"], RANKS, row["ranks"], f"{row['losses'][0]:.4g}, {row['losses'][-1]:.4g}",
              row["loss_error"], row["weight_error"]] for row in rows]  # fmt: skip
    return {"title": "Checkpoints of four ranks on fewer: nats, and the largest difference of a weight.",
            "columns": columns, "rows": cells}  # fmt: skip


def measure(words: Sequence[str]) -> dict[str, Any] | None:
    """Return figures, tables and all losses; None, printed, with `--quick`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a tiny network: does it run; prints, writes no result")
    is_quick = parser.parse_args(words).quick
    shape = QUICK if is_quick else SHAPE
    torch.set_num_threads(1)  # forked ranks would wait for threads that this process alone has
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="sizes-") as name:
        write_model(Path(name) / "model", shape)
        write_records(Path(name) / "examples.jsonl", demonstrations(shape))
        for engine in [*ENGINES][:1] if is_quick else ENGINES:
            rows += resumed(engine, shape, Path(name))
    part = {
        "figures": {"resumed_loss_error": figure(rows)},
        "tables": [table(rows)],
        "shape": vars(shape),
        "runs": rows,
    }
    if is_quick:
        print(json.dumps(part, indent=1))
        return None
    return part
