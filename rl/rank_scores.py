"""Rewards that hold networks, which every rank has: each rank scores its share of the rollouts, when rank 0 asks.

While rank 0 draws, its event loop has them score (`RankScores`): a batch that was drawn ahead when its turn has come.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from espalier.data.records import Trajectory
from espalier.rewards.process import packs_prompts
from espalier.rewards.score import ASKED, HoldsModels, Reward, Score, asks_engines
from espalier.rl.group_scores import checked_scores, computes_here, trajectories_of, with_scores
from espalier.rl.row_shares import read_shares
from espalier.rl.types import RolloutGroup
from espalier.runtime.background_loop import BackgroundLoop
from espalier.runtime.distributed import world_size

R = TypeVar("R")


def is_shared(reward: Reward) -> bool:
    """Say whether several ranks share what the reward scores: it holds networks, and no part of it asks engines, which
    each rank would start anew."""
    return world_size() > 1 and computes_here(reward) and not asks_engines(reward)


def with_networks(parts: Sequence[Any]) -> list[Any]:
    """List parts of a run that score (None: not there), and the networks that they hold: what ranks have alike."""
    networks = [one for part in parts if isinstance(part, HoldsModels) for one in part.networks().values()]
    return [*parts, *networks]


def scores_on_ranks(trajectories: Iterable[Trajectory], reward: Reward) -> list[Score]:
    """Return the scores; on rank 0, which has all ranks score where the reward is shared. Raises ProbeFailed where one
    is no number."""
    rows = list(trajectories)
    if not is_shared(reward):
        return checked_scores(rows, reward)
    return read_shares(rows, partial(checked_scores, reward=reward), _packs_prompts(reward))


def score_on_ranks(groups: Sequence[RolloutGroup], reward: Reward) -> list[RolloutGroup]:
    """Return the groups with their scores, as `scores_on_ranks`."""
    return with_scores(groups, scores_on_ranks(trajectories_of(groups), reward))


def _packs_prompts(reward: Reward) -> bool:
    networks = reward.networks().values() if isinstance(reward, HoldsModels) else ()
    with ASKED:  # a network that is asked for the first time computes rows
        return any(packs_prompts(network) for network in networks if isinstance(network, torch.nn.Module))


@dataclass
class RankScores(Generic[R]):
    """Has the main threads of all ranks score while that of rank 0 waits for what a coroutine of its event loop
    returns: it asks by `score`, as often as it likes, where `serve` runs."""

    loop: BackgroundLoop
    _asked: asyncio.Queue[tuple[list[Trajectory], asyncio.Future[list[Score]]]] = field(
        default_factory=asyncio.Queue, init=False
    )
    _reply: asyncio.Future[list[Score]] | None = field(default=None, init=False)
    _work: asyncio.Task[R] | None = field(default=None, init=False)

    async def score(self, trajectories: list[Trajectory]) -> list[Score]:
        """Return the scores, by all ranks."""
        reply = asyncio.get_running_loop().create_future()
        self._asked.put_nowait((trajectories, reply))
        return await reply

    def serve(self, work: Callable[[], Coroutine[Any, Any, R]], reward: Reward) -> R:
        """Return what the coroutine of `work` returns; on rank 0, from its main thread, however long it takes. What
        interrupts the wait ends the coroutine first (`BackgroundLoop.run`); what is being scored is scored to its
        end."""
        asked = self.loop.run(self._begin(work))
        while asked is not None:
            asked = self.loop.run(self._answer(scores_on_ranks(asked, reward)))
        done, self._work = self._work, None  # nobody else holds a whole batch
        assert done is not None
        return done.result()

    async def _begin(self, work: Callable[[], Coroutine[Any, Any, R]]) -> list[Trajectory] | None:
        self._asked = asyncio.Queue()
        self._work = asyncio.create_task(work())
        return await self._next(self._work)

    async def _answer(self, scores: list[Score]) -> list[Trajectory] | None:
        assert self._reply is not None
        assert self._work is not None
        self._reply.set_result(scores)
        return await self._next(self._work)

    async def _next(self, work: asyncio.Task[R]) -> list[Trajectory] | None:
        asked = asyncio.create_task(self._asked.get())
        try:
            await asyncio.wait([work, asked], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            work.cancel()
            await asyncio.wait([work])
            raise
        finally:
            asked.cancel()
        if not asked.done():
            work.result()  # or what it has failed by
            return None
        trajectories, self._reply = asked.result()
        return trajectories
