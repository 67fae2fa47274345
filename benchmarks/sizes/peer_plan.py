"""What is compared in `benchmarks.sizes.peers`: the network, its examples, how many of them and for how long."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.processes.forked import exit_code, start
from benchmarks.sizes.qwen_shape import TINY, QwenShape, write_qwen
from benchmarks.training.corpus import Lengths, Sizes, build
from benchmarks.training.settings import Settings
from espalier.data.tasks.word_arithmetic import WordArithmetic

SIDES = {"product": "this project", "default": "TRL as it comes", "best": "TRL at its best"}
LARGEST_GAP = {"fp32": 1e-3, "bf16": 2e-3}  # of a loss, relative
# A quarter of the lengths of `benchmarks.training`: 3 GFLOP per token.
LENGTHS = Lengths(demonstration=(8, 128), side=(4, 16), prompt=(8, 24), steps=(3, 12), step=(2, 6))


def name_of(method: str, precision: str) -> str:
    """Return what a method's results are called; float32 is not named."""
    return method if precision == "fp32" else f"{method}_{precision}"


@dataclass(frozen=True)
class Plan:
    """`batch` examples per step (of DPO half as many pairs), so many `steps` of a process, `rounds` of all sides, on so
    many `threads`, in a `precision`: fp32, or bf16 (autocast over float32 weights)."""

    shape: QwenShape
    batch: int
    steps: int
    rounds: int
    threads: int
    precision: str = "fp32"

    @property
    def problems(self) -> int:
        """Of an iteration of GRPO, each sampled eight times."""
        return max(1, self.batch // 4)

    @property
    def new_tokens(self) -> int:
        """Of every answer of GRPO."""
        return 8 if self.shape == TINY else 64

    def of_a_run(self) -> dict[str, Any]:
        """Return what the answer of a process depends on: how many more rounds there are is none of it."""
        return {name: value for name, value in asdict(self).items() if name != "rounds"}

    def settings(self) -> dict[str, Settings]:
        """Return what the sides of each method have in common."""
        whole = Settings(self.batch, 1e-5, self.precision)
        return {"sft": whole, "dpo": replace(whole, batch_size=max(1, self.batch // 2)), "prm": whole}

    def data(self, work: Path) -> Path:
        """Return the folder of the network and its examples, which is made where it is not there."""
        made_of = json.dumps([asdict(self.shape), self.batch, self.steps, asdict(LENGTHS), self.precision])
        folder = work / f"data-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}"
        if not folder.is_dir():
            partial_folder = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
            partial_folder.mkdir(parents=True)
            if exit_code(start(lambda: self._build(partial_folder))):
                raise SystemExit("error: the network and its examples were not made: the reason stands above")
            partial_folder.replace(folder)
        return folder

    def _build(self, folder: Path) -> None:
        number = self.batch * self.steps
        build(folder, Sizes(number, max(1, number // 2), number), lengths=LENGTHS, settings=self.settings(),
              write_policy=self._write_policy)  # fmt: skip

    def _write_policy(self, folder: Path, texts: Sequence[str]) -> None:
        """The network; its tokenizer has also learnt the words of the task that rollouts are sampled of."""
        task = WordArithmetic()
        write_qwen(folder, [*texts, *map(task.prompt, task.problems("train")[:200])], self.shape)
