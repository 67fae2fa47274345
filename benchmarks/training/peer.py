"""TRL's side: SFTTrainer, DPOTrainer and PRMTrainer as they come, and at the best exact setting found for a CPU.

    .venv-bench/bin/python -m benchmarks.training.peer FOLDER sft default

As it comes: its defaults (8 examples a device, shuffled, padded, gradient checkpointing, bfloat16 autocast); what
both sides must share is set: effective batch, learning rate without a schedule. Best: what was found
fastest among its exact settings (see `BEST`). A run is timed from the begin of its epoch to the end of its last
step; loading, tokenisation and (best) reference log-probs come before. A run at its best setting has as many steps
as one of transformers' blocks of length-sorted batches, so that long and short batches are all in it.
"""

import argparse
import json
import logging
import shutil
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from transformers import AutoModelForTokenClassification, AutoTokenizer, TrainerCallback

from benchmarks.processes.sides import serve
from benchmarks.training.clock import StepClock
from benchmarks.training.corpus import read_ids, tokens_of
from benchmarks.training.settings import SETTINGS, read_settings

BEST: dict[str, dict[str, Any]] = {
    "sft": {"train_sampling_strategy": "group_by_length", "gradient_checkpointing": False},
    "dpo": {
        "precompute_ref_log_probs": True,
        "train_sampling_strategy": "group_by_length",
        "length_column_name": "length",
        "remove_unused_columns": False,
        "gradient_checkpointing": False,
    },
    "prm": {"train_sampling_strategy": "group_by_length", "gradient_checkpointing": False},
}
# Micro-batches of the best setting; None: the whole step in one.
BEST_MICRO_BATCH: dict[str, int | None] = {"sft": 8, "dpo": 8, "prm": 8}
BEST_ATTENTION = {"sft": "sdpa", "dpo": "sdpa", "prm": "sdpa"}


class Clock(TrainerCallback):
    """When the first epoch began and each step ended."""

    def __init__(self) -> None:
        self.step = StepClock()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.step.moments:
            self.step.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step.end()


class Watched:
    """A collator that notes which examples it is given and how many tokens it makes of them."""

    def __init__(self, collator: Any, names: dict[tuple[int, ...], str]):
        self.collator, self.names = collator, names
        self.batches: list[list[str]] = []
        self.computed: list[int] = []

    def __call__(self, rows: list[dict[str, Any]]) -> Any:
        self.batches.append([self.names[key_of(row)] for row in rows])
        batch = self.collator(rows)
        self.computed.append(batch["input_ids"].numel())
        return batch


def key_of(row: dict[str, Any]) -> tuple[int, ...]:
    """Return what an example is known by once its name is dropped."""
    return tuple(row["input_ids"] if "input_ids" in row else row["prompt_ids"] + row["chosen_ids"])


def trainer_class(kind: str) -> Any:
    """Return the trainer of a kind and its config, watched: every micro-batch's share of its step's loss is noted."""
    if kind == "sft":
        from trl import SFTConfig as Config
        from trl import SFTTrainer as Trainer
    elif kind == "dpo":
        from trl import DPOConfig as Config
        from trl import DPOTrainer as Trainer
    else:
        from trl.experimental.prm import PRMConfig as Config
        from trl.experimental.prm import PRMTrainer as Trainer

    class WatchedTrainer(Trainer):  # type: ignore[misc, valid-type]
        def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(*arguments, **options)
            self.micro_losses.append(float(loss))
            return loss

    return WatchedTrainer, Config


class Peer:
    """One kind at one setting; `run` trains from the initial weights."""

    def __init__(self, folder: Path, kind: str, variant: str, overrides: dict[str, Any]):
        self.folder, self.kind = folder, kind
        self.rows = read_ids(folder, kind)
        self.names = {key_of(row): row["id"] for row in self.rows}
        self.by_id = {row["id"]: row for row in self.rows}
        settings = read_settings(folder, kind)
        options = dict(BEST[kind]) if variant == "best" else {}
        micro = (BEST_MICRO_BATCH[kind] or settings.batch_size) if variant == "best" else 8
        options |= overrides
        micro = min(options.pop("micro", micro), settings.batch_size)
        default_attention = BEST_ATTENTION[kind] if variant == "best" else "sdpa"
        self.attention = options.pop("attention", default_attention)
        self.accumulation = settings.batch_size // micro
        self.options = {
            "per_device_train_batch_size": micro,
            "gradient_accumulation_steps": self.accumulation,
            "learning_rate": settings.learning_rate,
            "lr_scheduler_type": "constant",
            "bf16": settings.precision == "bf16",
            "use_cpu": True,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            **options,
        }

    def trainer(self, question: dict[str, Any]) -> Any:
        """Return a fresh trainer on the initial weights."""
        trainer, config = trainer_class(self.kind)
        scratch = tempfile.mkdtemp(prefix="peer-")
        options = {**self.options, "output_dir": scratch, "seed": question.get("seed", 0)}
        rows, options["max_steps"] = self.rows, question.get("max_steps", -1)
        if "step_ids" in question:
            rows = [self.by_id[name] for step in question["step_ids"] for name in step]
            options |= {"max_steps": len(question["step_ids"]), "train_sampling_strategy": "sequential"}
        columns = ("prompt", "chosen", "rejected") if self.kind == "dpo" else ("input_ids", "labels")
        table = {name: [row[name] for row in rows] for name in columns}
        if "length_column_name" in options:
            table["length"] = [tokens_of(row) for row in rows]
        model: Any = str(self.folder / "policy")
        if self.kind == "prm":
            model = AutoModelForTokenClassification.from_pretrained(
                self.folder / "prm", dtype=torch.float32, attn_implementation=self.attention
            )
        else:
            options["model_init_kwargs"] = {"attn_implementation": self.attention}
        tokenizer = AutoTokenizer.from_pretrained(self.folder / "policy")
        data = Dataset.from_dict(table)
        made = trainer(model=model, args=config(**options), train_dataset=data, processing_class=tokenizer)
        shutil.rmtree(scratch, ignore_errors=True)
        assert next(made.model.parameters()).dtype == torch.float32
        if self.kind == "dpo":
            _check_same_ids(rows, made.train_dataset)
        made.micro_losses = []
        made.data_collator = Watched(made.data_collator, self.names)
        return made

    def run(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return steps over shuffled examples (`max_steps`, `seed`), or over given ones (`step_ids`): seconds, losses,
        examples, tokens without and with padding."""
        started = time.perf_counter()
        trainer = self.trainer(question)
        prepare = time.perf_counter() - started
        clock = Clock()
        trainer.add_callback(clock)
        trainer.train()
        num_batches, size, watched = len(trainer.micro_losses), self.accumulation, trainer.data_collator
        cuts = range(0, num_batches, size)
        step_ids = [[name for batch in watched.batches[cut : cut + size] for name in batch] for cut in cuts]
        return {
            **clock.step.result(),
            "prepare_seconds": prepare,
            "losses": [sum(trainer.micro_losses[cut : cut + size]) for cut in cuts],
            "step_ids": step_ids,
            "tokens": sum(tokens_of(self.by_id[name]) for step in step_ids for name in step),
            "computed_tokens": sum(watched.computed[:num_batches]),
            "version": trl_version(),
        }


def _check_same_ids(rows: list[dict[str, Any]], made: Any) -> None:
    """TRL tokenises pairs itself: into the same ids."""
    for row, own in zip(rows, made, strict=True):
        for name in ("prompt_ids", "chosen_ids", "rejected_ids"):
            if row[name] != own[name]:
                raise SystemExit(f"{row['id']}: TRL's {name} differ from the file's")


def trl_version() -> str:
    """Of the TRL that this side runs."""
    import trl

    return str(trl.__version__)


def main() -> None:
    """Serve runs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("kind", choices=list(SETTINGS))
    parser.add_argument("variant", choices=["default", "best"])
    parser.add_argument("--options", type=json.loads, default={}, help="JSON: TRL's options, micro, attention")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bars()
    serve(Peer(arguments.folder, arguments.kind, arguments.variant, arguments.options).run)


if __name__ == "__main__":
    main()
