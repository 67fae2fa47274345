"""What an iteration trains on: scored groups of rollouts that the policy at hand has drawn."""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from espalier.data.prompt_window import fit_window
from espalier.data.records import Problem
from espalier.data.tasks.task import Task
from espalier.rewards.score import Reward
from espalier.rl.delivery.delivery import Delivery
from espalier.rl.iteration_metrics import IterationMetrics
from espalier.rl.metrics import agrees, describe_rewards
from espalier.rl.rollout import Refusal, Sampler, check_refused, draw_problems, score
from espalier.rl.rollout_filters import RolloutFilter
from espalier.rl.tree_rollouts import TreeRollouts
from espalier.rl.types import RolloutGroup
from espalier.runtime.distributed import from_main_rank
from espalier.runtime.schemas import RLConfig
from espalier.sampling.client import SamplingParams


class RolloutSource(Protocol):
    """What samples. `sampler`, `params` and `reward` answer estimators, evaluations and canaries too."""

    sampler: Sampler
    params: SamplingParams
    reward: Reward

    def __call__(self, iteration: int) -> list[RolloutGroup]:
        """Return scored groups by the policy of version `iteration`, the same on every rank."""


@dataclass(frozen=True)
class Problems:
    """The problems of a run whose prompt the engine takes."""

    train: list[Problem]
    dev: list[Problem]
    digest: str
    """Of all training problems, stored in checkpoints: a resume on others is refused. Which of them fit the window does
    not make it another data set."""
    left_out: dict[str, float]
    """Metrics: how many do not fit, or leave less room than `max_tokens`."""


def choose_problems(task: Task, tokenizer: Any, window: int | None, max_tokens: int) -> Problems:
    """Choose the problems whose prompt fits `window` tokens (None: any); how many do not is said. Raises BadInput where
    none fits."""
    problems: dict[str, list[Problem]] = {}
    left_out: dict[str, float] = {}
    digest = hashlib.sha256()
    for split in ("train", "dev"):
        problems[split] = list(task.problems(split))
        if split == "train":
            for problem in problems[split]:
                digest.update(f"{problem.id}\t{problem.question}\t{problem.gold}\n".encode())
        if window is not None:
            fit = fit_window(task, tokenizer, split, problems[split], window, max_tokens)
            fit.check()
            left_out |= {f"{split}_left_out": float(len(fit.left_out)), f"{split}_short": float(fit.num_short)}
            problems[split] = fit.kept
    return Problems(problems["train"], problems["dev"], digest.hexdigest()[:16], left_out)


@dataclass
class SampledGroups:
    """A `RolloutSource`: as many rollouts of each drawn problem as `params.n`, by one version of the policy.

    Groups whose rewards agree are replaced, where that is asked for, by groups of other problems; where too few differ
    in the end, groups that agree fill up. Of what is left a filter, where there is one, keeps some of every group.
    Raises BadInput where there are too few problems.
    """

    config: RLConfig
    problems: Sequence[Problem]
    sampler: Sampler
    params: SamplingParams
    reward: Reward
    delivery: Delivery
    loop: asyncio.Runner
    metrics: IterationMetrics
    rollout_filter: RolloutFilter | None = None
    tree: TreeRollouts | None = None
    """None: the rollouts of a group are independent."""

    def __post_init__(self) -> None:
        draw_problems(self.problems, self.config.rollout.num_problems, 0, 0)

    def __call__(self, iteration: int) -> list[RolloutGroup]:
        """Rank 0 draws and scores, however long that takes."""
        groups, measured = from_main_rank(lambda: self._draw(iteration))
        self.metrics.add(measured)
        return groups

    def _draw(self, iteration: int) -> tuple[list[RolloutGroup], dict[str, float]]:
        """Return (the scored groups to train on, what was drawn for them)."""
        config, clock = self.config, self.metrics.clock
        groups: list[RolloutGroup] = []
        refused: list[Refusal] = []
        for round_number in range(config.rollout.dynamic_sampling_rounds + 1):
            chosen = draw_problems(self.problems, config.rollout.num_problems, config.seed, iteration, round_number)
            name = f"rl-{iteration}" if round_number == 0 else f"rl-{iteration}-{round_number}"
            with clock.phase("rollout"):
                drawn, more = self.loop.run(self._rollout(chosen, name, iteration))
            refused += more
            check_refused(refused, len(groups) + len(drawn) + len(refused), config.rollout.max_refused_share)
            with clock.phase("reward"):
                groups += score(drawn, self.reward)
            if sum(not agrees(group) for group in groups) >= config.rollout.num_problems or not chosen:
                break
        measured = describe_rewards(groups) | self.delivery.take_proof()
        measured["rollout/num_groups"] = float(len(groups))
        measured["rollout/refused"] = float(len(refused))
        lengths = [len(rollout.drawn_ids) for group in groups for rollout in group.rollouts]
        measured["rollout/drawn_tokens"] = float(sum(lengths))
        if config.rollout.dynamic_sampling_rounds > 0:
            groups = sorted(groups, key=agrees)[: config.rollout.num_problems]  # stable: the order of drawing stays
        if self.rollout_filter is not None:
            right = [rollout.trajectory.is_correct for group in groups for rollout in group.rollouts]
            measured["rollout/unfiltered_accuracy"] = sum(right) / len(right)
            with clock.phase("reward"):
                groups = self.rollout_filter(groups)
        measured["rollout/trained_zero_variance"] = sum(agrees(group) for group in groups) / len(groups)
        return groups, measured

    async def _rollout(
        self, problems: Sequence[Problem], name: str, version: int
    ) -> tuple[list[RolloutGroup], list[Refusal]]:
        """Return rollouts of which the engine says, before and after, that this version drew them; the problems
        without."""
        sync = self.delivery.sync
        await sync.check_version(version)
        proof = asyncio.create_task(self.delivery.prove())  # first in the engine's line
        try:
            groups, refused = await self.sampler.draw(problems, self.params, name, version)
            if self.tree is not None:
                groups = await self.tree.grow(groups, self.sampler, self.params)
            await proof
        finally:
            proof.cancel()
            await asyncio.gather(proof, return_exceptions=True)  # its error may be that of the rollouts
        await asyncio.gather(sync.check_version(version), sync.ask_marker())
        return groups, refused
