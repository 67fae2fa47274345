"""The life of a run around its iterations (`rl.iteration`).

A run stopped at any moment and started again goes on from its last checkpoint, an iteration border: problems,
minibatches and learning rates are functions of the iteration's number, parameters and optimizer come back bit
for bit. What the engine samples is its own. SIGTERM and SIGINT save one: that of the iteration before, at once, where
this one has learnt nothing yet; else at its end.
"""

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from espalier.data.records import BadInput
from espalier.rewards.score import HoldsEngines
from espalier.rl.delivery.delivery import sample_canaries
from espalier.rl.delivery.policy_weights import PolicyWeights
from espalier.rl.evaluation import Evaluation, is_budget_spent, read_evaluation, read_evaluations
from espalier.rl.iteration import Iteration
from espalier.rl.learner import RunState, write_model
from espalier.rl.ledger import read_waiting
from espalier.rl.probes.reward_falls import RewardWatch
from espalier.rl.rank_times import hand_over
from espalier.rl.samples import forget_evaluated
from espalier.rl.update import most_rollouts
from espalier.runtime.distributed import barrier, from_main_rank, is_main_rank, waits_heard_by
from espalier.runtime.errors import Stopped
from espalier.runtime.tracking import Metrics, Progress
from espalier.sampling.client import HasEngines
from espalier.training import checkpoint

log = logging.getLogger(__name__)

_NUM_CANARIES = 8


@dataclass(kw_only=True)
class Trainer(Iteration):
    """One run: `run()` takes it from its last checkpoint to `num_iterations`. `window`: the tokens that `problems` were
    chosen for (None: any)."""

    evaluation: Evaluation
    window: int | None = None
    _saved: int = field(default=0, init=False)  # after how many iterations there is a checkpoint
    _evaluated: dict[str, float] | None = field(default_factory=dict, init=False)  # of now; None: cut short

    @property
    def run_dir(self) -> Path:
        """Where everything is written."""
        return Path(self.config.output_dir)

    def run(self) -> None:
        """Train, evaluate, save checkpoints. Raises SystemExit, 143 or 130, after a signal."""
        config = self.config
        state = checkpoint.load(self.run_dir, self._state, self.problems.digest)
        first = self._saved = state.step
        if first:
            log.info("resuming %s after iteration %d of %d", self.run_dir, first, config.num_iterations)
        self.tracking = Metrics(self.run_dir, config.tracking, first, config)
        self.metrics.timeline.open(self.run_dir if is_main_rank() else None, first)
        if is_main_rank():
            self.rollout_source.go_on(*read_waiting(self.tracking.path))
            forget_evaluated(self.run_dir, first)
        self.evaluation.found = from_main_rank(lambda: read_evaluations(self.tracking.path, config.evaluation.metric))
        rewards = RewardWatch(self.tracking.path) if is_main_rank() else None
        line_every = config.tracking.line_every_seconds
        lines = Progress("rl", self._last_iteration, "iteration", first, line_every)
        with self.loop, waits_heard_by(self.metrics.wait), lines as progress:
            try:
                weights = self.policy.weights()
                if self.policy.average is not None and first == 0:
                    self.policy.average.start(weights)
                self.delivery.make_room()
                weights.on_all_ranks(lambda: self.loop.run(self._start(first, weights)))
                with self.stop:
                    is_stopped = self._go_on(first, state.is_evaluation_due, progress, rewards)
                hand_over(self.metrics)
            finally:
                if is_main_rank():
                    self.loop.run(self._stop())
                self.tracking.close()
        if is_stopped:
            barrier()  # a rank that ended while rank 0 closes its engines would end rank 0
            raise SystemExit(self.stop.exit_code)

    def _go_on(self, first: int, is_evaluation_due: bool, progress: Progress, rewards: RewardWatch | None) -> bool:
        """Make all iterations from `first` on; say whether a signal came before their end."""
        done = first
        try:
            is_new = first == 0 and not self.evaluation.found  # cut early it has been evaluated
            if is_evaluation_due:
                self._saved = 0
                self._after(first, from_main_rank(lambda: read_evaluation(self.tracking.path, first)))
                if self._saved != first:  # so that nobody evaluates it again
                    self._save(first, self._evaluated)
            elif is_new and self.config.evaluation.every > 0:
                self._evaluate(0)
            self._write_timeline()
            for iteration in range(first, self._last_iteration):
                if self.evaluation.is_patience_over(iteration) or self._is_budget_spent(iteration):
                    break
                values = self.iterate(iteration)
                done = iteration + 1
                self.tracking.log(done, values)
                self._write_timeline()
                if rewards is not None:
                    rewards.add(done, values)
                rate = values["rollout/tokens"] / values["seconds/iteration"]
                progress.update(done, accuracy=values["rollout/accuracy"], tokens_per_second=rate)
                self._after(done)
                self._write_timeline()
                if self.stop.agreed():
                    raise Stopped
        except Stopped:
            self._save_stopped(done)
            return True
        return False

    def _save_stopped(self, done: int) -> None:
        """After a signal, with the state after iteration `done`; on every rank."""
        self.stop.agreed()  # on its number
        if done != self._saved:
            self._save(done, self._evaluated)
        log.info("stopped by a signal after iteration %d of %d: the same command goes on", done, self._last_iteration)

    def _save(self, done: int, evaluated: dict[str, float] | None) -> None:
        """Write the checkpoint after iteration `done`, with its evaluation: empty where there is none, None where it
        was cut short."""
        config = self.config.checkpoints
        metrics = {name: value for name, value in (evaluated or {}).items() if name.startswith("eval/")}
        best = checkpoint.Best(f"eval/{self.config.evaluation.metric}", is_lowest=False, keep=config.keep_best)
        state = checkpoint.TrainState(done, self.problems.digest, metrics, is_evaluation_due=evaluated is None)
        checkpoint.save(self.run_dir, self._state, state, config.keep, best)
        self._saved = done

    @property
    def _state(self) -> RunState:
        scaling = [self.reward_scaling] if self.reward_scaling is not None else []
        return RunState(self.update.learners, [*scaling, self.watch, self.rollout_source])

    def _is_budget_spent(self, done: int) -> bool:
        """Say whether the iterations so far end the training by what they cost."""
        return from_main_rank(lambda: is_budget_spent(self.tracking.path, self.config, done))

    async def _start(self, version: int, weights: PolicyWeights) -> None:
        """Open the client, prove delivery on the canaries, and serve the policy of this version."""
        sampler, params = self.rollout_source.sampler, self.rollout_source.params
        await sampler.client.open()
        served = getattr(sampler.client, "max_model_length", None)
        if self.window is not None and served is not None and served < self.window:
            raise BadInput(f"the engine's window is {served} tokens, problems were chosen for {self.window}: run the "
                           "same command again")  # fmt: skip
        path, problems = self.run_dir / "canaries.jsonl", (self.problems.dev or self.problems.train)[:_NUM_CANARIES]
        canaries = await sample_canaries(path, problems, sampler, params, self.delivery.sync, version, weights)
        await self.delivery.start(version, weights, canaries, self.config.seed, most_rollouts(self.config))

    def _write_timeline(self) -> None:
        if is_main_rank():
            self.metrics.timeline.write(self.loop.run(self.rollout_source.sampler.take_work()))

    async def _stop(self) -> None:
        """Close the client, after whatever a signal or an error left waiting for it."""
        client = self.rollout_source.sampler.client
        own = client.own_tasks() if isinstance(client, HasEngines) else set()  # which its end waits for
        left = asyncio.all_tasks() - {asyncio.current_task()} - own
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        work = await self.rollout_source.sampler.take_work()
        await self.rollout_source.sampler.client.close()
        if isinstance(reward := self.rollout_source.reward, HoldsEngines):
            await asyncio.to_thread(reward.close)
        await asyncio.to_thread(
            self.delivery.sync.close
        )  # behind it: what a delivery that was cut waits for is gone now
        with suppress(OSError):  # on a full disk the run ends by what it was stopped by
            self.metrics.timeline.write(work)

    def _after(self, done: int, evaluated: dict[str, float] | None = None) -> None:
        """Evaluation, unless it was `evaluated` before a kill, exported policy and checkpoint after iteration `done`,
        where they are due."""
        config = self.config
        is_last = done == self._last_iteration
        self._evaluated = {}
        if config.evaluation.every > 0 and (is_last or done % config.evaluation.every == 0):
            self._evaluated = None
            self._evaluated = evaluated or self._evaluate(done)
        with self.metrics.clock.phase("save"):
            if config.checkpoints.export_every > 0 and done % config.checkpoints.export_every == 0:
                for learner in reversed(self.update.learners):  # the policy last, as in save_model
                    folder = self.run_dir / learner.kept_in / f"iteration-{done:06d}"
                    write_model(learner.save_model, self.rollout_source.sampler.tokenizer, folder)
            if config.checkpoints.save_every > 0 and not is_last and done % config.checkpoints.save_every == 0:
                self._save(done, self._evaluated)

    def _evaluate(self, version: int) -> dict[str, float]:
        """Return the metrics of an evaluation, logged."""
        with self._interruptible():
            values = self.evaluation(version)
        self.tracking.log(version, values)
        return values

    def save_model(self) -> None:
        """All that was trained, the policy's `model/` last: a run that has a model/ is finished."""
        for learner in reversed(self.update.learners):
            learner.export(self.rollout_source.sampler.tokenizer, self.run_dir)
        log.info("saved %s/model", self.run_dir)
