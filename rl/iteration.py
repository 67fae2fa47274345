"""One iteration of reinforcement learning: rollouts, what is said of them, credit, update, delivery.

With several ranks rank 0 leads (`runtime.leading`): it alone talks to the engine, and holds the rollouts, their tensors
and what is estimated of them. All ranks share the forward and backward passes, those of a reward's networks too, for
which each gets the rows it computes (`rl.row_parts`); deliveries are made by all together.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch

from espalier.rl.credit_watch import StepWatch
from espalier.rl.delivery.delivery import Delivery
from espalier.rl.estimator_context import AdvantageEstimator, EstimatorContext, check_estimate
from espalier.rl.experience import add_implicit_rewards, make_experience, token_rewards
from espalier.rl.iteration_metrics import Clock, IterationMetrics
from espalier.rl.losses import whiten_around_mean
from espalier.rl.metrics import describe_experience, describe_kl, describe_rollouts, speeds
from espalier.rl.policy import Policy
from espalier.rl.probes.watch import Watch
from espalier.rl.problems import Problems
from espalier.rl.rank_scores import with_networks
from espalier.rl.rank_times import hand_over
from espalier.rl.reward_scaling import RewardScaling
from espalier.rl.rollout_source import RolloutSource
from espalier.rl.samples import RolloutLog, StepCredit
from espalier.rl.types import Estimate, Experience, RolloutGroup
from espalier.rl.update import Update, critic_iterations
from espalier.runtime.background_loop import BackgroundLoop
from espalier.runtime.distributed import from_main_rank, is_main_rank
from espalier.runtime.errors import Stopped
from espalier.runtime.leading import lead
from espalier.runtime.schemas import RLConfig
from espalier.training.stopping import StopSignals

T = TypeVar("T")


@dataclass(frozen=True)
class Prepared:
    """What rank 0 trains on: groups, their tensors with advantages, what the estimator said."""

    groups: Sequence[RolloutGroup]
    experience: Experience
    estimate: Estimate


@dataclass(frozen=True)
class Trained:
    """The metrics of an update; what further estimators said of the rollouts before it, the tokens sampled for that."""

    metrics: dict[str, float]
    further: dict[str, list[StepCredit]]
    num_further: int


@dataclass(kw_only=True)
class Iteration:
    """What an iteration is made of. `update` trains `policy` and what learns beside it. `loop` is rank 0's, on which
    every await of the run happens."""

    config: RLConfig
    problems: Problems
    rollout_source: RolloutSource
    estimator: AdvantageEstimator
    policy: Policy
    update: Update
    watch: Watch
    delivery: Delivery
    metrics: IterationMetrics
    samples: RolloutLog
    loop: BackgroundLoop
    pad_id: int
    reward_scaling: RewardScaling | None = None
    stop: StopSignals = field(default_factory=StopSignals, init=False)
    _steps: StepWatch = field(default_factory=StepWatch, init=False)

    def iterate(self, iteration: int) -> dict[str, float]:
        """Make one iteration (from 0); return its metrics. On every rank. Raises Stopped where a signal came before it
        has learnt anything."""
        started, done = time.monotonic(), iteration + 1
        self.metrics.timeline.begin(done)
        prepared = self._lead(lambda: self.prepare(iteration))
        if not self._learns_before_advantages and self.stop.agreed():
            raise Stopped
        trained = self._lead(lambda: self._train(prepared, iteration))
        weights = self.policy.next_weights()
        with self.rollout_source.at_rest(done):
            self.delivery.send(weights, done)
        if self._is_anything_due(done):
            self.delivery.prove_now()
        return self._log_iteration(done, started, prepared, trained)

    def prepare(self, iteration: int) -> Prepared:
        """Return what is trained on, with its advantages; on rank 0."""
        with self._interruptible():
            groups = self.rollout_source(iteration)
        if not self._asks_more(iteration):
            self.delivery.sleep()
        experience = self.make_experience(groups, iteration)
        with self._interruptible() if not self._learns_before_advantages else nullcontext():
            estimate, experience = self.estimate(groups, experience, iteration)
        return Prepared(groups, experience, estimate)

    def _train(self, prepared: Prepared | None, iteration: int) -> Trained:
        assert prepared is not None
        further, num_further = self.ask_further(prepared.groups, prepared.experience, iteration)
        self.delivery.sleep()
        return Trained(self.learn(prepared.experience, iteration), further, num_further)

    def _log_iteration(
        self, done: int, started: float, prepared: Prepared | None, trained: Trained | None
    ) -> dict[str, float]:
        """Return the metrics of an iteration, on every rank; write down some of its rollouts."""

        def measured() -> dict[str, float]:
            assert prepared is not None
            assert trained is not None
            if self.samples.is_due(done):
                self.samples.write(done, prepared.groups, prepared.experience, prepared.estimate, trained.further)
            values = self._measured(prepared, trained.metrics)
            values["epoch"] = done * self.config.rollout.num_problems / len(self.problems.train)
            # with the answers to further estimators nothing is trained: they are no cost of the run
            values["sampling/tokens"] = float(self.rollout_source.take_generated() - trained.num_further)
            return values

        values = from_main_rank(measured)
        ended = time.monotonic()
        self.metrics.timeline.end_iteration(started, ended)
        if not is_main_rank():
            self.metrics.take()  # its own seconds; `hand_over` sends those that are compared
        return values | {"seconds/iteration": ended - started} | hand_over(self.metrics)

    def _lead(self, work: Callable[[], T]) -> T | None:
        """Return what `work` returns on rank 0; None on others, which make the calls that it asks for."""
        return lead(work, self._held, self.metrics.clock)

    @cached_property
    def _held(self) -> list[Any]:
        """List what every rank has alike, in one order."""
        source, found = self.rollout_source, list[Any]()
        for learner in self.update.learners:
            found += [learner, learner.engine, learner.engine.model, getattr(learner, "reference", None)]
        scoring = [source.reward, getattr(source, "rollout_filter", None), self.estimator]
        scoring += self.samples.estimators.values()
        return [*found, self.policy.loss.reference, self.watch, *with_networks(scoring)]

    @property
    def _learns_before_advantages(self) -> bool:
        """Whether a learner takes steps before advantages are estimated."""
        return any(learner.learns_in_score for learner in self.update.learners)

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
            rewards = token_rewards(groups, experience.response_mask)
            if self.reward_scaling is not None:
                rewards = self.reward_scaling(rewards, experience.response_mask)
                self.metrics.add(self.reward_scaling.metrics())
            experience = replace(experience, rewards=rewards)
            for learner in self.update.learners:
                experience = learner.score(groups, experience, scorer)
            distance = {}
            if experience.reference_logprobs is not None:
                distance = describe_kl(experience, rewards) | {"kl/coefficient": self.policy.loss.kl.coefficient}
            if config.implicit_reward is not None and getattr(self.estimator, "takes_implicit_rewards", False):
                experience = add_implicit_rewards(experience, config.implicit_reward.weight)
            if config.update.whitens_rewards:
                assert experience.rewards is not None
                whitened = whiten_around_mean(experience.rewards, experience.response_mask)
                experience = replace(experience, rewards=whitened)
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
            context = self._context(iteration, clock)
            estimate = self.estimator(groups, experience, context)
            self.metrics.add(self.rollout_source.value(context.num_completion_tokens))
            check_estimate(estimate, experience.response_mask)
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
            if iteration >= critic_iterations(self.config):
                self.policy.adapt_penalty(experience)
            if self.reward_scaling is not None:
                self.reward_scaling.keep()
            self.watch.keep()
        return updated

    def _measured(self, prepared: Prepared, updated: dict[str, float]) -> dict[str, float]:
        """Return all metrics of the iteration but those of time as a whole."""
        experience = prepared.experience
        self.metrics.add(describe_rollouts(prepared.groups) | describe_experience(experience, prepared.estimate))
        self.metrics.add(updated, "update/")
        self.metrics.add(self.problems.left_out, "problems/")
        own_pass = experience.attention_mask[experience.old.in_own_pass]
        values = self.metrics.take() | {"forward/tokens": float(own_pass.sum())}
        return values | speeds(values, self._tokens_learnt(experience))

    def _tokens_learnt(self, experience: Experience) -> float:
        """Count the tokens that the update reads forward and backward, prompts and every epoch included: a policy alone
        leaves out rollouts without a gradient."""
        rows = torch.arange(len(experience.ids))
        if len(self.update.learners) == 1:
            rows = self.policy.rows_with_gradient(experience, rows)
        return float(experience.attention_mask[rows].sum()) * self.config.update.num_epochs

    def _is_anything_due(self, done: int) -> bool:
        """Say whether the policy after iteration `done` is evaluated or kept, before there are rollouts from it."""
        every = (self.config.evaluation.every, self.config.checkpoints.export_every, self.config.checkpoints.save_every)
        return done == self._last_iteration or any(n > 0 and done % n == 0 for n in every)

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Have a signal end what engines are waited for within the block by Stopped."""
        self.loop.interrupts = self.stop.interrupts
        try:
            yield
        finally:
            self.loop.interrupts = nullcontext

    @property
    def _last_iteration(self) -> int:
        total, stop = self.config.num_iterations, self.config.stop_after
        return min(total, stop) if stop > 0 else total
