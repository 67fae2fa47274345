"""TRL's side of the training part: SFTTrainer or DPOTrainer on the same folder and tokens, in bf16, as long as the
product's run, with its optimizer's settings and constant rate. DPO's reference is computed before the first step, as
the product does it.

    .venv-bench/bin/python -m benchmarks.gpu.trl_side FOLDER sft|dpo SHAPE_AS_JSON

Prints one JSON line: tokens per second of every step after the warm-up, losses, peak memory.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from transformers import AutoTokenizer, TrainerCallback


class Clock(TrainerCallback):
    """When each step ended, and its loss."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.losses: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.losses += [logs["loss"]] if logs and "loss" in logs else []


def table(path: Path, kind: str, tokenizer: Any) -> Dataset:
    """Return demonstrations as ids and labels, the prompt left out; pairs as texts."""
    read = [json.loads(line) for line in path.read_text().splitlines()]
    if kind == "dpo":
        return Dataset.from_list([{name: row[name] for name in ("prompt", "chosen", "rejected")} for row in read])
    rows = []
    for row in read:
        prompt = tokenizer(row["prompt"]).input_ids
        answer = [*tokenizer(row["completion"]).input_ids, tokenizer.eos_token_id]
        rows.append({"input_ids": [*prompt, *answer], "labels": [*[-100] * len(prompt), *answer]})
    return Dataset.from_list(rows)


def main() -> None:
    """Train."""
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    folder, kind, shape = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    is_pairs = kind == "dpo"
    make, trainer_of = (DPOConfig, DPOTrainer) if is_pairs else (SFTConfig, SFTTrainer)
    more = {"precompute_ref_log_probs": True, "precompute_ref_batch_size": shape["micro"]} if is_pairs else {}
    disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    data = table(folder / f"{kind}.jsonl", kind, tokenizer)
    with tempfile.TemporaryDirectory(prefix="trl-") as scratch:
        config = make(
            output_dir=scratch, per_device_train_batch_size=shape["micro"], max_steps=shape["num_steps"],
            gradient_accumulation_steps=shape["batch"] // shape["micro"], learning_rate=1e-5, bf16=True,
            lr_scheduler_type="constant", adam_beta2=0.95, weight_decay=0.0,
            gradient_checkpointing=False, logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True,
            max_length=shape["length"], model_init_kwargs={"dtype": torch.float32},
            use_cpu=not torch.cuda.is_available(), **more,
        )  # fmt: skip
        trainer = trainer_of(str(folder / "model"), args=config, train_dataset=data, processing_class=tokenizer)
        clock = Clock()
        trainer.add_callback(clock)
        trainer.train()
    tokens = shape["batch"] * shape["length"] * (2 if is_pairs else 1)
    seconds = [after - before for before, after in zip(clock.ends, clock.ends[1:], strict=False)]
    speeds = [tokens / one for one in seconds[max(0, shape["num_warm"] - 1) :]]
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    print(json.dumps({"speeds": speeds, "losses": clock.losses, "peak_gib": round(peak, 2)}))


if __name__ == "__main__":
    main()
