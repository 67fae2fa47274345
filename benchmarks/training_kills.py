"""`kill -9` training at random moments, start it again each time, and compare the end with an uninterrupted run.

    bash scripts/faults.sh training_kills [--kills 50]

A tiny model is trained by `trainer_base_ds_mul.py` on invented demonstrations, with a checkpoint every second
step, an evaluation every third, the newest two and the best one kept, in float32 and in bfloat16 by turns. A run
is killed and started again until it ends; then the next begins, until there were as many kills as asked for. Every
checkpoint that a kill leaves is read through. Moments are drawn evenly over the length of the uninterrupted run.
"""

import argparse
import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM  # noqa: F401  (loaded once, before the forks)

from benchmarks.forked import exit_code, start_program
from benchmarks.result import write_result
from data.jsonl import write_records
from data.tasks.word_arithmetic import WordArithmetic
from models.tiny import build_tiny
from runtime.manifest import find_damage
from training.checkpoint import checkpoints

PROGRAM = "trainer_base_ds_mul.py"
PRECISIONS = ("fp32", "bf16")


def prepare(folder: Path) -> list[str]:
    """Write the model and the data; the settings of every run."""
    rows = WordArithmetic(num_train=200, num_dev=20, num_test=20, num_demonstrations=200).demonstrations("train")
    texts = [row.prompt + row.completion for row in rows]
    shape = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 320, "max_length": 512, "seed": 0}
    build_tiny(folder / "tiny", texts, **shape)
    write_records(folder / "train.jsonl", rows[:100])
    write_records(folder / "dev.jsonl", rows[100:120])
    return f"""-cn train +examples@eval_examples=demonstrations model.path={folder}/tiny model.attention=eager
        examples.path={folder}/train.jsonl eval_examples.path={folder}/dev.jsonl batch_size=8 micro_batch_size=4
        max_steps=60 learning_rate=0.003 log_every=1 eval_every=3 save_every=2 keep_checkpoints=2
        keep_best=1""".split()


def digest_of(run: Path) -> str:
    """SHA-256 of the final weights and of the log, speeds left out."""
    digest = hashlib.sha256((run / "model" / "model.safetensors").read_bytes())
    for line in (run / "metrics.jsonl").read_text().splitlines():
        digest.update(line.partition(', "train/tokens_per_second"')[0].encode())
    return digest.hexdigest()


def last_step(run: Path) -> int:
    """The newest checkpoint's step, 0 without one."""
    found = checkpoints(run)
    return int(found[-1].name.removeprefix("step-")) if found else 0


def main() -> None:
    """Kill, restart, compare, write results/training_kills.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="training-kills-"))
    settings, log, rng = prepare(folder), folder / "runs.log", random.Random(arguments.seed)
    straight: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for precision in PRECISIONS:
        started = time.monotonic()
        run = folder / precision
        code = exit_code(start_program(PROGRAM, [*settings, f"precision={precision}", f"output_dir={run}"], log))
        if code:
            raise SystemExit(f"the uninterrupted run ended with exit code {code}: see {log}")
        straight[precision], seconds[precision] = digest_of(run), time.monotonic() - started
    counts: Counter[str] = Counter()
    steps: list[int] = []
    while counts["kills"] < arguments.kills or counts["runs"] < len(PRECISIONS):
        precision = PRECISIONS[counts["runs"] % len(PRECISIONS)]
        run = folder / f"killed-{counts['runs']}"
        counts += kill_until_done(run, [*settings, f"precision={precision}", f"output_dir={run}"], log, steps,
                                  rng, seconds[precision], arguments.kills - counts["kills"])  # fmt: skip
        counts["runs"] += 1
        counts["identical"] += digest_of(run) == straight[precision]
        print(f"{counts['kills']} kills, {counts['runs']} runs, {counts['identical']} identical", file=sys.stderr)
        shutil.rmtree(run)
    how = f"bash scripts/faults.sh training_kills --kills {arguments.kills}"
    print(write_result("training_kills", figures(counts, how), {**counts, "newest_checkpoint_at_kill": steps}))
    shutil.rmtree(folder)


def kill_until_done(
    run: Path, settings: list[str], log: Path, steps: list[int], rng: random.Random, seconds: float, kills_left: int
) -> Counter[str]:
    """One run, killed at most `kills_left` times; what was counted. Raises where it ends with an error."""
    counts: Counter[str] = Counter()
    while True:
        pid = start_program(PROGRAM, settings, log)
        if counts["kills"] < kills_left:
            time.sleep(rng.uniform(0.0, seconds))
            os.kill(pid, signal.SIGKILL)
        code = exit_code(pid)
        if code == 0:
            return counts
        if code != -signal.SIGKILL:
            raise SystemExit(f"a run ended with exit code {code}: see {log}")
        counts["kills"] += 1
        counts["kills_in_a_save"] += bool(list((run / "checkpoints").glob("*.partial")))
        counts["damaged"] += sum(bool(find_damage(path)) for path in checkpoints(run))
        steps.append(last_step(run))


def figures(counts: Counter[str], how: str) -> dict[str, Any]:
    """Runs that ended with the same bits, of all that were killed; damaged checkpoints seen."""
    share = counts["identical"] / counts["runs"]
    identical = {"value": share, "low": share, "high": share, "unit": "share", "goal": 1.0, "better": "higher"}
    damaged = counts["damaged"]
    whole = {"value": damaged, "low": damaged, "high": damaged, "unit": "checkpoints", "goal": 0, "better": "lower"}
    return {
        "kills_bit_identical": {**identical, "met": share == 1.0, "how": how},
        "checkpoints_damaged_by_kills": {**whole, "met": damaged == 0, "how": how},
    }


if __name__ == "__main__":
    main()
