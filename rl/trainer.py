"""The iteration, and nothing else: rollout → reward → experience → advantage → update → weight sync.

A run stopped at any moment and started again goes on from its last checkpoint, an iteration border: problems,
minibatches and learning rates are functions of the iteration's number, parameters and optimizer come back bit
for bit. What the engine samples is its own.

With several ranks rank 0 alone talks to the engine and scores, for as long as that takes (`from_main_rank`); all
ranks hold all rollouts, and share the forward and backward passes.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from espalier.data.jsonl import read_records, write_records
from espalier.data.prompt_window import fit_window
from espalier.data.records import BadInput, Problem, Trajectory
from espalier.data.tasks.task import Task
from espalier.rewards.score import Reward
from espalier.rl.delivery.weight_sync import WeightSync
from espalier.rl.early_stop import evaluations_since_best, read_accuracies
from espalier.rl.ema import MovingAverage
from espalier.rl.estimator_context import LiveSampler
from espalier.rl.exports import save_models, write_model
from espalier.rl.learn import Learn
from espalier.rl.learners import Learners
from espalier.rl.metrics import (
    agrees,
    describe_experience,
    describe_rewards,
    describe_rollouts,
    speeds,
    timed,
)
from espalier.rl.policy import Policy
from espalier.rl.probes.canary import Canary, Weights
from espalier.rl.probes.reward_falls import RewardWatch
from espalier.rl.probes.watch import Watch
from espalier.rl.rollout import Refusal, Sampler, check_refused, draw_problems, score
from espalier.rl.samples import write_samples
from espalier.rl.types import AdvantageEstimator, Estimate, Experience, RolloutGroup
from espalier.rl.update import Update
from espalier.runtime.distributed import from_main_rank, is_main_rank
from espalier.runtime.schemas import RLConfig
from espalier.runtime.tracking import Metrics, Progress
from espalier.sampling.client import SamplingParams
from espalier.training import checkpoint
from espalier.training.engine import Engine

log = logging.getLogger(__name__)

_NUM_CANARIES = 8


def problems_fingerprint(problems: Sequence[Problem]) -> str:
    """A hash of the training problems, stored in checkpoints: a resume on others is refused."""
    digest = hashlib.sha256()
    for problem in problems:
        digest.update(f"{problem.id}\t{problem.question}\t{problem.gold}\n".encode())
    return digest.hexdigest()[:16]


@dataclass
class Trainer:
    """One run: `run()` takes it from its last checkpoint to `num_iterations`.

    `reference` is None without a KL penalty. `window`: the tokens that the engine takes (None: any); problems with a
    longer prompt are left out.
    """

    config: RLConfig
    engine: Engine
    reference: Any | None
    task: Task
    reward: Reward
    estimator: AdvantageEstimator
    sampler: Sampler
    params: SamplingParams
    update: Update
    weight_sync: WeightSync
    pad_id: int
    run_dir: Path
    window: int | None = None
    accuracies: list[float] = field(default_factory=list, init=False)
    _saved: dict[str, float] = field(default_factory=dict, init=False)
    _loop: asyncio.Runner | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._left_out: dict[str, float] = {}
        given = self.task.problems("train")
        # of all: which of them fit the window does not make it another data set
        self.data = problems_fingerprint(given)
        self.problems, self.dev = self._fitting("train", given), self._fitting("dev", self.task.problems("dev"))
        draw_problems(self.problems, self.config.num_problems, 0, 0)  # raises now where there are too few
        critic = self.update.critic
        self.policy = Policy(self.engine)
        watch = Watch(
            self.config,
            self.engine.model,
            self.params,
            self.sampler.tokenizer,
            self._ask_again,
            self.weight_sync.computes_in,
            lambda: from_main_rank(lambda: self.weight_sync.is_received),
        )
        asked = (self.pad_id, self.estimator.samples_more)
        self.learn = Learn(self.config, self.engine, self.reference, self.update, watch, self.params, *asked)
        self.average = MovingAverage(self.config.ema.decay) if self.config.ema.decay else None
        self.learners = Learners(self.policy, critic, self.update.kl, self.average)

    def _fitting(self, split: str, problems: Sequence[Problem]) -> list[Problem]:
        """The problems whose prompt fits the window; how many do not, or leave less room than `max_tokens`, is said and
        becomes a metric. Raises BadInput where none fits."""
        if self.window is None:
            return list(problems)
        most = self.params.max_tokens
        fit = fit_window(self.task, self.sampler.tokenizer, split, problems, self.window, most)
        fit.check()
        self._left_out |= {f"{split}_left_out": float(len(fit.left_out)), f"{split}_short": float(fit.num_short)}
        return fit.kept

    def run(self) -> None:
        """Train, evaluate, save checkpoints; every await of the run happens on one event loop, on rank 0."""
        config = self.config
        data = self.data
        first = checkpoint.resume(self.run_dir, self.learners, data)
        if first:
            log.info("resuming %s after iteration %d of %d", self.run_dir, first, config.num_iterations)
        self.metrics = Metrics(self.run_dir, config.tracking, first, config)
        self.accuracies = from_main_rank(lambda: read_accuracies(self.metrics.path))
        rewards = RewardWatch(self.metrics.path) if is_main_rank() else None
        line_every = config.tracking.line_every_seconds
        progress = Progress("rl", self._last_iteration, "iteration", first, line_every)
        with asyncio.Runner() if is_main_rank() else nullcontext() as loop, progress:
            self._loop = loop
            try:
                weights = self.policy.weights()
                if self.average is not None and first == 0:
                    self.average.start(weights)
                from_main_rank(lambda: self._run(self._start(first, weights)))
                if first == 0 and config.eval_every > 0 and not self.accuracies:  # cut early it has been done
                    self._evaluate(0)
                for iteration in range(first, self._last_iteration):
                    if self._is_patience_over(iteration):
                        break
                    values = self.iterate(iteration)
                    self.metrics.log(iteration + 1, values)
                    if rewards is not None:
                        rewards.add(iteration + 1, values)
                    rate = values["rollout/tokens"] / values["seconds/iteration"]
                    progress.update(iteration + 1, accuracy=values["rollout/accuracy"], tokens_per_second=rate)
                    self._after(iteration + 1, data)
            finally:
                if loop is not None:
                    loop.run(self._stop())
        self.metrics.close()

    @property
    def _last_iteration(self) -> int:
        total, stop = self.config.num_iterations, self.config.stop_after
        return min(total, stop) if stop > 0 else total

    def _is_patience_over(self, done: int) -> bool:
        """Whether the evaluations say that training ends after `done` iterations."""
        patience = self.config.patience
        is_over = patience > 0 and evaluations_since_best(self.accuracies) >= patience
        if is_over:
            log.info("stopping after iteration %d: no better accuracy in %d evaluations", done, patience)
        return is_over

    def _is_anything_due(self, done: int) -> bool:
        """Whether the policy after iteration `done` is evaluated or kept, before there are rollouts from it."""
        every = (self.config.eval_every, self.config.export_every, self.config.save_every)
        return done == self._last_iteration or any(n > 0 and done % n == 0 for n in every)

    def _after(self, done: int, data: str) -> None:
        """Evaluation, exported policy and checkpoint after iteration `done`, where they are due."""
        config = self.config
        is_last = done == self._last_iteration
        found: dict[str, float] = {}
        if config.eval_every > 0 and (is_last or done % config.eval_every == 0):
            found = self._evaluate(done)
        with timed(self._saved, "save"):
            if config.export_every > 0 and done % config.export_every == 0:
                folder = self.run_dir / "policies" / f"iteration-{done:06d}"
                write_model(self.policy.save_model, self.sampler.tokenizer, folder)
            if config.save_every > 0 and not is_last and done % config.save_every == 0:
                metrics = {name: value for name, value in found.items() if name.startswith("eval/")}
                best = checkpoint.Best("eval/accuracy", is_lowest=False, keep=config.keep_best)
                state = checkpoint.TrainState(done, data, metrics)
                checkpoint.save(self.run_dir, self.learners, state, config.keep_checkpoints, best)

    def _run(self, coroutine: Any) -> Any:
        assert self._loop is not None
        return self._loop.run(coroutine)

    def iterate(self, iteration: int) -> dict[str, float]:
        """One iteration (from 0); its metrics."""
        started = time.monotonic()
        values: dict[str, float] = {}
        groups, drawn = from_main_rank(lambda: self._draw(iteration, values))
        values, self._saved = values | self._saved | drawn, {}
        experience, estimate, updated = self.learn(groups, iteration, values, self._ask_estimator)
        with timed(values, "weight_sync"):
            weights = self.policy.weights()
            if self.average is not None:
                self.average.update(weights)
        with timed(values, "probes"):
            moved = from_main_rank(lambda: self.weight_sync.look(self.policy.network, iteration + 1, weights))
        with timed(values, "weight_sync"):
            from_main_rank(lambda: self._run(self.weight_sync.send(weights)))
            if self._is_anything_due(iteration + 1):
                from_main_rank(lambda: self._run(self._prove()))
        config, done = self.config, iteration + 1
        if is_main_rank() and config.samples_every > 0 and config.num_samples > 0 and done % config.samples_every == 0:
            write_samples(self.run_dir, done, groups, experience, estimate, config.num_samples)
        values |= describe_rollouts(groups) | describe_experience(experience, estimate)
        values |= {f"update/{name}": value for name, value in updated.items()}
        values |= {f"engine/{name}": value for name, value in moved.items()}
        values["epoch"] = done * config.num_problems / len(self.problems)
        values |= {f"problems/{name}": count for name, count in self._left_out.items()}
        values |= speeds(values, experience, config.num_epochs)
        return values | {"seconds/iteration": time.monotonic() - started}

    def _draw(self, iteration: int, values: dict[str, float]) -> tuple[list[RolloutGroup], dict[str, float]]:
        """(the scored groups to train on, what was drawn for them).

        Groups whose rewards agree are replaced, where that is asked for, by groups of other problems; where too
        few differ in the end, groups that agree fill up.
        """
        config = self.config
        groups: list[RolloutGroup] = []
        refused: list[Refusal] = []
        seconds = {"rollout": 0.0, "reward": 0.0}
        for round_number in range(config.dynamic_sampling_rounds + 1):
            chosen = draw_problems(self.problems, config.num_problems, config.seed, iteration, round_number)
            name = f"rl-{iteration}" if round_number == 0 else f"rl-{iteration}-{round_number}"
            times: dict[str, float] = {}
            with timed(times, "rollout"):
                found, more = self._run(self._rollout(chosen, name, iteration))
            refused += more
            check_refused(refused, len(groups) + len(found) + len(refused), config.max_refused_share)
            with timed(times, "reward"):
                groups += score(found, self.reward)
            seconds = {phase: seconds[phase] + times[f"seconds/{phase}"] for phase in seconds}
            if sum(not agrees(group) for group in groups) >= config.num_problems or not chosen:
                break
        drawn = describe_rewards(groups) | {f"seconds/{phase}": value for phase, value in seconds.items()}
        drawn["rollout/num_groups"] = float(len(groups))
        drawn["rollout/refused"] = float(len(refused))
        drawn["rollout/drawn_tokens"] = float(sum(len(r.trajectory.response_ids) for g in groups for r in g.rollouts))
        if config.dynamic_sampling_rounds > 0:
            groups = sorted(groups, key=agrees)[: config.num_problems]  # stable: the order of drawing stays
        values["rollout/trained_zero_variance"] = sum(agrees(group) for group in groups) / len(groups)
        return groups, drawn

    async def _rollout(
        self, problems: Sequence[Problem], name: str, version: int
    ) -> tuple[list[RolloutGroup], list[Refusal]]:
        """Rollouts of which the engine says, before and after, that this version drew them; the problems without."""
        await self.weight_sync.check_version(version)
        proof = asyncio.create_task(self._prove())  # first in the engine's line
        try:
            drawn = await self.sampler.draw(problems, self.params, name, version)
            await proof
        finally:
            proof.cancel()
            await asyncio.gather(proof, return_exceptions=True)  # its error may be that of the rollouts
        await asyncio.gather(self.weight_sync.check_version(version), self.weight_sync.ask_marker())
        return drawn

    async def _prove(self) -> None:
        """The last delivery proven, if it was not: a metric of the iteration that samples from it."""
        found = await self.weight_sync.prove()
        self._saved |= {f"engine/{name}": value for name, value in found.items()}

    def _ask_again(self, rows: list[list[int]]) -> list[list[list[float]]]:
        """Every engine's log-probs of whole rows, without its prefix cache; on every rank."""
        return from_main_rank(lambda: self._run(self.weight_sync.logprobs_of(rows)))

    def _ask_estimator(
        self, groups: Sequence[RolloutGroup], experience: Experience, iteration: int
    ) -> tuple[Estimate, dict[str, float]]:
        """(advantages, the seconds that its questions to the sampler and the reward took); on every rank."""
        return from_main_rank(lambda: self._estimate(groups, experience, iteration))

    def _estimate(
        self, groups: Sequence[RolloutGroup], experience: Experience, iteration: int
    ) -> tuple[Estimate, dict[str, float]]:
        assert self._loop is not None
        live = LiveSampler(self._loop, self.sampler, self.reward, self.params, iteration)
        estimate = self.estimator(groups, experience, live)
        if live.times:  # completions may have driven the marker out of the cache
            self._run(self.weight_sync.ask_marker())
        return estimate, live.times

    async def _start(self, version: int, weights: Weights) -> None:
        """Open the client, prove delivery on the canaries, and serve the policy of this version."""
        started = time.monotonic()
        await self.sampler.client.open()
        served = getattr(self.sampler.client, "max_model_length", None)
        if self.window is not None and served is not None and served < self.window:
            raise BadInput(f"the engine's window is {served} tokens, problems were chosen for {self.window}: run the "
                           "same command again")  # fmt: skip
        self.weight_sync.canaries = await self._canaries(version, weights)
        await self.weight_sync.prove_delivery(self.policy.network, self.config.seed, weights)
        found = await self.weight_sync.sync(self.policy.network, version, weights)
        self._saved |= {f"engine/{name}": value for name, value in found.items()}
        log.info("the engine serves policy version %d (%.1f s)", version, time.monotonic() - started)

    async def _canaries(self, version: int, weights: Weights) -> list[Canary]:
        """Responses of the first policy, sampled once a run: resumed, it is compared on the same ones."""
        path = self.run_dir / "canaries.jsonl"
        if not path.is_file():
            await self.weight_sync.deliver(weights)  # a running engine may serve anything
            once = replace(self.params, n=1)
            groups, refused = await self.sampler.draw(self.dev[:_NUM_CANARIES], once, "canary", version)
            check_refused(refused, len(groups) + len(refused), 1.0)  # fewer canaries prove a delivery too
            write_records(path, [group.rollouts[0].trajectory for group in groups])
        sampled = read_records(Trajectory, path)
        return [Canary(t.prompt_ids + t.response_ids, len(t.prompt_ids)) for t in sampled]

    async def _stop(self) -> None:
        """Close the client, after whatever a signal or an error left waiting for it."""
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self.sampler.client.close()

    def _evaluate(self, version: int) -> dict[str, float]:
        """Greedy accuracy on the dev problems, logged."""
        values: dict[str, float] = {}
        dev = self.dev[: self.config.num_eval_problems]
        greedy = replace(self.params, n=1, temperature=0.0)
        with timed(values, "evaluate"):
            name = f"dev-{version}"
            groups, refused = from_main_rank(lambda: self._run(self.sampler.draw(dev, greedy, name, version)))
        check_refused(refused, len(dev), self.config.max_refused_share)
        described = describe_rollouts(groups)
        accuracy = described["rollout/accuracy"]
        log.info("iteration %d: greedy accuracy %.3f on %d dev problems", version, accuracy, len(groups))
        kept = ("accuracy", "response_length", "truncated", "unparseable")
        values |= {f"eval/{name}": described[f"rollout/{name}"] for name in kept}
        values["eval/refused"] = float(len(refused))
        values["tokens_per_second/evaluate"] = described["rollout/tokens"] / max(values["seconds/evaluate"], 1e-9)
        self.accuracies.append(accuracy)
        self.metrics.log(version, values)
        return values

    def save_model(self) -> None:
        """All that was trained, `model/` last."""
        save_models(self.policy, self.update.critic, self.average, self.sampler.tokenizer, self.run_dir)
