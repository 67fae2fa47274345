"""What an iteration trains on: scored groups of rollouts, drawn by the policy at hand or ahead of it."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from espalier.data.records import Problem
from espalier.rewards.score import Reward
from espalier.rl.batch_drawing import BatchDrawing, DrawnBatch, is_good, score_in_turn
from espalier.rl.credit_watch import CutWatch
from espalier.rl.delivery.delivery import Delivery
from espalier.rl.estimator_context import NamesCompletions
from espalier.rl.group_scores import trajectories_of
from espalier.rl.iteration_metrics import IterationMetrics
from espalier.rl.ledger import Ledger, tokens_of
from espalier.rl.metrics import agrees, describe_rewards, describe_subjects, subjects_of
from espalier.rl.problem_order import draw_problems
from espalier.rl.rank_scores import RankScores
from espalier.rl.rank_watch import RewardPartsWatch
from espalier.rl.replacements import needed
from espalier.rl.rollout import Sampler
from espalier.rl.rollout_filters import RolloutFilter
from espalier.rl.rollouts_ahead import Come, RolloutsAhead
from espalier.rl.tree_rollouts import TreeRollouts
from espalier.rl.types import RolloutGroup
from espalier.runtime.background_loop import BackgroundLoop
from espalier.runtime.distributed import from_main_rank, is_main_rank
from espalier.runtime.schemas import RLConfig
from espalier.sampling.client import HasEngines, SamplingParams

R = TypeVar("R")


class RolloutSource(Protocol):
    """What samples. `sampler`, `params` and `reward` answer estimators, evaluations and canaries too."""

    sampler: Sampler
    params: SamplingParams
    reward: Reward

    def save(self, folder: Path) -> None:
        """Write what has come of batches that are not trained on yet; called on rank 0."""

    def load(self, folder: Path) -> None:
        """What `save` wrote. Raises BadCheckpoint."""

    def go_on(self, waiting: int, completions: int) -> None:
        """Take over the tokens (of rollouts, of completions) that waited when the last iteration before a resume was
        over; on rank 0, behind the checkpoint."""

    def take_generated(self) -> int:
        """Return the tokens that engines generated for training since the last call, those of a program before that no
        call has returned included; on rank 0."""

    def __call__(self, iteration: int) -> list[RolloutGroup]:
        """Return scored groups that the policy of version `iteration` is to be trained on; on rank 0, which leads
        (`runtime.leading`)."""

    def value(self, num_tokens: int) -> dict[str, float]:
        """Take in how many tokens the estimator of an iteration has had sampled; return their balance as metrics. On
        rank 0."""

    def at_rest(self, version: int) -> AbstractContextManager[None]:
        """Have the engines take the weights of `version` within the block; on every rank."""


@dataclass
class SampledGroups:
    """A `RolloutSource`: as many rollouts of each drawn problem as `params.n`.

    Iteration i trains on the batch of problems that (seed, i) draws, always. That batch is begun when the policy has
    version i - `rollout.max_staleness`, so no token is older than that, whatever is slow; with 0 nothing is drawn while
    the policy is trained. Batches that are drawn ahead go on in the background; within a batch every group whose
    rewards agree is replaced as soon as it is scored, where that is asked for, by a group of another problem
    (`rl.replacements`); where too few differ in the end, groups that agree fill up. Of what is left a filter, where
    there is one, keeps some of every group.

    New weights come in the middle of requests where the engines take them so; else no request is asked until those that
    run are over (`at_rest`). Groups and completions that have come are kept in checkpoints (`rl.rollouts_ahead`); what
    was still drawn when a run stopped is drawn again by its resume.
    Raises BadInput where there are too few problems.
    """

    config: RLConfig
    problems: Sequence[Problem]
    sampler: Sampler
    params: SamplingParams
    reward: Reward
    delivery: Delivery
    loop: BackgroundLoop
    metrics: IterationMetrics
    rollout_filter: RolloutFilter | None = None
    tree: TreeRollouts | None = None
    """None: the rollouts of a group are independent."""
    valued_by: NamesCompletions | None = None
    """Whose completions of a group are begun as soon as it is certain that this group is trained on: while others are
    drawn, and, of a batch that is drawn ahead, by the versions that the policy has until then. A filter chooses among
    rollouts when a batch is trained on: with one nothing is begun."""

    def __post_init__(self) -> None:
        draw_problems(self.problems, self.config.rollout.num_problems, 0, 0)
        self.ledger = Ledger(self.config.rollout.max_staleness)
        self.ahead = RolloutsAhead(self.config.rollout.max_staleness, f"{self.config.task} {self.delivery.computes_in}")
        self._version = self._num_counted = self._num_counted_ahead = 0
        self._drawing: dict[int, asyncio.Task[DrawnBatch]] = {}
        self._waiting: dict[int, int] = {}  # tokens by iteration
        self._num_gone: dict[str, int] = {}
        self._ranks = RankScores[tuple[DrawnBatch, int]](self.loop)
        self._parts, self._cut = RewardPartsWatch(), CutWatch()
        self._subjects = subjects_of(self.problems)

    def save(self, folder: Path) -> None:
        """Of this moment, while the loop draws on."""
        come = self.loop.run(_call(self._look_ahead))
        num_uncounted = max(0, come.num_tokens - self._num_counted_ahead)
        self.ahead.save(folder, come, self.params, num_uncounted)

    def _look_ahead(self) -> Come:
        return self.ahead.look(self._version, self.params, self.sampler.begun)

    def take_generated(self) -> int:
        """What waits is counted in the loop's thread, which draws on."""
        generated, self._num_counted = self.sampler.generated_tokens - self._num_counted, self.sampler.generated_tokens
        self._num_counted_ahead = self.loop.run(_call(self._look_ahead)).num_tokens
        return generated

    def load(self, folder: Path) -> None:
        """Of rank 0 alone."""
        if is_main_rank():
            self.ahead.load(folder, self.sampler.begun)

    def go_on(self, waiting: int, completions: int) -> None:
        """What the checkpoint has of them goes on waiting."""
        self._waiting = self.ahead.num_tokens
        self.ledger.go_on(waiting, completions, sum(self._waiting.values()), self.sampler.begun.waiting_tokens)
        self._num_counted = -self.ahead.num_uncounted
        self._num_counted_ahead = sum(self._waiting.values()) + self.sampler.begun.waiting_tokens
        self._num_counted_ahead -= self.ahead.num_uncounted

    def __call__(self, iteration: int) -> list[RolloutGroup]:
        """Draw and score, however long that takes; networks score on all ranks."""
        self._version = iteration
        with self.metrics.clock.phase("rollout"):
            drawn = self._ranks.serve(lambda: self._next(iteration), self.reward)
        groups, measured = self._take(iteration, *drawn)
        if self.rollout_filter is not None:
            right = [trajectory.is_correct for trajectory in trajectories_of(groups)]
            measured["rollout/unfiltered_accuracy"] = sum(right) / len(right)
            with self.metrics.clock.phase("reward"):
                kept = self.rollout_filter(groups)
            self.ledger.filtered += tokens_of(groups) - tokens_of(kept)
            groups = kept
        self.metrics.add(measured | self._balance(iteration, groups))
        return groups

    @contextmanager
    def at_rest(self, version: int) -> Iterator[None]:
        """Have the engines take the weights of `version` within the block; on every rank."""
        waits = self.config.rollout.max_staleness > 0 and not self.delivery.sync.takes_in_flight
        if waits:
            with self.metrics.clock.phase("weight_sync"):
                from_main_rank(lambda: self.loop.run(self.sampler.rest()))
        yield
        self._version = version
        if waits and is_main_rank():
            self.loop.run(_call(self.sampler.go_on))

    def value(self, num_tokens: int) -> dict[str, float]:
        """Raises LedgerOpen."""

        def close() -> dict[str, float]:
            sampler = self.sampler
            self.ledger.valued += num_tokens
            begun = sampler.begun
            return self.ledger.close_completions(sampler.completion_tokens, begun.waiting_tokens, begun.dropped_tokens)

        return self.loop.run(_call(close))

    def _take(self, iteration: int, batch: DrawnBatch, num_ready: int) -> tuple[list[RolloutGroup], dict[str, float]]:
        """Return (the scored groups to train on, before a filter, what was drawn for them)."""
        config = self.config
        self.metrics.clock.move("rollout", "reward", batch.reward_seconds)
        groups = batch.groups
        if config.rollout.dynamic_sampling_rounds > 0:
            groups = needed(groups, config.rollout.num_problems, self._is_good)
            self.ledger.agreeing += tokens_of(batch.groups) - tokens_of(groups)
        self._cut.look(groups)
        measured = describe_rewards(groups) | self._parts.look(groups) | self.delivery.take_proof()
        measured |= {f"rollout/{name}": value for name, value in describe_subjects(groups, self._subjects).items()}
        if config.rollout.dynamic_sampling_rounds > 0 or self.rollout_filter is not None:
            right = [trajectory.is_correct for trajectory in trajectories_of(groups)]
            measured["rollout/drawn_accuracy"] = sum(right) / len(right)
        measured["rollout/num_groups"] = float(len(groups))
        measured["rollout/refused"] = float(len(batch.refused))
        measured["rollout/drawn_tokens"] = float(tokens_of(batch.groups))
        measured |= self._count_gone()
        self._waiting.pop(iteration)
        self.ledger.drawn_again += self.ahead.leave(iteration)
        if config.rollout.dynamic_sampling_rounds > 0:
            order = sorted(groups, key=lambda group: (not self._is_good(group), agrees(group)))  # stable: as drawn
            kept = order[: config.rollout.num_problems]
            self.ledger.agreeing += tokens_of(groups) - tokens_of(kept)
            groups = kept
        if config.rollout.max_staleness > 0:
            idle = self.loop.run(_call(self.sampler.take_idle_seconds))
            queue = {"ready_batches": float(num_ready), "batch_seconds": batch.seconds, "engines_idle_seconds": idle}
            measured |= {f"queue/{name}": value for name, value in queue.items()}
        return groups, measured

    def _balance(self, iteration: int, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Return the metrics of what is trained on, with the ledger's. Raises LedgerOpen."""
        self.ledger.train(groups, iteration)
        # both sides are looked at in the loop's thread, which changes them together
        balance = self.loop.run(_call(lambda: self.ledger.close(sum(self._waiting.values()))))
        return balance | {"rollout/trained_zero_variance": sum(agrees(group) for group in groups) / len(groups)}

    def _is_good(self, group: RolloutGroup) -> bool:
        return is_good(group, self.config.rollout)

    def _count_gone(self) -> dict[str, float]:
        """Return what engines of the run's own that are gone cost since the last call."""
        client, before = self.sampler.client, self._num_gone
        if not isinstance(client, HasEngines):
            return {}
        self._num_gone = {
            "asked_again": client.num_moved,
            "lost_samples": client.num_lost_samples,
            "lost_tokens": client.num_lost_tokens,
        }
        return {f"rollout/{name}": float(num - before.get(name, 0)) for name, num in self._num_gone.items()}

    async def _next(self, iteration: int) -> tuple[DrawnBatch, int]:
        """Return (the batch of this iteration, how many later ones are drawn already). Engines say before and after
        that they serve this version."""
        sync, config = self.delivery.sync, self.config
        await sync.check_version(iteration)
        self.ahead.forget_before(iteration)
        num_begun = await self.sampler.begun.give_up(iteration - 1)
        if num_begun:
            raise RuntimeError(f"completions of {num_begun} states were begun, and the estimator did not ask for them")
        self.delivery.begin_proof()
        last = config.num_iterations if config.stop_after <= 0 else min(config.num_iterations, config.stop_after)
        for ahead in range(iteration, min(iteration + config.rollout.max_staleness, last - 1) + 1):
            if ahead not in self._drawing:
                self._drawing[ahead] = asyncio.create_task(self._draw(ahead))
        batch = await self._drawing[iteration]
        del self._drawing[iteration]
        batch = await score_in_turn(batch, self._ranks)
        if config.rollout.max_staleness == 0:  # else it goes on beside training, and the next delivery waits for it
            await self.delivery.prove()
        ready = [task.result() for task in self._drawing.values() if task.done()]  # or what one of them has failed by
        await asyncio.gather(sync.check_version(iteration), self.delivery.ask_marker_now())
        return batch, len(ready)

    def _draw(self, iteration: int) -> Coroutine[Any, Any, DrawnBatch]:
        """Draw the batch of this iteration, with all that is at hand now."""
        batch = BatchDrawing(
            iteration,
            self.config,
            self.problems,
            self.sampler,
            self.params,
            self.reward,
            self.ahead,
            self._ranks,
            self.metrics.timeline,
            tree=self.tree,
            valued_by=None if self.rollout_filter is not None else self.valued_by,
            version=lambda: self._version,
            on_come=self._count_come,
        )
        return batch()

    def _count_come(self, iteration: int, groups: Sequence[RolloutGroup], num_counted: int = 0) -> None:
        """Count the tokens of groups that have come for an iteration, of which so many are counted already."""
        num_new = tokens_of(groups) - num_counted
        self.ledger.generated += num_new
        self._waiting[iteration] = self._waiting.get(iteration, 0) + num_new


async def _call(function: Callable[[], R]) -> R:
    """Call it in the loop, whose things it touches."""
    return function()
