"""The iteration, and nothing else: rollout → reward → experience → advantage → update → weight sync.

A run stopped at any moment and started again goes on from its last checkpoint, an iteration border: problems,
minibatches and learning rates are functions of the iteration's number, parameters and optimizer come back bit
for bit. What the engine samples is its own.

With several ranks rank 0 alone talks to the engine and scores; all ranks hold all rollouts, and share the forward
and backward passes.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from data.records import Problem
from data.tasks.task import Task
from rewards.score import Reward
from rl.experience import logprob_gap, make_experience, reference_terms, token_rewards
from rl.learners import Learners
from rl.live import LiveSampler
from rl.losses import whiten
from rl.rollout import Sampler, draw_problems, score
from rl.types import AdvantageEstimator, Estimate, Experience, RolloutGroup
from rl.update import Update
from rl.watch import Watch
from rl.weight_sync import Canary, WeightSync
from runtime.distributed import is_main_rank, send_from_main_rank
from runtime.schemas import RLConfig
from runtime.tracking import Metrics, Progress
from sampling.client import SamplingParams
from training import checkpoint
from training.engine import Engine

log = logging.getLogger(__name__)

R = TypeVar("R")
_NUM_CANARIES = 8


@contextmanager
def timed(values: dict[str, float], phase: str) -> Iterator[None]:
    """Adds the seconds of the block to `values["seconds/{phase}"]`."""
    started = time.monotonic()
    yield
    values[f"seconds/{phase}"] = time.monotonic() - started


def fingerprint(problems: Sequence[Problem]) -> str:
    """A hash of the training problems, stored in checkpoints: a resume on others is refused."""
    digest = hashlib.sha256()
    for problem in problems:
        digest.update(f"{problem.id}\t{problem.question}\t{problem.gold}\n".encode())
    return digest.hexdigest()[:16]


def describe_rollouts(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Means over the rollouts of an iteration; lengths are tokens."""
    trajectories = [rollout.trajectory for group in groups for rollout in group.rollouts]
    num = len(trajectories)
    return {
        "rollout/accuracy": sum(t.is_correct for t in trajectories) / num,
        "rollout/unparseable": sum(t.answer is None for t in trajectories) / num,
        "rollout/response_length": sum(len(t.response_ids) for t in trajectories) / num,
        "rollout/truncated": sum(t.finish_reason == "length" for t in trajectories) / num,
    }


def describe_rewards(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Mean reward, its parts, and the share of groups whose rewards all agree."""
    scores = [score for group in groups for score in group.scores]
    names = sorted({name for score in scores for name in score.parts})
    parts = {f"reward/{name}": sum(score.parts.get(name, 0.0) for score in scores) / len(scores) for name in names}
    return {
        "rollout/reward": sum(score.total for score in scores) / len(scores),
        "rollout/zero_variance": sum(agrees(group) for group in groups) / len(groups),
        **parts,
    }


def agrees(group: RolloutGroup) -> bool:
    """Whether all rewards of a group are equal: compared with one another its rollouts teach nothing."""
    return len(set(group.rewards)) == 1


@dataclass
class Trainer:
    """One run: `run()` takes it from its last checkpoint to `num_iterations`.

    `reference` is None without a KL penalty.
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
    _loop: asyncio.Runner | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.problems, self.dev = self.task.problems("train"), self.task.problems("dev")
        draw_problems(self.problems, self.config.num_problems, 0, 0)  # too few are told of at once
        critic = self.update.critic
        self.watch = Watch(self.config, self.engine.model, self.params, self.sampler.tokenizer, self._ask_again)
        self.learners = Learners(self.engine, critic.engine if critic else None, self.update.kl)

    def run(self) -> None:
        """Train, evaluate, save checkpoints; every await of the run happens on one event loop, on rank 0."""
        config = self.config
        data = fingerprint(self.problems)
        first = checkpoint.resume(self.run_dir, self.learners, data)
        if first:
            log.info("resuming %s after iteration %d of %d", self.run_dir, first, config.num_iterations)
        metrics = Metrics(self.run_dir, config.tracking, first, config)
        line_every = config.tracking.line_every_seconds
        progress = Progress("rl", config.num_iterations, "iteration", first, line_every)
        with asyncio.Runner() if is_main_rank() else nullcontext() as loop, progress:
            self._loop = loop
            try:
                self._on_main(lambda: self._run(self._start(first)))
                if first == 0 and config.eval_every > 0:
                    metrics.log(0, self._evaluate(0))
                for iteration in range(first, config.num_iterations):
                    done = iteration + 1
                    values = self.iterate(iteration)
                    metrics.log(done, values)
                    seconds = sum(value for name, value in values.items() if name.startswith("seconds/"))
                    tokens = values["rollout/response_length"] * config.num_problems * config.group_size
                    progress.update(done, accuracy=values["rollout/accuracy"], tokens_per_second=tokens / seconds)
                    is_last = done == config.num_iterations
                    if config.eval_every > 0 and (is_last or done % config.eval_every == 0):
                        metrics.log(done, self._evaluate(done))
                    if config.save_every > 0 and not is_last and done % config.save_every == 0:
                        state = checkpoint.TrainState(done, data)
                        checkpoint.save(self.run_dir, self.learners, state, config.keep_checkpoints)
            finally:
                if loop is not None:
                    loop.run(self._stop())
        metrics.close()

    def _run(self, coroutine: Any) -> Any:
        assert self._loop is not None
        return self._loop.run(coroutine)

    def _on_main(self, call: Callable[[], R]) -> R:
        """What `call` gives on rank 0, on every rank."""
        return send_from_main_rank(call() if is_main_rank() else None)  # type: ignore[return-value]

    def iterate(self, iteration: int) -> dict[str, float]:
        """One iteration (from 0); its metrics."""
        values: dict[str, float] = {}
        groups, drawn = self._on_main(lambda: self._draw(iteration, values))
        experience = self._make_experience(groups, values)
        with timed(values, "probes"):
            values |= self.watch.look(groups, experience, iteration)
            self.watch.check_kl(values.get("kl/per_token", 0.0))
        with timed(values, "advantage"):
            estimate = self._on_main(lambda: self._estimate(groups, experience, iteration))
            advantages = estimate.advantages
            if self.config.whitening != "none":
                shifts_mean = self.config.whitening == "standard"
                advantages = whiten(advantages, experience.response_mask, shifts_mean)
            experience = replace(experience, advantages=advantages, returns=estimate.returns)
        with timed(values, "update"):
            updated = self.update(experience, iteration)
            self.watch.check_update(updated.get("kl_old", 0.0))
        if "kl/per_response" in values:
            self.update.kl.update(values["kl/per_response"], len(experience.ids))
        with timed(values, "weight_sync"):
            synced = self._on_main(lambda: self._run(self.weight_sync.sync(self.engine.model, iteration + 1)))
        values |= self._describe(experience, estimate, drawn)
        values |= {f"update/{name}": value for name, value in updated.items()}
        values |= {f"engine/{name}": value for name, value in synced.items()}
        return describe_rollouts(groups) | values

    def _draw(self, iteration: int, values: dict[str, float]) -> tuple[list[RolloutGroup], dict[str, float]]:
        """(the scored groups to train on, what was drawn for them).

        Groups whose rewards agree are replaced, where that is asked for, by groups of other problems; where too
        few differ in the end, groups that agree fill up.
        """
        config = self.config
        groups: list[RolloutGroup] = []
        seconds = {"rollout": 0.0, "reward": 0.0}
        for round_number in range(config.max_resamplings + 1):
            chosen = draw_problems(self.problems, config.num_problems, config.seed, iteration, round_number)
            name = f"rl-{iteration}" if round_number == 0 else f"rl-{iteration}-{round_number}"
            times: dict[str, float] = {}
            with timed(times, "rollout"):
                found = self._run(self._rollout(chosen, name, iteration))
            with timed(times, "reward"):
                groups += score(found, self.reward)
            seconds = {phase: seconds[phase] + times[f"seconds/{phase}"] for phase in seconds}
            if sum(not agrees(group) for group in groups) >= config.num_problems or not chosen:
                break
        drawn = describe_rewards(groups) | {f"seconds/{phase}": value for phase, value in seconds.items()}
        drawn["rollout/num_groups"] = float(len(groups))
        if config.max_resamplings > 0:
            groups = sorted(groups, key=agrees)[: config.num_problems]  # stable: the order of drawing stays
        values["rollout/trained_zero_variance"] = sum(agrees(group) for group in groups) / len(groups)
        return groups, drawn

    async def _rollout(self, problems: Sequence[Problem], name: str, version: int) -> list[RolloutGroup]:
        """Rollouts of which the engine says, before and after, that this version drew them."""
        await self.weight_sync.check_version(version)
        groups = await self.sampler.rollout(problems, self.params, name, version)
        await self.weight_sync.check_version(version)
        return groups

    def _ask_again(self, rows: list[list[int]]) -> list[list[float]]:
        """The engine's log-probs of whole rows, without its prefix cache; on every rank."""
        return self._on_main(lambda: self._run(self.weight_sync.logprobs_of(rows)))

    def _make_experience(self, groups: Sequence[RolloutGroup], values: dict[str, float]) -> Experience:
        config = self.config
        with timed(values, "experience"):
            experience, scorer = make_experience(
                groups,
                self.engine.model,
                self.reference,
                pad_id=self.pad_id,
                micro_batch_size=config.micro_batch_size,
                precision=config.precision,
                temperature=self.params.temperature,
            )
            rewards = token_rewards(groups, experience.response_mask)
            if self.reference is not None:
                kl = config.kl
                terms = reference_terms(
                    scorer, experience, self.engine.model, self.reference, kl.kind, self.params.temperature
                )
                if kl.max_token > 0:
                    terms = terms.clamp(-kl.max_token, kl.max_token)
                if kl.place == "reward":
                    rewards = rewards - self.update.kl.coefficient * terms
                values["kl/coefficient"] = self.update.kl.coefficient
                values |= _describe_kl(experience, rewards, groups)
            critic = self.update.critic
            state_values = critic.values(scorer) if critic is not None else None
            return replace(experience, rewards=rewards, values=state_values)

    def _estimate(self, groups: Sequence[RolloutGroup], experience: Experience, iteration: int) -> Estimate:
        assert self._loop is not None
        live = LiveSampler(self._loop, self.sampler, self.reward, self.params, iteration)
        return self.estimator(groups, experience, live)

    def _describe(self, experience: Experience, estimate: Estimate, drawn: dict[str, float]) -> dict[str, float]:
        mask = experience.response_mask
        gap_mean, gap_max = logprob_gap(experience)
        assert experience.advantages is not None
        chosen = experience.advantages[mask]
        return {
            **drawn,
            **{f"estimate/{name}": value for name, value in estimate.metrics.items()},
            "estimate/advantage_mean": float(chosen.mean()),
            "estimate/advantage_std": float(chosen.std(correction=0)),
            "update/entropy": float(experience.entropies[mask].mean()),
            "engine/gap_mean": gap_mean,
            "engine/gap_max": gap_max,
        }

    async def _start(self, version: int) -> None:
        """Open the client, sample the canaries, prove delivery, and serve the policy of this version."""
        started = time.monotonic()
        await self.sampler.client.open()
        once = replace(self.params, n=1)
        groups = await self.sampler.rollout(self.dev[:_NUM_CANARIES], once, "canary", version)
        sampled = [group.rollouts[0].trajectory for group in groups]
        self.weight_sync.canaries = [Canary(t.prompt_ids + t.response_ids, len(t.prompt_ids)) for t in sampled]
        await self.weight_sync.prove_delivery(self.engine.model, self.config.seed)
        await self.weight_sync.sync(self.engine.model, version)
        log.info("the engine serves policy version %d (%.1f s)", version, time.monotonic() - started)

    async def _stop(self) -> None:
        """Close the client, after whatever a signal or an error left waiting for it."""
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self.sampler.client.close()

    def _evaluate(self, version: int) -> dict[str, float]:
        """Greedy accuracy on the dev problems."""
        values: dict[str, float] = {}
        dev = self.dev[: self.config.num_eval_problems]
        greedy = replace(self.params, n=1, temperature=0.0)
        with timed(values, "evaluate"):
            groups = self._on_main(lambda: self._run(self.sampler.rollout(dev, greedy, f"dev-{version}", version)))
        described = describe_rollouts(groups)
        accuracy = described["rollout/accuracy"]
        log.info("iteration %d: greedy accuracy %.3f on %d dev problems", version, accuracy, len(dev))
        kept = ("accuracy", "response_length", "truncated")
        return {f"eval/{name}": described[f"rollout/{name}"] for name in kept} | values

    def save_model(self, tokenizer: Any) -> None:
        """`critic/` where there is one, and `model/`, standard folders, complete or absent: a run that has a model/
        is finished."""

        def write(engine: Engine, folder: Path) -> None:
            engine.save_model(folder)
            if is_main_rank():
                tokenizer.save_pretrained(folder)

        if self.update.critic is not None:
            critic = self.update.critic.engine
            checkpoint.write_folder(self.run_dir / "critic", lambda folder: write(critic, folder))
        checkpoint.write_folder(self.run_dir / "model", lambda folder: write(self.engine, folder))
        log.info("saved %s/model", self.run_dir)


def _describe_kl(experience: Experience, rewards: torch.Tensor, groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Distances from the reference in nats, k1: a token's mean and a response's mean sum."""
    assert experience.reference_logprobs is not None
    mask = experience.response_mask
    k1 = (experience.old_logprobs - experience.reference_logprobs)[mask]
    total = sum(score.total for group in groups for score in group.scores)
    return {
        "kl/per_token": float(k1.mean()),
        "kl/per_response": float(k1.sum()) / len(mask),
        "kl/penalty_in_reward": float(rewards.sum() - total) / len(mask),
    }
