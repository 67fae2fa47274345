"""The loop for fixed datasets: steps, accumulation, evaluation, checkpoints. It knows no objective.

A step sums its losses over micro-batches and ranks and divides by the summed count. A run stopped at any
moment and started again goes on from its last checkpoint, bit for bit on CPU.
"""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data.examples import fingerprint
from data.loader import Loader
from runtime.distributed import sum_over_ranks
from runtime.schemas import TrainConfig
from runtime.tracking import Metrics, Progress
from training import checkpoint
from training.engine import Engine, autocast
from training.objectives.objective import Objective

log = logging.getLogger(__name__)


class NotFinite(RuntimeError):
    """A loss or gradient that is not a number: the run stops before it spoils the weights."""

    exit_code = 1


def learning_rate(step: int, max_steps: int, config: TrainConfig) -> float:
    """Linear warm-up over `warmup_steps`, then constant, linear to 0 or cosine to 0. `step` from 0."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, max_steps - config.warmup_steps)
    shapes = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
    if config.schedule not in shapes:
        raise checkpoint.BadCheckpoint(f"schedule must be one of {', '.join(shapes)}, got '{config.schedule}'")
    return config.learning_rate * shapes[config.schedule]


def reduce_metrics(sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """name → (sum, count) on this rank to name → mean over all ranks; every rank has the same names."""
    names = sorted(sums)
    totals = sum_over_ranks([value for name in names for value in sums[name]])
    pairs = zip(totals[0::2], totals[1::2], strict=True)
    return {name: total / max(count, 1e-12) for name, (total, count) in zip(names, pairs, strict=True)}


@dataclass
class Loop:
    """One training run: `run()` takes it from its last checkpoint to `max_steps`."""

    config: TrainConfig
    engine: Engine
    objective: Objective
    loader: Loader
    eval_loader: Loader | None
    pad_id: int
    run_dir: Path

    @property
    def max_steps(self) -> int:
        """Optimizer steps of the whole run."""
        if self.config.max_steps > 0:
            return self.config.max_steps
        return max(1, math.ceil(len(self.loader.examples) * self.config.num_epochs / self.config.batch_size))

    def run(self) -> None:
        """Train, evaluate, save."""
        config, max_steps = self.config, self.max_steps
        data = fingerprint(self.loader.examples)
        first = checkpoint.resume(self.run_dir, self.engine, data)
        if first:
            log.info("resuming %s at step %d of %d", self.run_dir, first, max_steps)
        metrics = Metrics(self.run_dir, config.tracking.tensorboard, first)
        with Progress("train", max_steps, "step", first, config.tracking.line_every_seconds) as progress:
            for step in range(first, max_steps):
                values = self.train_step(step)
                done = step + 1
                is_last = done == max_steps
                if done % config.log_every == 0 or is_last or done == 1:
                    metrics.log(done, {f"train/{name}": value for name, value in values.items()})
                progress.update(done, loss=values["loss"], tokens_per_second=values["tokens_per_second"])
                if self.eval_loader is not None and (is_last or _is_due(done, config.eval_every)):
                    evaluated = self.evaluate(self.eval_loader)
                    metrics.log(done, {f"eval/{name}": value for name, value in evaluated.items()})
                if not is_last and _is_due(done, config.save_every):
                    state = checkpoint.TrainState(done, data)
                    checkpoint.save(self.run_dir, self.engine, state, config.keep_checkpoints)
        metrics.close()

    def train_step(self, step: int) -> dict[str, float]:
        """One optimizer step; means over all ranks of the loss and of what the objective logs."""
        started = time.monotonic()
        self.engine.model.train()
        examples = self.loader.micro_batches(step)
        batches = [self.objective.collate(group, self.pad_id) for group in examples]
        count = sum_over_ranks([sum(self.objective.count(batch) for batch in batches)])[0]
        if count <= 0:
            raise NotFinite(f"step {step + 1}: nothing to learn from in {batches[0].example_ids[:4]} ...")
        rate = learning_rate(step, self.max_steps, self.config)
        if hasattr(self.engine, "set_learning_rate"):
            self.engine.set_learning_rate(rate)
        sums: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        tokens = 0.0
        for batch in batches:
            tokens += float(batch.attention_mask.sum())
            self._forward_backward(batch, count, sums, step)
        norm = self.engine.step(rate)
        sums["tokens"] = (tokens, 0.0)
        values = reduce_metrics({name: value for name, value in sums.items() if name != "tokens"})
        total_tokens = sum_over_ranks([tokens])[0]
        if not math.isfinite(norm):
            raise NotFinite(f"step {step + 1}: the gradient norm is {norm}: examples {batches[0].example_ids[:8]}")
        speed = total_tokens / (time.monotonic() - started)
        return {**values, "grad_norm": norm, "learning_rate": rate, "tokens_per_second": speed}

    def _forward_backward(self, batch: Any, count: float, sums: dict[str, tuple[float, float]], step: int) -> None:
        batch = batch.to(self.engine.device)
        with autocast(self.engine.device, self.config.precision):
            loss = self.objective.loss(self.engine.model, batch)
        total = float(loss.total.detach())
        if not math.isfinite(total):
            raise NotFinite(f"step {step + 1}: the loss is {total}: examples {', '.join(batch.example_ids[:8])}")
        self.engine.backward(loss.total / count)
        _add(sums, {**loss.metrics, "loss": (total, self.objective.count(batch))})

    @torch.no_grad()
    def evaluate(self, loader: Loader) -> dict[str, float]:
        """Means over the evaluation examples, each seen once."""
        self.engine.model.eval()
        sums: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        size = loader.micro_batch_size
        for start in range(loader.rank * size, len(loader.examples), size * loader.world_size):
            batch = self.objective.collate(loader.examples[start : start + size], self.pad_id)
            batch = batch.to(self.engine.device)
            with autocast(self.engine.device, self.config.precision):
                loss = self.objective.loss(self.engine.model, batch)
            _add(sums, {**loss.metrics, "loss": (float(loss.total), self.objective.count(batch))})
        return reduce_metrics(sums)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _add(sums: dict[str, tuple[float, float]], new: Mapping[str, tuple[float, float]]) -> None:
    for name, (total, count) in new.items():
        old = sums[name]
        sums[name] = (old[0] + total, old[1] + count)
