"""Groups of a batch scored as they finish, while the others are still drawn."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from espalier.data.records import Trajectory
from espalier.rewards.score import HoldsModels, ReadsTexts, Reward, Score, scores_of
from espalier.rl.probes.checks import REWARD, Fault, ProbeFailed
from espalier.rl.types import RolloutGroup

_GIVE_UP_SECONDS = 60.0


def trajectories_of(groups: Sequence[RolloutGroup]) -> list[Trajectory]:
    """List those of all rollouts, group by group."""
    return [rollout.trajectory for group in groups for rollout in group.rollouts]


def checked_scores(trajectories: Sequence[Trajectory], reward: Reward) -> list[Score]:
    """Return the reward's scores. Raises ProbeFailed where one is no number."""
    scores = scores_of(trajectories, reward)
    for trajectory, found in zip(trajectories, scores, strict=True):
        if not all(math.isfinite(value) for value in (found.total, found.outcome, *found.steps)):
            parts = "".join(f", {name} {value:g}" for name, value in found.parts.items())
            raise ProbeFailed(Fault(REWARD, f"the reward of trajectory {trajectory.id} is {found.total}{parts}"))
    return scores


def with_scores(groups: Sequence[RolloutGroup], scores: Sequence[Score]) -> list[RolloutGroup]:
    """Return the groups with the scores of their rollouts, which stand in the order of `trajectories_of`."""
    rest = iter(scores)
    return [replace(group, scores=[next(rest) for _ in group.rollouts]) for group in groups]


def score(groups: Sequence[RolloutGroup], reward: Reward) -> list[RolloutGroup]:
    """Return the groups with their scores. Raises ProbeFailed where a reward is no number."""
    return with_scores(groups, checked_scores(trajectories_of(groups), reward))


def computes_here(reward: Reward) -> bool:
    """Say whether the reward holds networks of this process. They compute whole batches: on the learners' devices, and
    with numbers that depend on which rows stand beside one another, so not on what happens to finish first."""
    if isinstance(reward, ReadsTexts) and reward.has_readers:
        return True
    networks = reward.networks() if isinstance(reward, HoldsModels) else {}
    return any(isinstance(network, torch.nn.Module) for network in networks.values())


async def _nothing(groups: Sequence[RolloutGroup]) -> None:
    pass


@dataclass
class GroupScores:
    """Of one batch. Args: `reward`; whether it `waits` until the batch is whole (`computes_here`, or groups that grow
    once all are drawn); `on_scored` gets groups as they are scored, none where it waits; `by_ranks`: what has all ranks
    score a whole batch, None: this process does. All but the reward runs in one event loop."""

    reward: Reward
    waits: bool
    on_scored: Callable[[Sequence[RolloutGroup]], Awaitable[None]] = _nothing
    by_ranks: Callable[[list[Trajectory]], Awaitable[list[Score]]] | None = None
    _new: list[RolloutGroup] = field(default_factory=list, init=False)
    _scored: dict[str, RolloutGroup] = field(default_factory=dict, init=False)
    _work: asyncio.Task[None] | None = field(default=None, init=False)
    _is_over: bool = field(default=False, init=False)

    def add(self, group: RolloutGroup) -> None:
        """Score a group that has just been drawn, together with those that finish meanwhile. Raises what the reward
        raised for an earlier one."""
        if self.waits or self._is_over:
            return
        self._new.append(group)
        if self._work is None or self._work.done():
            if self._work is not None:
                self._work.result()
            self._work = asyncio.create_task(self._score_new())

    async def _score_new(self) -> None:
        while self._new:
            groups, self._new = self._new, []
            scored = await asyncio.to_thread(score, groups, self.reward)
            self._scored |= {group.problem.id: group for group in scored}
            if not self._is_over:
                await self.on_scored(scored)

    async def finish(self, groups: Sequence[RolloutGroup]) -> tuple[list[RolloutGroup], float]:
        """Return (`groups` with their scores, in order; the seconds that this was waited for)."""
        started = time.monotonic()
        if self.waits and self.by_ranks is not None:
            found = with_scores(groups, await self.by_ranks(trajectories_of(groups)))
        elif self.waits:
            found = await asyncio.to_thread(score, groups, self.reward)
        else:
            if self._work is not None:
                await self._work
            found = [self._scored.pop(group.problem.id) for group in groups]
        return found, time.monotonic() - started

    async def give_up(self) -> None:
        """Return once nothing is scored any more, after a minute at most; what is not begun stays undone."""
        self._is_over = True
        self._new.clear()
        if self._work is not None:
            await asyncio.wait([self._work], timeout=_GIVE_UP_SECONDS)
