"""TRL's side: GRPOTrainer at the best exact setting found for a CPU, one iteration whenever it is asked.

    .venv-bench/bin/python -m benchmarks.rl.peer MODEL SETTINGS.json [--loss ROLLOUTS.pt]

An iteration is 64 problems x 8 samples, one optimizer step on all of them; the problems are those of the other side.
TRL generates with transformers, as it does without a GPU. With `--loss` it prints its loss and gradient norm on given
rollouts instead.
"""

import argparse
import json
import logging
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl import __version__ as trl_version

from benchmarks.rl.drawn_rewards import drawn_reward
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.rl.problem_order import draw_problems


class Turns(TrainerCallback):
    """Waits before every step, generation included, and answers after it."""

    def __init__(self) -> None:
        self.started = 0.0
        self.lengths: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not sys.stdin.readline():
            raise SystemExit(0)
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        seconds = time.perf_counter() - self.started
        answer = {"seconds": seconds, "response_length": self.lengths[-1], "trl": trl_version}
        print("result " + json.dumps(answer), flush=True)


def make_trainer(model: str, settings: dict[str, Any], turns: Turns) -> GRPOTrainer:
    """`settings`: num_problems, group_size, micro_batch_size, max_tokens, learning_rate, num_steps, seed, options;
    `has_drawn_rewards`: in place of the task's."""
    task = WordArithmetic()
    every, steps = task.problems("train"), range(settings["num_steps"])
    problems = [row for step in steps for row in draw_problems(every, settings["num_problems"], settings["seed"], step)]
    gold = {task.prompt(problem): problem.gold for problem in problems}

    def reward(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        turns.lengths.append(sum(map(len, completion_ids)) / len(completion_ids))
        if settings.get("has_drawn_rewards"):
            return [drawn_reward(ids) for ids in completion_ids]
        pairs = zip(prompts, completions, strict=True)
        return [float(task.grade(gold[prompt], text).is_correct) for prompt, text in pairs]

    total = settings["num_problems"] * settings["group_size"]
    micro = min(settings["micro_batch_size"], total)
    options = {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": total // micro,
        "num_generations": settings["group_size"],
        "max_completion_length": settings["max_tokens"],
        "temperature": 1.0,
        "learning_rate": settings["learning_rate"],
        "lr_scheduler_type": "constant",
        "max_steps": settings["num_steps"],
        "seed": settings["seed"],
        "shuffle_dataset": False,  # the other side's problems, in its order
        "beta": 0.0,
        "loss_type": "dapo",
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "model_init_kwargs": {"attn_implementation": settings["attention"], "dtype": "float32"},
        "bf16": settings["precision"] == "bf16",
        **settings.get("options", {}),
    }
    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(output_dir=tempfile.mkdtemp(prefix="peer-"), **options),
        train_dataset=Dataset.from_dict({"prompt": [task.prompt(problem) for problem in problems]}),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        callbacks=[turns],
    )


def loss_of(trainer: GRPOTrainer, path: Path) -> dict[str, float]:
    """Return loss and gradient norm on rollouts that were made elsewhere (benchmarks/rl/same_loss.py)."""
    rollouts = torch.load(path, weights_only=True)
    model = trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    trainer.args.steps_per_generation = 1
    inputs = {**rollouts, "num_items_in_batch": rollouts["completion_mask"].sum()}
    loss = trainer._compute_loss(model, inputs)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    return {"loss": float(loss), "grad_norm": float(norm)}


def main() -> None:
    """Serve iterations, or print a loss."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("settings", type=Path)
    parser.add_argument("--loss", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bars()
    settings = json.loads(arguments.settings.read_text())
    trainer = make_trainer(arguments.model, settings, Turns())
    if arguments.loss:
        print("result " + json.dumps(loss_of(trainer, arguments.loss)), flush=True)
    else:
        trainer.train()


if __name__ == "__main__":
    main()
