"""`kill -9` training at random moments, start it again each time, and compare the end with an uninterrupted run.

    bash scripts/faults.sh training_kills [--kills 50]

A tiny model is trained by `trainer_base_ds_mul.py` on invented demonstrations, with a checkpoint every second
step, an evaluation every third, the newest two and the best one kept, in float32 and in bfloat16 by turns. A run
is killed and started again until it ends; then the next begins, until there were as many kills as asked for. Every
checkpoint that a kill leaves is read through. Moments are drawn evenly over the length of the uninterrupted run.
"""

import argparse
import hashlib
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM  # noqa: F401  (loaded once, before the forks)

from benchmarks.processes.killed import Killed, figures
from benchmarks.result import write_result
from espalier.data.jsonl import write_records
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.tiny import build_tiny

PROGRAM = "trainer_base_ds_mul.py"
KINDS = {precision: [f"precision={precision}"] for precision in ("fp32", "bf16")}


def prepare(folder: Path) -> list[str]:
    """Write the model and the data; the settings of every run."""
    rows = WordArithmetic(num_train=200, num_dev=20, num_test=20, num_demonstrations=200).demonstrations("train")
    texts = [row.prompt + row.completion for row in rows]
    shape = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 320, "max_length": 512, "seed": 0}
    build_tiny(folder / "tiny", texts, **shape)
    write_records(folder / "train.jsonl", rows[:100])
    write_records(folder / "dev.jsonl", rows[100:120])
    return f"""-cn train +examples@eval_examples=demonstrations model.path={folder}/tiny model.attention=eager
        examples.path={folder}/train.jsonl eval_examples.path={folder}/dev.jsonl update.batch_size=8
        update.micro_batch_size=4
        max_steps=60 update.learning_rate=0.003 log_every=1 evaluation.every=3 checkpoints.save_every=2
        checkpoints.keep=2
        checkpoints.keep_best=1""".split()


def digest_of(run: Path) -> str:
    """Return SHA-256 of the final weights and of the log, speeds left out."""
    digest = hashlib.sha256((run / "model" / "model.safetensors").read_bytes())
    for line in (run / "metrics.jsonl").read_text().splitlines():
        digest.update(line.partition(', "train/tokens_per_second"')[0].encode())
    return digest.hexdigest()


def main() -> None:
    """Kill, restart, compare, write results/training_kills.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="training-kills-"))
    settings = prepare(folder)
    runs = Killed(PROGRAM, settings, KINDS, digest_of, folder)
    counts, steps = runs.measure(arguments.kills, arguments.seed)
    how = f"bash scripts/faults.sh training_kills --kills {arguments.kills}"
    found = figures(counts, "kills_bit_identical", "checkpoints_damaged_by_kills", how)
    print(write_result("training_kills", found, {**counts, "newest_checkpoint_at_kill": steps}))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
