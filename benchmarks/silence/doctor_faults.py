"""Ten faults planted one at a time; the doctor must name each by its check, and no other check.

The doctor runs as its users run it, in a process of its own, on tiny networks. What loads no network is asked with
`--quick`. A sound config comes first: none of its checks may fail.
"""

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes.forked import ROOT
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.tiny import build_tiny

RL = "exp/ppo/grpo_word_arithmetic"
PPO = "exp/ppo/ppo_word_arithmetic"
SMALL = ("client=vllm", "server.max_model_len=256", "server.options.max_num_seqs=32", "server.num_threads=1")
SFT = "exp/sft/word_arithmetic"
TASK = ("task.num_train=400", "task.num_dev=20", "task.num_test=20")
STALE = "+server.options.worker_extension_cls=benchmarks.silence.stale_worker.KeepsOneTensor"


@dataclass(frozen=True)
class Found:
    """What the doctor said of a fault: `named` where the one check that failed is `check`."""

    fault: str
    check: str
    named: bool
    failed: dict[str, str]


class Faults:
    """Makes what is planted below `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.policy = self.tiny("policy", seed=0)

    def tiny(self, name: str, seed: int, num_texts: int = 200) -> Path:
        """Return a policy and its tokenizer."""
        task = WordArithmetic(num_train=num_texts, num_dev=20, num_test=20, num_demonstrations=num_texts, seed=seed)
        texts = [row.prompt + row.completion for row in task.demonstrations("train")]
        shape = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 320, "max_length": 512, "seed": 0}
        return build_tiny(self.folder / name, texts, **shape)

    def changed(self, name: str, file: str, **settings: Any) -> Path:
        """Return a copy of the policy with other settings in one of its JSON files."""
        copy = self.folder / name
        shutil.copytree(self.policy, copy)
        found = json.loads((copy / file).read_text())
        (copy / file).write_text(json.dumps({**found, **settings}))
        return copy

    def reward_model(self, name: str, tokenizer: Path) -> Path:
        """Return a process reward model on the policy's body, with the tokenizer of another folder beside it."""
        from espalier.models.scalar_head import load_process_reward

        path = self.folder / name
        load_process_reward(str(self.policy), 1).save_pretrained(path)
        for file in tokenizer.glob("tokenizer*"):
            shutil.copy(file, path)
        return path

    def leaking_network(self) -> Path:
        """Return a policy whose layers with convolutions run on over the borders of packed rows."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        path = self.folder / "leaks"
        tokenizer = AutoTokenizer.from_pretrained(self.policy)
        config = AutoConfig.for_model(
            "lfm2", vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False,
        )  # fmt: skip
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
        tokenizer.save_pretrained(path)
        return path

    def examples(self) -> Path:
        """Return demonstrations to train on."""
        path = self.folder / "demonstrations.jsonl"
        rows = [{"id": f"d-{k}", "prompt": "Mia has 2 pens.\n", "completion": f"#### {k}"} for k in range(4)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def problems(self) -> Path:
        """Return a folder with a file of sums."""
        rows = [{"id": f"p-{k}", "question": f"What is {k} + 1?", "gold": str(k + 1)} for k in range(100)]
        (self.folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return self.folder

    def run(self, config: str, *words: str, is_quick: bool = True) -> dict[str, str]:
        """The failed checks of a run, name → line; later words take the place of earlier ones."""
        own = [f"model.path={self.policy}", f"output_dir={self.folder / 'run'}"]
        command = [sys.executable, "doctor.py", "-cn", config, *own, *words]
        command += ["--quick"] if is_quick else []
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode not in (0, 1):
            raise RuntimeError(f"the doctor ended with {done.returncode}: {done.stderr[-2000:]}")
        lines = [line for line in done.stdout.splitlines() if line.startswith("BAD ")]
        failed = {line[5:21].strip(): line[22:] for line in lines}
        if (done.returncode == 1) != bool(failed):
            raise RuntimeError(f"exit code {done.returncode}, failed: {failed}")
        return failed


@contextmanager
def full_disk(folder: Path) -> Iterator[Path]:
    """Give a file system of 64 KiB where one can be mounted; else /proc, which has no room at all."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True)
    try:
        yield folder if mounted.returncode == 0 else Path("/proc/espalier")
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", str(folder)], check=False)


def taken_port() -> socket.socket:
    """Return a socket that listens on a free port of loopback."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener


def plant(faults: Faults) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Return (fault, the check that has to name it, the checks that failed) of each."""
    chat = "{% for message in messages %}{{ message.role }}{% endfor %}"
    deaf = faults.changed("deaf", "tokenizer_config.json", chat_template=chat)
    asked = ("task=problem_file", f"task.path={faults.problems()}", "prompt@task.template=chat", "task.kind=number")
    words = (*asked, f"model.path={deaf}")
    yield "the chat template leaves out what the user says", "template", faults.run(RL, *words)

    endless = faults.changed("endless", "generation_config.json", eos_token_id=7)
    yield (
        "the end token is missing from what the engine stops at",
        "stop tokens",
        faults.run(RL, *TASK, f"model.path={endless}"),
    )

    with full_disk(faults.folder / "disk") as disk:
        yield "the disk is full", "disk", faults.run(RL, *TASK, f"output_dir={disk / 'run'}")

    foreign = faults.reward_model("foreign", faults.tiny("others", seed=1, num_texts=12))
    words = ("reward=process", f"reward.terms.process.path={foreign}")
    yield "the reward model has another tokenizer", "tokenizers agree", faults.run(RL, *TASK, *words)

    with taken_port() as listener:
        port = listener.getsockname()[1]
        yield "the server's port is taken", "port", faults.run(RL, *TASK, f"server.port={port}")

    yield "the engine's cache is larger than the memory", "memory", faults.run(RL, *TASK, "server.kv_cache_gib=4000")

    yield (
        "the engine keeps a tensor that it says it read",
        "engine",
        faults.run(RL, *TASK, *SMALL, STALE, is_quick=False),
    )

    words = (f"model.path={faults.leaking_network()}", f"examples.path={faults.examples()}", "update.layout=packed",
             "update.batch_size=4", "update.micro_batch_size=4")  # fmt: skip
    yield "rows leak into one another, and packing is forced", "packing", faults.run(SFT, *words, is_quick=False)

    words = ("task=problem_file", f"task.path={faults.folder}", "task.kind=choice")
    yield "the task's kind of answer knows no gold", "grader", faults.run(RL, *words)

    shares = faults.reward_model("shares", faults.policy)
    words = ("critic=reward_model", f"critic.model.path={shares}", "reward.right=5.0")
    yield "the critic says shares, rewards are points", "critic", faults.run(PPO, *TASK, *words)


def measure(folder: Path) -> list[Found]:
    """Examine a sound run, and every fault; the folder's own name is left out of what the doctor said."""

    def shown(failed: dict[str, str]) -> dict[str, str]:
        return {name: line.replace(str(folder), "FOLDER") for name, line in failed.items()}

    faults = Faults(folder)
    sound = faults.run(RL, *TASK, *SMALL, is_quick=False)
    found = [Found("none", "", not sound, sound)]
    for fault, check, failed in plant(faults):
        found.append(Found(fault, check, list(failed) == [check], shown(failed)))
        print(f"{'named' if found[-1].named else 'MISSED'}: {fault}: {failed}", file=sys.stderr, flush=True)
    return found
