"""One iteration, and the life of a run around it.

A run stopped at any moment and started again goes on from its last checkpoint, an iteration border: problems,
minibatches and learning rates are functions of the iteration's number, parameters and optimizer come back bit
for bit. What the engine samples is its own. SIGTERM and SIGINT save one: that of the iteration before, at once, where
this one has learnt nothing yet; else at its end.

With several ranks rank 0 alone talks to the engine and scores, for as long as that takes (`from_main_rank`); all
ranks hold all rollouts, and share the forward and backward passes.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from espalier.data.records import BadInput
from espalier.rewards.score import HoldsEngines
from espalier.rl.credit_watch import StepWatch
from espalier.rl.delivery.delivery import Delivery, sample_canaries
from espalier.rl.delivery.policy_weights import PolicyWeights
from espalier.rl.estimator_context import AdvantageEstimator, EstimatorContext, estimate_of_main_rank
from espalier.rl.evaluation import Evaluation, is_budget_spent, read_accuracies, read_evaluation
from espalier.rl.experience import make_experience, token_rewards
from espalier.rl.iteration_metrics import Clock, IterationMetrics
from espalier.rl.learner import RunState, write_model
from espalier.rl.ledger import read_waiting
from espalier.rl.losses import whiten_around_mean
from espalier.rl.metrics import describe_experience, describe_kl, describe_rollouts, speeds
from espalier.rl.policy import Policy
from espalier.rl.probes.reward_falls import RewardWatch
from espalier.rl.probes.watch import Watch
from espalier.rl.rollout_source import Problems, RolloutSource
from espalier.rl.samples import RolloutLog, StepCredit
from espalier.rl.types import Estimate, Experience, RolloutGroup
from espalier.rl.update import Update
from espalier.runtime.background_loop import BackgroundLoop
from espalier.runtime.distributed import barrier, from_main_rank, is_main_rank
from espalier.runtime.errors import Stopped
from espalier.runtime.schemas import RLConfig
from espalier.runtime.tracking import Metrics, Progress
from espalier.sampling.client import HasEngines
from espalier.training import checkpoint
from espalier.training.stopping import StopSignals

log = logging.getLogger(__name__)

_NUM_CANARIES = 8


@dataclass
class Trainer:
    """One run: `run()` takes it from its last checkpoint to `num_iterations`.

    `update` trains `policy` and what learns beside it. `loop` is rank 0's, on which every await of the run happens.
    `window`: the tokens that `problems` were chosen for (None: any).
    """

    config: RLConfig
    problems: Problems
    rollout_source: RolloutSource
    estimator: AdvantageEstimator
    policy: Policy
    update: Update
    watch: Watch
    delivery: Delivery
    evaluation: Evaluation
    metrics: IterationMetrics
    samples: RolloutLog
    loop: BackgroundLoop
    pad_id: int
    window: int | None = None
    stop: StopSignals = field(default_factory=StopSignals, init=False)
    _counted: int = field(default=0, init=False)  # generated tokens that are in a row of metrics
    _steps: StepWatch = field(default_factory=StepWatch, init=False)
    _saved: int = field(default=0, init=False)  # after how many iterations there is a checkpoint
    _evaluated: dict[str, float] | None = field(default_factory=dict, init=False)  # of now; None: cut short

    # --- one iteration ------------------------------------------------------------------------------------------------

    def iterate(self, iteration: int) -> dict[str, float]:
        """Make one iteration (from 0); return its metrics. Raises Stopped where a signal came before it has learnt
        anything."""
        started, done = time.monotonic(), iteration + 1
        self.metrics.timeline.begin(done)
        sampler = self.rollout_source.sampler
        with self._interruptible():
            groups = self.rollout_source(iteration)
        if not self._asks_more(iteration):
            self.delivery.sleep()
        experience = self.make_experience(groups, iteration)
        has_learnt = any(learner.learns_in_score for learner in self.update.learners)
        with self._interruptible() if not has_learnt else nullcontext():
            estimate, experience = self.estimate(groups, experience, iteration)
        if not has_learnt and self.stop.agreed():
            raise Stopped
        further, num_further = self.ask_further(groups, experience, iteration)
        self.delivery.sleep()
        updated = self.learn(experience, iteration)
        weights = self.policy.next_weights()
        with self.rollout_source.at_rest(done):
            self.delivery.send(weights, done)
        if self._is_anything_due(done):
            self.delivery.prove_now()
        if is_main_rank() and self.samples.is_due(done):
            self.samples.write(done, groups, experience, estimate, further)
        values = self._measured(groups, experience, estimate, updated)
        values["epoch"] = done * self.config.rollout.num_problems / len(self.problems.train)
        # with the answers to further estimators nothing is trained: they are no cost of the run
        generated, self._counted = sampler.generated_tokens - self._counted, sampler.generated_tokens
        values["sampling/tokens"] = float(generated - num_further)
        ended = time.monotonic()
        self.metrics.timeline.end_iteration(started, ended)
        return values | {"seconds/iteration": ended - started}

    def make_experience(self, groups: Sequence[RolloutGroup], iteration: int) -> Experience:
        """Return the tensors of all rollouts, with what every learner says of them. Raises ProbeFailed.

        Where the update's only pass gives the old policy's log-probs, nobody has made them yet (`rl.old_logprobs`).
        """
        config = self.config
        with self.metrics.clock.phase("forward"):
            experience, scorer = make_experience(
                groups,
                self.policy.engine.model,
                pad_id=self.pad_id,
                micro_batch_size=config.update.micro_batch_size,
                precision=config.precision,
                temperature=self.rollout_source.params.temperature,
                clock=self.metrics.clock,
                micro_batch_tokens=config.update.micro_batch_tokens,
            )
            experience = replace(experience, rewards=token_rewards(groups, experience.response_mask))
            for learner in self.update.learners:
                experience = learner.score(groups, experience, scorer)
            distance = {}
            if experience.reference_logprobs is not None:
                distance = describe_kl(experience, groups) | {"kl/coefficient": self.policy.loss.kl.coefficient}
            if config.update.whitens_rewards:
                assert experience.rewards is not None
                rewards = whiten_around_mean(experience.rewards, experience.response_mask)
                experience = replace(experience, rewards=rewards)
        with self.metrics.clock.phase("probes"):
            self.metrics.add(self.watch.look(groups, experience, iteration))
            if experience.old.is_scored:  # before an estimator samples more, which costs more than a pass
                self.metrics.add(self.watch.compare(experience))
            self.watch.check_kl(distance.get("kl/per_token", 0.0))
        self.metrics.add(distance)
        return experience

    def estimate(
        self, groups: Sequence[RolloutGroup], experience: Experience, iteration: int
    ) -> tuple[Estimate, Experience]:
        """Return (the estimator's answer, the experience with its advantages). Raises BadInput where a learner cannot
        learn them."""
        clock = self.metrics.clock
        with clock.phase("advantage"):
            estimate = self.estimator(groups, experience, self._context(iteration, clock))
            estimate = estimate_of_main_rank(estimate, experience.response_mask)
            if is_main_rank():
                self._steps.look(estimate)
            if clock.has("completions"):  # they may have driven the marker out of the cache
                self.delivery.ask_marker()
            return estimate, self.update.assign(experience, estimate)

    def ask_further(
        self, groups: Sequence[RolloutGroup], experience: Experience, iteration: int
    ) -> tuple[dict[str, list[StepCredit]], int]:
        """Return (what further estimators say of the rollouts that are written down, the tokens sampled for it);
        nothing is trained with it, and the engines draw on as if nothing had been asked."""
        if not self.samples.estimators or not self.samples.is_due(iteration + 1):
            return {}, 0
        asks = any(estimator.samples_more for estimator in self.samples.estimators.values())
        kept = self.delivery.kept_random_state() if asks else nullcontext()
        with self.metrics.clock.phase("samples"), kept:
            context = self._context(iteration, Clock())  # all seconds are those of this phase
            further = self.samples.ask(groups, experience, context)
            if context.num_completions:
                self.delivery.ask_marker()
        counts = {"completions": context.num_completions, "completion_tokens": context.num_completion_tokens}
        self.metrics.add({name: float(count) for name, count in counts.items()}, "samples/")
        return further, context.num_completion_tokens

    def _asks_more(self, iteration: int) -> bool:
        """Say whether an estimator of this iteration may ask the engines, behind the rollouts."""
        further = self.samples.estimators.values() if self.samples.is_due(iteration + 1) else ()
        return any(estimator.samples_more for estimator in (self.estimator, *further))

    def _context(self, iteration: int, clock: Clock) -> EstimatorContext:
        """Return what estimators of this iteration may ask."""
        source = self.rollout_source
        return EstimatorContext(
            self.loop,
            source.sampler,
            source.reward,
            source.params,
            iteration,
            clock,
            policy=self.policy.engine.model,
            micro_batch_size=self.config.update.micro_batch_size,
            micro_batch_tokens=self.config.update.micro_batch_tokens,
            precision=self.config.precision,
        )

    def learn(self, experience: Experience, iteration: int) -> dict[str, float]:
        """Return every learner's steps; the update's metrics. Raises ProbeFailed where the policy has run away."""
        with self.metrics.clock.phase("update"):
            updated = self.update(experience, iteration)
            self.watch.check_update(updated.get("kl_old", 0.0), updated["kl_luckiest"])
            self.policy.adapt_penalty(experience)
        return updated

    def _measured(
        self, groups: Sequence[RolloutGroup], experience: Experience, estimate: Estimate, updated: dict[str, float]
    ) -> dict[str, float]:
        """Return all metrics of the iteration but those of time as a whole."""
        self.metrics.add(describe_rollouts(groups) | describe_experience(experience, estimate))
        self.metrics.add(updated, "update/")
        self.metrics.add(self.problems.left_out, "problems/")
        own_pass = experience.attention_mask[experience.old.in_own_pass]
        values = self.metrics.take() | {"forward/tokens": float(own_pass.sum())}
        return values | speeds(values, experience, self.config.update.num_epochs)

    # --- the life of a run --------------------------------------------------------------------------------------------

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
        if is_main_rank():
            self.metrics.timeline.open(self.run_dir, first)
            self.rollout_source.ledger.go_on(read_waiting(self.tracking.path))
        self.evaluation.accuracies = from_main_rank(lambda: read_accuracies(self.tracking.path))
        rewards = RewardWatch(self.tracking.path) if is_main_rank() else None
        line_every = config.tracking.line_every_seconds
        with self.loop, Progress("rl", self._last_iteration, "iteration", first, line_every) as progress:
            try:
                weights = self.policy.weights()
                if self.policy.average is not None and first == 0:
                    self.policy.average.start(weights)
                self.delivery.make_room()
                weights.on_all_ranks(lambda: self.loop.run(self._start(first, weights)))
                with self.stop:
                    is_stopped = self._go_on(first, state.is_evaluation_due, progress, rewards)
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
            is_new = first == 0 and not self.evaluation.accuracies  # cut early it has been evaluated
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

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Have a signal end what engines are waited for within the block, on all ranks, by Stopped."""
        self.loop.interrupts = self.stop.interrupts
        try:
            yield
        finally:
            self.loop.interrupts = nullcontext

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
        best = checkpoint.Best("eval/accuracy", is_lowest=False, keep=config.keep_best)
        state = checkpoint.TrainState(done, self.problems.digest, metrics, is_evaluation_due=evaluated is None)
        checkpoint.save(self.run_dir, self._state, state, config.keep, best)
        self._saved = done

    @property
    def _state(self) -> RunState:
        return RunState(self.update.learners)

    @property
    def _last_iteration(self) -> int:
        total, stop = self.config.num_iterations, self.config.stop_after
        return min(total, stop) if stop > 0 else total

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
        path, problems = self.run_dir / "canaries.jsonl", self.problems.dev[:_NUM_CANARIES]
        canaries = await sample_canaries(path, problems, sampler, params, self.delivery.sync, version, weights)
        await self.delivery.start(version, weights, canaries, self.config.seed)

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

    def _is_anything_due(self, done: int) -> bool:
        """Say whether the policy after iteration `done` is evaluated or kept, before there are rollouts from it."""
        every = (self.config.evaluation.every, self.config.checkpoints.export_every, self.config.checkpoints.save_every)
        return done == self._last_iteration or any(n > 0 and done % n == 0 for n in every)

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
                folder = self.run_dir / "policies" / f"iteration-{done:06d}"
                write_model(self.policy.save_model, self.rollout_source.sampler.tokenizer, folder)
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
