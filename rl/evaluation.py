"""Accuracy and reward on the dev problems, and when a run is over, by that or by what it cost: functions of
metrics.jsonl, so that a resume counts on."""

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from espalier.data.records import Problem
from espalier.rl.group_scores import score
from espalier.rl.iteration_metrics import Clock
from espalier.rl.metrics import describe_rewards, describe_rollouts, describe_subjects, subjects_of
from espalier.rl.rank_scores import is_shared, score_on_ranks, with_networks
from espalier.rl.rollout_checks import check_refused
from espalier.rl.rollout_source import RolloutSource
from espalier.rl.samples import write_evaluated
from espalier.rl.types import RolloutGroup
from espalier.rl.update import critic_iterations
from espalier.runtime.background_loop import BackgroundLoop
from espalier.runtime.distributed import from_main_rank
from espalier.runtime.leading import lead
from espalier.runtime.schemas import RLConfig
from espalier.runtime.tracking import as_written

log = logging.getLogger(__name__)
METRICS = ("accuracy", "reward")


def read_evaluations(path: Path, metric: str) -> dict[int, float]:
    """Return `eval/METRIC` of every evaluation in a metrics.jsonl by its iteration; none where there is no file."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return {int(row["step"]): float(row[f"eval/{metric}"]) for row in rows if f"eval/{metric}" in row}


def read_evaluation(path: Path, done: int) -> dict[str, float]:
    """Return the row of the evaluation after `done` iterations in a metrics.jsonl; empty where there is none."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return next((row for row in rows if row["step"] == done and "eval/accuracy" in row), {})


def evaluations_since_best(values: Sequence[float]) -> int:
    """Return evaluations behind the (first) best one."""
    return len(values) - 1 - values.index(max(values)) if values else 0


def spent(path: Path) -> tuple[float, float]:
    """Sum (generated tokens, seconds) over the iterations in a metrics.jsonl; evaluations count in neither, nor does
    what further estimators took (`samples.estimators`), with whose answers nothing is trained."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    seconds = sum(row.get("seconds/iteration", 0.0) - row.get("seconds/samples", 0.0) for row in rows)
    return sum(row.get("sampling/tokens", 0.0) for row in rows), seconds


def is_budget_spent(path: Path, config: RLConfig, done: int) -> bool:
    """Say whether a run ends after `done` iterations: at an evaluation, when all budgets that are set are spent."""
    tokens, seconds = config.stop_after_tokens, config.stop_after_seconds
    if (tokens <= 0 and seconds <= 0) or done % max(1, config.evaluation.every):
        return False
    spent_tokens, spent_seconds = spent(path)
    is_over = spent_tokens >= tokens and spent_seconds >= seconds
    if is_over:
        log.info("stopping after iteration %d: %d tokens, %.0f seconds", done, spent_tokens, spent_seconds)
    return is_over


@dataclass
class Evaluation:
    """Of the policy that the engine serves, by what samples its rollouts."""

    config: RLConfig
    problems: Sequence[Problem]
    source: RolloutSource
    loop: BackgroundLoop
    clock: Clock
    found: dict[int, float] = field(default_factory=dict, init=False)
    """What every evaluation of the run so far found, by its iteration, of `evaluation.metric`."""

    def __call__(self, version: int) -> dict[str, float]:
        """Return the metrics of the policy of `version`; on every rank. Raises BadInput where the server refuses too
        many problems."""
        values = lead(partial(self._evaluate, version), with_networks([self.source.reward]), self.clock)
        values = from_main_rank(lambda: values or {})
        self.found[version] = as_written(values[f"eval/{self.config.evaluation.metric}"])  # as a resumed run reads it
        return values

    def _evaluate(self, version: int) -> dict[str, float]:
        dev = self.problems[: self.config.evaluation.num_problems]
        num = self.config.evaluation.samples
        params = replace(self.source.params, n=num) if num else replace(self.source.params, n=1, temperature=0.0)
        is_scored, started = self.config.evaluation.metric == "reward", time.monotonic()
        with self.clock.phase("evaluate"):
            name, sampler = f"dev-{version}", self.source.sampler
            groups, refused = self.loop.run(sampler.draw(dev, params, name, version, is_cost=False))
            drawing = time.monotonic() - started
            check_refused(refused, len(dev), self.config.rollout.max_refused_share)
            if is_scored:
                groups = self._scored(groups)
        if self.config.samples.every > 0 and self.config.samples.num_problems > 0:
            write_evaluated(Path(self.config.output_dir), version, groups, self.config.samples)
        values = self.clock.take("evaluate")
        described = describe_rollouts(groups)
        accuracy = described["rollout/accuracy"]
        how = f"{num} samples" if num else "greedy"
        rewards = {"eval/reward": describe_rewards(groups)["rollout/reward"]} if is_scored else {}
        shown = "".join(f", reward {value:.3f}" for value in rewards.values())
        log.info("iteration %d: accuracy %.3f%s (%s) on %d dev problems", version, accuracy, shown, how, len(groups))
        kept = ("accuracy", "response_length", "truncated", "unparseable")
        values |= {f"eval/{name}": described[f"rollout/{name}"] for name in kept}
        values |= rewards
        values |= {f"eval/{name}": value for name, value in describe_subjects(groups, subjects_of(dev)).items()}
        values["eval/refused"] = float(len(refused))
        values["tokens_per_second/evaluate"] = described["rollout/tokens"] / max(drawing, 1e-9)
        return values

    def _scored(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Return the groups with their scores; a signal ends the wait for what rank 0 alone scores."""
        reward = self.source.reward
        if is_shared(reward):
            return score_on_ranks(groups, reward)
        return self.loop.run(asyncio.to_thread(score, groups, reward))

    def is_patience_over(self, done: int) -> bool:
        """Say whether the evaluations so far end the training after `done` iterations. Those of the policy before its
        first step (a critic may be trained alone) count once."""
        patience, still = self.config.evaluation.patience, critic_iterations(self.config)
        before = [value for version, value in self.found.items() if version <= still]
        after = [value for version, value in self.found.items() if version > still]
        is_over = patience > 0 and evaluations_since_best(before[-1:] + after) >= patience
        if is_over:
            metric = self.config.evaluation.metric
            log.info("stopping after iteration %d: no better %s in %d evaluations", done, metric, patience)
        return is_over
