"""The loop for fixed datasets: steps, accumulation, evaluation, checkpoints. It knows no objective.

A step sums its losses over micro-batches and ranks and divides by the summed count. A run stopped at any
moment and started again goes on from its last checkpoint, bit for bit on CPU. SIGTERM and SIGINT end it after
the step at hand (or at once in an evaluation, which is then made up for), with a checkpoint.
"""

import logging
import math
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import NoReturn

import torch

from espalier.data.batches.batch import Batch
from espalier.data.batches.loader import Loader
from espalier.data.batches.packing import Layout
from espalier.data.examples.stored_examples import fingerprint_of
from espalier.data.records import BadInput
from espalier.models.precision import autocast
from espalier.runtime.distributed import barrier, gather_over_ranks, sum_over_ranks, world_size
from espalier.runtime.errors import Stopped
from espalier.runtime.schemas import TrainConfig
from espalier.runtime.tracking import Metrics, Progress
from espalier.training import checkpoint
from espalier.training.engine import Engine
from espalier.training.objectives.objective import MeasuresStep, Objective
from espalier.training.reference_logprobs import ReferenceLogprobs
from espalier.training.schedule import num_steps, rate_at
from espalier.training.stopping import StopSignals
from espalier.training.sums import NotFinite, Sums

log = logging.getLogger(__name__)


@dataclass
class Loop:
    """One training run: `run()` takes it from its last checkpoint to `max_steps`."""

    config: TrainConfig
    engine: Engine
    objective: Objective
    loader: Loader
    eval_loader: Loader | None
    layout: Layout
    run_dir: Path
    stop: StopSignals = field(default_factory=StopSignals, init=False)
    num_skipped: int = field(default=0, init=False)
    _prepared: dict[int, Future[list[tuple[Batch, bool]]]] = field(default_factory=dict, init=False)
    _background: ThreadPoolExecutor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        config = self.config
        self.best = checkpoint.Best(
            config.checkpoints.best_metric, config.checkpoints.best_is == "lowest", config.checkpoints.keep_best
        )
        for key, choices in (("checkpoints.best_is", ("lowest", "highest")), ("update.on_nonfinite", ("stop", "skip")),
                             ("reference_logprobs", ("auto", "precomputed", "online"))):  # fmt: skip
            if (word := attrgetter(key)(config)) not in choices:
                raise BadInput(f"{key} must be {', '.join(choices[:-1])} or {choices[-1]}, got '{word}'")
        if config.update.on_nonfinite == "skip" and config.deepspeed:
            raise BadInput("update.on_nonfinite=skip cannot be had with DeepSpeed, which keeps its sums of gradients "
                           "to itself: set update.on_nonfinite=stop or deepspeed=none")  # fmt: skip
        if config.checkpoints.keep_best > 0 and (self.eval_loader is None or config.evaluation.every <= 0):
            raise BadInput(
                f"checkpoints.keep_best={config.checkpoints.keep_best} needs evaluations: set eval_examples and "
                "evaluation.every"
            )

    @property
    def max_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return num_steps(self.config, len(self.loader.examples))

    def run(self) -> None:
        """Train, evaluate, save.

        Raises BadCheckpoint where the run has done more steps than are asked for, and SystemExit, 143 or 130, after a
        signal.
        """
        config, max_steps = self.config, self.max_steps
        self.data = fingerprint_of(self.loader.examples)
        state = checkpoint.load(self.run_dir, self.engine, self.data, config.checkpoints.resume, self.best)
        first, self.num_skipped = state.step, state.num_skipped
        if first > max_steps:
            raise checkpoint.BadCheckpoint(f"{self.run_dir} has done {first} steps, more than {max_steps}")
        if first:
            log.info("resuming %s at step %d of %d", self.run_dir, first, max_steps)
        metrics = Metrics(self.run_dir, config.tracking, first, config)
        barrier()  # rank 0 may have a service to call
        progress = Progress("train", max_steps, "step", first, config.tracking.line_every_seconds)
        with progress, self.stop, ThreadPoolExecutor(1) as self._background:
            try:
                self._ask_reference()
                if state.is_evaluation_due:
                    self._evaluate_and_save(first, metrics)
                for step in range(first, max_steps):
                    values = self.train_step(step)
                    done = step + 1
                    if is_due(done, config.log_every) or done in (1, max_steps):
                        metrics.log(done, {f"train/{name}": value for name, value in values.items()})
                    progress.update(done, loss=values["loss"], tokens_per_second=values["tokens_per_second"])
                    is_saved = self._evaluate_and_save(done, metrics)
                    if self.stop.agreed():
                        self._save_and_exit(checkpoint.TrainState(done, self.data), is_saved)
            finally:
                metrics.close()

    def _ask_reference(self) -> None:
        """Compute the reference's log-probs once, where they are read more than once (or always, or never)."""
        how, reference = self.config.reference_logprobs, getattr(self.objective, "reference", None)
        num_read = self.max_steps * self.config.update.batch_size
        is_wanted = how == "precomputed" or (how == "auto" and num_read > len(self.loader.examples))
        if reference is None or not is_wanted:
            return
        temperature = getattr(self.objective, "temperature", 1.0)
        asked = ReferenceLogprobs(reference, temperature, self.run_dir)
        try:
            with autocast(self.engine.device, self.config.precision):
                asked.fill(self._reference_batches, min(self.max_steps, self._steps_per_epoch))
        except Stopped:  # there is nothing to save: a file of sums is written whole or not at all
            raise SystemExit(self.stop.exit_code) from None
        self.objective.reference = asked  # type: ignore[attr-defined]

    @property
    def _steps_per_epoch(self) -> int:
        return math.ceil(len(self.loader.examples) / self.config.update.batch_size)

    def _reference_batches(self, first: int) -> Iterator[Batch]:
        """Return this rank's batches of the first epoch from step `first` on, and, from 0 on, of an evaluation."""
        loader = self.eval_loader if first == 0 else None
        evaluation = self._evaluation_batches(loader) if loader is not None else iter(())
        for step in range(first, min(self.max_steps, self._steps_per_epoch)):
            if self.stop.agreed():
                raise Stopped
            yield from (batch.to(self.engine.device) for batch, _ in self._collate(step))
        yield from (batch.to(self.engine.device) for batch, _ in evaluation)

    def _evaluate_and_save(self, done: int, metrics: Metrics) -> bool:
        """Return what follows step `done` where it is due; whether a checkpoint was saved."""
        config, values = self.config, {}
        is_last = done == self.max_steps
        if self.eval_loader is not None and (is_last or is_due(done, config.evaluation.every)):
            try:
                means = self.evaluate(self.eval_loader)
            except Stopped:
                self._save_and_exit(checkpoint.TrainState(done, self.data, is_evaluation_due=True))
            values = {f"eval/{name}": value for name, value in means.items()}
            metrics.log(done, values)
            if self.best.keep and self.best.metric not in values:
                raise BadInput(f"checkpoints.best_metric {self.best.metric} is none of {', '.join(values)}")
        state = checkpoint.TrainState(done, self.data, values)
        is_save_due = not is_last and is_due(done, config.checkpoints.save_every)
        if is_save_due or (values and checkpoint.is_among_best(self.run_dir, state, self.best)):
            self._save(state)
            return True
        return False

    def _save(self, state: checkpoint.TrainState) -> None:
        state = replace(state, num_skipped=self.num_skipped)
        checkpoint.save(self.run_dir, self.engine, state, self.config.checkpoints.keep, self.best)

    def _save_and_exit(self, state: checkpoint.TrainState, is_saved: bool = False) -> NoReturn:
        """After a signal."""
        if not is_saved:
            self._save(state)
        log.info("stopped by a signal after step %d of %d: the same command goes on", state.step, self.max_steps)
        raise SystemExit(self.stop.exit_code)

    def train_step(self, step: int) -> dict[str, float]:
        """Take one optimizer step; return means over all ranks of the loss and of what the objective logs.

        Raises NotFinite where nothing can be learnt from its examples, and where the loss or the norm of the gradient
        is not finite and the step may not be skipped.
        """
        started = time.monotonic()
        rate = rate_at(step, self.max_steps, self.config)
        self.engine.model.train()
        batches = self._batches(step)
        self.engine.start_step(len(batches))
        counted = [batch for batch, is_counted in batches if is_counted]
        counts = [self.objective.count(batch) for batch in counted]
        # Ranks that share their examples (tensor parallelism) count them once in the speed.
        tokens = sum(batch.num_tokens for batch in counted) * self.loader.world_size / world_size()
        count, tokens = sum_over_ranks([sum(counts), tokens])
        if count <= 0:
            raise NotFinite(f"step {step + 1}: nothing to learn from in {', '.join(batches[0][0].example_ids[:4])} ...")
        self._measure(batches)
        sums = Sums()
        bad: list[str] = []
        for batch, is_counted in batches:
            loss, metrics = self._loss(batch, is_counted)
            sums.add(metrics)
            bad += [] if math.isfinite(metrics["loss"][0]) else batch.example_ids
            self.engine.backward(loss / count)
        values = {**sums.means(), "learning_rate": rate}
        if math.isfinite(values["loss"]):  # on every rank alike
            norm = self.engine.step(rate)
            values["grad_norm"] = norm
            if not math.isfinite(norm):
                ids = [name for batch in counted for name in batch.example_ids]
                self._leave_out(f"step {step + 1}: the gradient norm is {norm}: examples {_first(ids)}")
        else:
            self._leave_out(f"step {step + 1}: the loss is {values['loss']}: examples {_first(bad)}")
        if self.num_skipped:
            values["skipped_steps"] = float(self.num_skipped)
        return {**values, "tokens_per_second": tokens / (time.monotonic() - started)}

    def _collate(self, step: int) -> list[tuple[Batch, bool]]:
        """Return (micro-batch, whether it is counted): where this rank has no example left for a micro-batch that
        others have, one of the step takes part in the passes, as ZeRO-3 needs, and adds nothing."""
        stand_in = [self.loader.stand_in(step)]
        groups = self.loader.micro_batches(step)
        return [(self.objective.collate(group or stand_in, self.layout), bool(group)) for group in groups]

    def _batches(self, step: int) -> list[tuple[Batch, bool]]:
        """Return this rank's micro-batches of a step; those of the next one are made while this one is computed."""
        at_hand = self._prepared.pop(step, None)
        batches = at_hand.result() if at_hand is not None else self._collate(step)
        self._prepared.clear()
        if self._background is not None and step + 1 < self.max_steps:
            self._prepared[step + 1] = self._background.submit(self._collate, step + 1)
        return batches

    def _leave_out(self, reason: str) -> None:
        """Skip a step that is not finite, its data with it, where that is asked for and not once too often."""
        if self.config.update.on_nonfinite != "skip":
            raise NotFinite(reason)
        if self.num_skipped >= self.config.update.max_skipped:
            raise NotFinite(f"{reason}: {self.num_skipped} steps were skipped before it (update.max_skipped)")
        self.engine.discard()
        self.num_skipped += 1
        log.warning("skipped %s", reason)

    @torch.no_grad()
    def _measure(self, batches: Iterable[tuple[Batch, bool]]) -> None:
        """Give an objective that needs it its mean over the whole step; False: a batch that is not counted."""
        if not isinstance(self.objective, MeasuresStep):
            return
        total, count = 0.0, 0.0
        for batch, is_counted in batches:
            with autocast(self.engine.device, self.config.precision):
                measured = self.objective.measure(self.engine.model, batch.to(self.engine.device))
            total, count = (total + measured[0], count + measured[1]) if is_counted else (total, count)
        total, count = sum_over_ranks([total, count])
        self.objective.step_mean = total / max(count, 1e-12)

    def _loss(self, batch: Batch, is_counted: bool) -> tuple[torch.Tensor, dict[str, tuple[float, float]]]:
        """Return the summed loss of one batch, and the (sum, count) of it and of what the objective logs; all of them
        0, the gradient too, where the batch is not counted."""
        batch = batch.to(self.engine.device)
        with autocast(self.engine.device, self.config.precision):
            loss = self.objective.loss(self.engine.model, batch)
        if not is_counted:
            return 0.0 * loss.total, dict.fromkeys([*loss.metrics, "loss"], (0.0, 0.0))
        return loss.total, {**loss.metrics, "loss": (float(loss.total.detach()), self.objective.count(batch))}

    @torch.no_grad()
    def evaluate(self, loader: Loader) -> dict[str, float]:
        """Return means over the evaluation examples, each counted once.

        Every rank makes as many forward passes (ZeRO-3 gathers weights in each): a rank that has no batch
        left repeats the first one and does not count it.
        """
        self.engine.model.eval()
        sums = Sums()
        self._measure(self._evaluation_batches(loader))
        for batch, is_counted in self._evaluation_batches(loader):
            sums.add(self._loss(batch, is_counted)[1])
        return sums.means()

    def _evaluation_batches(self, loader: Loader) -> Iterator[tuple[Batch, bool]]:
        """Return (batch, whether it is counted) of this rank."""
        groups, ranks = loader.evaluation_batches(), loader.world_size
        for place in range(loader.rank, math.ceil(len(groups) / ranks) * ranks, ranks):
            if self.stop.agreed():
                raise Stopped
            group = groups[place] if place < len(groups) else groups[0]
            yield self.objective.collate(group, self.layout), place < len(groups)


def is_due(step: int, every: int) -> bool:
    """Say whether what happens `every` so many steps (0: never) happens after `step` steps."""
    return every > 0 and step % every == 0


def _first(names: list[str]) -> str:
    """Return the first few of all ranks' names; called on every rank."""
    everyone = [name for part in gather_over_ranks(names) for name in part]
    return ", ".join(everyone[:8]) + (" ..." if len(everyone) > 8 else "")
