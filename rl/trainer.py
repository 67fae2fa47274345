"""The iteration, and nothing else: rollout → reward → experience → advantage → update → weight sync.

A run stopped at any moment and started again goes on from its last checkpoint, an iteration border: problems,
minibatches and learning rates are functions of the iteration's number, parameters and optimizer come back bit
for bit. What the engine samples is its own.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data.records import Problem
from data.tasks.task import Task
from rewards.outcome import OutcomeReward
from rl.experience import logprob_gap, make_experience
from rl.rollout import Sampler, draw_problems, score
from rl.types import AdvantageEstimator, RolloutGroup
from rl.update import PolicyUpdate
from rl.weight_sync import Canary, WeightSync
from runtime.schemas import RLConfig
from runtime.tracking import Metrics, Progress
from sampling.client import SamplingParams
from training import checkpoint
from training.engine import Engine

log = logging.getLogger(__name__)

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


def describe_groups(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Means over the rollouts of an iteration; `zero_variance` is a share of groups, lengths are tokens."""
    rewards = [reward for group in groups for reward in group.rewards]
    trajectories = [rollout.trajectory for group in groups for rollout in group.rollouts]
    num = len(trajectories)
    return {
        "rollout/reward": sum(rewards) / num,
        "rollout/accuracy": sum(t.is_correct for t in trajectories) / num,
        "rollout/unparseable": sum(t.answer is None for t in trajectories) / num,
        "rollout/zero_variance": sum(len(set(group.rewards)) == 1 for group in groups) / len(groups),
        "rollout/response_length": sum(len(t.response_ids) for t in trajectories) / num,
        "rollout/truncated": sum(t.finish_reason == "length" for t in trajectories) / num,
    }


@dataclass
class Trainer:
    """One run: `run()` takes it from its last checkpoint to `num_iterations`.

    `reference` is None without a KL penalty.
    """

    config: RLConfig
    engine: Engine
    reference: Any | None
    task: Task
    reward: OutcomeReward
    estimator: AdvantageEstimator
    sampler: Sampler
    params: SamplingParams
    update: PolicyUpdate
    weight_sync: WeightSync
    pad_id: int
    run_dir: Path

    def __post_init__(self) -> None:
        self.problems, self.dev = self.task.problems("train"), self.task.problems("dev")
        draw_problems(self.problems, self.config.num_problems, 0, 0)  # too few are told of at once

    def run(self) -> None:
        """Train, evaluate, save checkpoints; every await of the run happens on one event loop."""
        config = self.config
        data = fingerprint(self.problems)
        first = checkpoint.resume(self.run_dir, self.engine, data)
        if first:
            log.info("resuming %s after iteration %d of %d", self.run_dir, first, config.num_iterations)
        metrics = Metrics(self.run_dir, config.tracking, first, config)
        line_every = config.tracking.line_every_seconds
        progress = Progress("rl", config.num_iterations, "iteration", first, line_every)
        with asyncio.Runner() as loop, progress:
            try:
                loop.run(self._start(first))
                if first == 0 and config.eval_every > 0:
                    metrics.log(0, self._evaluate(loop, 0))
                for iteration in range(first, config.num_iterations):
                    done = iteration + 1
                    values = self.iterate(loop, iteration)
                    metrics.log(done, values)
                    seconds = sum(value for name, value in values.items() if name.startswith("seconds/"))
                    tokens = values["rollout/response_length"] * config.num_problems * config.group_size
                    progress.update(done, accuracy=values["rollout/accuracy"], tokens_per_second=tokens / seconds)
                    is_last = done == config.num_iterations
                    if config.eval_every > 0 and (is_last or done % config.eval_every == 0):
                        metrics.log(done, self._evaluate(loop, done))
                    if config.save_every > 0 and not is_last and done % config.save_every == 0:
                        state = checkpoint.TrainState(done, data)
                        checkpoint.save(self.run_dir, self.engine, state, config.keep_checkpoints)
            finally:
                loop.run(self._stop())
        metrics.close()

    def iterate(self, loop: asyncio.Runner, iteration: int) -> dict[str, float]:
        """One iteration (from 0); its metrics."""
        config = self.config
        values: dict[str, float] = {}
        with timed(values, "rollout"):
            chosen = draw_problems(self.problems, config.num_problems, config.seed, iteration)
            groups = loop.run(self.sampler.rollout(chosen, self.params, f"rl-{iteration}", iteration))
        with timed(values, "reward"):
            groups = score(groups, self.task, self.reward)
        with timed(values, "experience"):
            experience = make_experience(
                groups,
                self.engine.model,
                self.reference,
                pad_id=self.pad_id,
                micro_batch_size=config.micro_batch_size,
                precision=config.precision,
                temperature=self.params.temperature,
            )
        with timed(values, "advantage"):
            advantages, returns = self.estimator(groups, experience)
            experience = replace(experience, advantages=advantages, returns=returns)
        with timed(values, "update"):
            updated = self.update(experience, iteration)
        with timed(values, "weight_sync"):
            synced = loop.run(self.weight_sync.sync(self.engine.model, iteration + 1))
        gap_mean, gap_max = logprob_gap(experience)
        entropy = float(experience.entropies[experience.response_mask].mean())
        values |= {f"update/{name}": value for name, value in updated.items()} | {"update/entropy": entropy}
        values |= {"engine/gap_mean": gap_mean, "engine/gap_max": gap_max}
        values |= {f"engine/{name}": value for name, value in synced.items()}
        return describe_groups(groups) | values

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

    def _evaluate(self, loop: asyncio.Runner, version: int) -> dict[str, float]:
        """Greedy accuracy on the dev problems."""
        values: dict[str, float] = {}
        dev = self.dev[: self.config.num_eval_problems]
        greedy = replace(self.params, n=1, temperature=0.0)
        with timed(values, "evaluate"):
            groups = loop.run(self.sampler.rollout(dev, greedy, f"dev-{version}", version))
        described = describe_groups(score(groups, self.task, self.reward))
        accuracy = described["rollout/accuracy"]
        log.info("iteration %d: greedy accuracy %.3f on %d dev problems", version, accuracy, len(dev))
        kept = ("accuracy", "response_length", "truncated")
        return {f"eval/{name}": described[f"rollout/{name}"] for name in kept} | values

    def save_model(self, tokenizer: Any) -> None:
        """`model/`, a standard folder, complete or absent: a run that has one is finished."""

        def write(folder: Path) -> None:
            self.engine.save_model(folder)
            tokenizer.save_pretrained(folder)

        checkpoint.write_folder(self.run_dir / "model", write)
        log.info("saved %s/model", self.run_dir)
