"""Greedy accuracy on the dev problems, and when it says that a run is over: a function of metrics.jsonl, so that a
resume counts on."""

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from espalier.data.records import Problem
from espalier.rl.iteration_metrics import Clock
from espalier.rl.metrics import describe_rollouts
from espalier.rl.rollout import check_refused
from espalier.rl.rollout_source import RolloutSource
from espalier.runtime.distributed import from_main_rank
from espalier.runtime.schemas import RLConfig

log = logging.getLogger(__name__)


def read_accuracies(path: Path) -> list[float]:
    """Return `eval/accuracy` of every evaluation in a metrics.jsonl, oldest first; none where there is no file."""
    if not path.is_file():
        return []
    rows = (json.loads(line) for line in path.read_text().splitlines())
    return [float(row["eval/accuracy"]) for row in rows if "eval/accuracy" in row]


def evaluations_since_best(accuracies: Sequence[float]) -> int:
    """Return evaluations behind the (first) best one."""
    return len(accuracies) - 1 - accuracies.index(max(accuracies)) if accuracies else 0


@dataclass
class GreedyEvaluation:
    """Of the policy that the engine serves, by what samples its rollouts."""

    config: RLConfig
    problems: Sequence[Problem]
    source: RolloutSource
    loop: asyncio.Runner
    clock: Clock
    accuracies: list[float] = field(default_factory=list, init=False)
    """Of every evaluation of the run so far."""

    def __call__(self, version: int) -> dict[str, float]:
        """Return the metrics of the policy of `version`; on every rank. Raises BadInput where the server refuses too
        many problems."""
        dev = self.problems[: self.config.evaluation.num_problems]
        greedy = replace(self.source.params, n=1, temperature=0.0)
        with self.clock.phase("evaluate"):
            name, sampler = f"dev-{version}", self.source.sampler
            groups, refused = from_main_rank(lambda: self.loop.run(sampler.draw(dev, greedy, name, version)))
        values = self.clock.take("evaluate")
        check_refused(refused, len(dev), self.config.rollout.max_refused_share)
        described = describe_rollouts(groups)
        accuracy = described["rollout/accuracy"]
        log.info("iteration %d: greedy accuracy %.3f on %d dev problems", version, accuracy, len(groups))
        kept = ("accuracy", "response_length", "truncated", "unparseable")
        values |= {f"eval/{name}": described[f"rollout/{name}"] for name in kept}
        values["eval/refused"] = float(len(refused))
        values["tokens_per_second/evaluate"] = described["rollout/tokens"] / max(values["seconds/evaluate"], 1e-9)
        self.accuracies.append(accuracy)
        return values

    def is_patience_over(self, done: int) -> bool:
        """Say whether the evaluations so far end the training after `done` iterations."""
        patience = self.config.evaluation.patience
        is_over = patience > 0 and evaluations_since_best(self.accuracies) >= patience
        if is_over:
            log.info("stopping after iteration %d: no better accuracy in %d evaluations", done, patience)
        return is_over
