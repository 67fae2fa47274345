"""`kill -9` reinforcement learning at random moments, start it again, and compare the end with an uninterrupted run.

    bash scripts/faults.sh rl_kills [--kills 20]

`main.py` trains a tiny model with PPO (a critic, an adaptive KL penalty, two epochs of minibatches) and with VinePPO
by turns, against benchmarks/processes/repeatable_server.py: what it samples is a function of the request and the
weights that were delivered, so a run that comes back exactly samples the same again. A checkpoint every second
iteration, an evaluation and an exported policy every third. A run is killed and started again until it ends; then the
next begins, until there were as many kills as asked for. Compared are the final policy and critic, every line of
metrics.jsonl (seconds left out) and every samples table, bit for bit.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM  # noqa: F401  (loaded once, before the forks)

from benchmarks.processes.forked import ROOT
from benchmarks.processes.killed import Killed, figures
from benchmarks.result import write_result
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.tiny import build_tiny

PROGRAM = "main.py"
KINDS = {
    "ppo": ["advantage=gae", "critic=policy", "kl=adaptive", "critic.learning_rate=0.001", "update.num_epochs=2"],
    "vineppo": ["advantage=vineppo", "advantage.completions_per_state=2", "kl=loss", "update.whitening=standard"],
}


def prepare(folder: Path) -> list[str]:
    """Write the model; the settings of every run."""
    rows = WordArithmetic(num_train=200, num_dev=20, num_test=20, num_demonstrations=200).demonstrations("train")
    texts = [row.prompt + row.completion for row in rows]
    shape = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 320, "max_length": 512, "seed": 0}
    build_tiny(folder / "tiny", texts, **shape)
    return f"""-cn rl model.path={folder}/tiny model.attention=eager server=none task.num_train=200 task.num_dev=20
        task.num_test=20 task.num_demonstrations=200 precision=fp32 params.max_tokens=12 num_iterations=8
        rollout.num_problems=4 rollout.group_size=4 update.minibatch_size=8 update.micro_batch_size=4
        update.learning_rate=0.003 update.schedule=linear
        update.warmup_steps=3 evaluation.every=3 evaluation.num_problems=4 checkpoints.save_every=2 checkpoints.keep=2
        checkpoints.keep_best=1 checkpoints.export_every=3
        samples.num_problems=2""".split()


def start_server(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """Return the server and its address."""
    command = [sys.executable, "-m", "benchmarks.processes.repeatable_server", "--model", str(folder / "tiny")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    return process, f"http://127.0.0.1:{process.stdout.readline().strip()}"


def digest_of(run: Path) -> str:
    """Return SHA-256 of what a finished run leaves behind, seconds left out."""
    digest = hashlib.sha256()
    for name in ("model", "critic"):
        for path in sorted((run / name).glob("*.safetensors")):
            digest.update(path.read_bytes())
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = {k: v for k, v in json.loads(line).items()
               if not k.startswith(("seconds/", "tokens_per_second/", "ranks/"))}  # fmt: skip
        digest.update(json.dumps(row).encode())
    for path in [*sorted(run.glob("samples/*.jsonl")), *sorted(run.glob("policies/*/*.safetensors"))]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def main() -> None:
    """Kill, restart, compare, write results/rl_kills.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="rl-kills-"))
    settings = prepare(folder)
    process, address = start_server(folder)
    try:
        runs = Killed(PROGRAM, [*settings, f"client.base_url={address}"], KINDS, digest_of, folder)
        counts, steps = runs.measure(arguments.kills, arguments.seed)
    finally:
        process.terminate()
        process.wait(10)
    how = f"bash scripts/faults.sh rl_kills --kills {arguments.kills}"
    found = figures(counts, "kills_exact", "rl_checkpoints_damaged_by_kills", how)
    print(write_result("rl_kills", found, {**counts, "newest_checkpoint_at_kill": steps}))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
