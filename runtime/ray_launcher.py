"""The ranks of a run on the nodes of a Ray cluster (`launcher=ray`): the very program that `launch.py` starts, a
process each, beside an actor that starts it and says how it ended. The ranks talk with one another by
torch.distributed, not through Ray.

The checkout, the environment, the model and the run directory must be at the same paths on every node.
"""

import asyncio
import itertools
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from espalier.runtime.logs import set_up_logging
from espalier.runtime.rank_host import RankHost
from espalier.runtime.ranks import AGAIN_WITH_LESS, STARTED_AGAIN, STARTED_BY, exit_code_of_ranks, may_start_again
from espalier.runtime.ray_cluster import (
    TOKEN_MODE,
    ActorLost,
    NoCluster,
    call_actor,
    cluster_address,
    end_actor,
    free_places,
    has_gpus,
    join_cluster,
    leave_cluster,
    nodes_of_run,
    place_actor,
    release,
    reserve,
)
from espalier.runtime.ray_rooms import ROOM_OF_RANKS, BadRoom, Room, held_by

log = logging.getLogger("espalier.launcher")

_LOST = 3
_SAVED = 128 + signal.SIGTERM
_OTHERS_SECONDS = 90.0  # that the other ranks have to end by themselves when one has ended: runtime.peers sees to it
_SAVE_SECONDS = 240.0
_CALL_SECONDS = 60.0
_PATIENCE_SECONDS = 60.0  # with an actor that cannot be reached
_END_SECONDS = 10.0
_PAUSE_SECONDS = 2.0
_GLANCE_SECONDS = 0.1
_LOOK_SECONDS = 20.0
_NUM_LOOKS = 3
_SERIALS = itertools.count(1)


@dataclass
class _Rank:
    """One rank of an attempt: its actor, and where that is."""

    host: Any
    node: str
    address: str
    gpus: list[str]
    number: int = 0
    code: int | None = None
    is_done: bool = False

    @property
    def name(self) -> str:
        return f"rank {self.number} at {self.address}"


@dataclass
class RayLauncher:
    """Args: `address` of the cluster ("auto": the one this machine is a node of; empty: a Ray of this machine, while
    the run lasts); `num_ranks`; `cpus_each` and `gpus_each` of a rank (0 or 1; null: 1 where the cluster has any);
    `placement` (`runtime.ray_cluster.Room`); `max_restarts` of a run that lost a rank, an engine or a node;
    `start_seconds` to wait for room, and for a node that is to come back; `resources`, other ones of a rank, by which
    nodes are chosen; `min_ranks` (null: `num_ranks`): with how many, by the share of nodes that are left, a run goes on
    whose node does not come back within `start_seconds`. Once it is back all ranks save and are started again.
    """

    address: str = "auto"
    num_ranks: int = 1
    cpus_each: int = 1
    gpus_each: int | None = None
    placement: str = "PACK"
    max_restarts: int = 2
    start_seconds: float = 300.0
    resources: Mapping[str, float] | None = None
    min_ranks: int | None = None
    _signal: int = field(default=0, init=False)
    _grows: bool = field(default=False, init=False)
    _nodes: frozenset[str] = field(default=frozenset(), init=False)  # that ranks and engines of the whole run are on

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise BadRoom(f"launcher.num_ranks must be at least 1, got {self.num_ranks}")
        if self.min_ranks is not None and not 1 <= self.min_ranks <= self.num_ranks:
            raise BadRoom(
                f"launcher.min_ranks must be 1 to launcher.num_ranks ({self.num_ranks}), got {self.min_ranks}"
            )
        if self.gpus_each not in (None, 0, 1):
            raise BadRoom(f"launcher.gpus_each must be 0, 1 or null, a rank computes on one GPU: got {self.gpus_each}")
        self._wanted(0)  # a misspelt placement ends the run here

    def _wanted(self, gpus: int) -> Room:
        resources = {"CPU": float(self.cpus_each)} | ({"GPU": float(gpus)} if gpus else {}) | {**(self.resources or {})}
        return Room("ranks", self.num_ranks, resources, self.placement, "launcher")

    def run(self, command: Sequence[str]) -> int:
        """Run `command` on every rank; its exit code. Raises BadRoom, NoCluster."""
        set_up_logging()
        return asyncio.run(self._run(list(command)))

    async def _run(self, command: list[str]) -> int:
        loop = asyncio.get_running_loop()
        for stopping in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(stopping, self._stop, stopping)
        joined = join_cluster(self.address, "launcher")
        try:
            # once: a cluster whose GPUs are away for a while is waited for, and no run goes on without them
            gpus = self.gpus_each if self.gpus_each is not None else int(has_gpus())
            code = await self._attempt(command, gpus, is_first=True)
            num_lost = 0
            while not self._signal:
                is_saved = self._grows and code == _SAVED
                if not is_saved and (num_lost == self.max_restarts or not may_start_again(code)):
                    break
                if is_saved:
                    log.warning("all nodes are there again: started with %d ranks", self.num_ranks)
                else:
                    num_lost += 1
                    times = f"{num_lost} of {self.max_restarts}"
                    log.warning("the ranks ended with exit code %d: started again (%s)", code, times)
                self._grows = False
                await asyncio.sleep(_PAUSE_SECONDS)
                code = await self._attempt(command, gpus, is_first=False)
            return code
        finally:
            if joined:
                leave_cluster()

    def _stop(self, number: int) -> None:
        self._signal = number

    async def _attempt(self, command: list[str], gpus: int, is_first: bool) -> int:
        found = await self._unless_stopped(self._reserve(self._wanted(gpus), is_first))
        if found is None:
            return 128 + self._signal
        group, room = found
        ranks: list[_Rank] = []
        hosts = [place_actor(RankHost, group, number, room.resources) for number in range(room.number)]
        try:
            try:
                async with asyncio.timeout(self.start_seconds):
                    ranks = _in_order([_Rank(host, *await call_actor(host, "place")) for host in hosts])
                    await self._start(ranks, command, gpus, group.id.hex(), is_first)
            except (ActorLost, TimeoutError) as error:
                log.warning("the ranks were not started: %s", str(error) or f"not in {self.start_seconds:g} s")
                return _LOST
            return await self._ended(ranks, room, group.id.hex())
        finally:
            await asyncio.gather(*(asyncio.to_thread(end_actor, host, "end", _END_SECONDS) for host in hosts))
            with suppress(Exception):  # of a cluster that is gone
                release(group)

    async def _reserve(self, room: Room, is_first: bool) -> tuple[Any, Room]:
        """Return a group of the ranks, and its room: of a run that is started again and whose nodes stay away the
        share of those that are left. Raises BadRoom, NoCluster."""
        fewest = self.num_ranks if self.min_ranks is None else self.min_ranks
        if is_first or fewest == self.num_ranks:
            return await reserve(room, self.start_seconds, awaits_nodes=not is_first), room
        loop = asyncio.get_running_loop()
        end = loop.time() + self.start_seconds
        while (left := end - loop.time()) > 0:
            # on fewer nodes than before there might be room for the ranks, and none for the engines
            if len(free_places(room)) >= len(self._nodes):
                with suppress(NoCluster):  # a node is missed only after some heartbeats
                    return await reserve(room, min(left, _LOOK_SECONDS), awaits_nodes=True), room
            await asyncio.sleep(_GLANCE_SECONDS)
        free = free_places(room)
        num_there = sum(node in free for node in self._nodes)
        share = num_there / max(1, len(self._nodes))
        room = replace(room, number=_fewer(self.num_ranks, share, held_by(room, free.values())))
        what = f"{num_there} of {len(self._nodes)} nodes are there"
        if room.number < fewest:
            raise NoCluster(f"{what}: their share of the ranks is {room.number}, launcher.min_ranks is {fewest}")
        log.warning("%s: the run goes on with %d of %d ranks", what, room.number, self.num_ranks)
        return await reserve(room, self.start_seconds, awaits_nodes=True), room

    async def _look_around(self, room: Room, group: str) -> None:
        """Note the nodes that the run is on while it is whole; else return when there has been room for all of it for a
        while."""
        seen: frozenset[str] = frozenset()
        num_looks = 0
        while True:
            try:
                own = await asyncio.to_thread(nodes_of_run, room, group)
                free = await asyncio.to_thread(free_places, room, own)
            except Exception as error:  # whatever a head that is away makes of it
                log.warning("the cluster does not say what it has: %s", error)
                own, free, num_looks = frozenset(), {}, 0
            if room.number == self.num_ranks:
                seen, num_looks = seen | own, num_looks + 1
                if len(seen) >= len(self._nodes) or num_looks > _NUM_LOOKS:  # engines come later than ranks
                    self._nodes = seen
            else:
                lacking = self.num_ranks - room.number
                is_room = len(own) + len(free) >= len(self._nodes) and held_by(room, free.values()) >= lacking
                num_looks = num_looks + 1 if own and is_room else 0
                if num_looks == _NUM_LOOKS:
                    self._grows = True
                    return
            await asyncio.sleep(_LOOK_SECONDS)

    async def _unless_stopped(self, waiting: Any) -> Any:
        """Return what it returns, None where a signal came first."""
        task = asyncio.ensure_future(waiting)
        while not task.done() and not self._signal:
            await asyncio.wait([task], timeout=_GLANCE_SECONDS)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return None
        return task.result()

    async def _start(self, ranks: Sequence[_Rank], command: list[str], gpus: int, room: str, is_first: bool) -> None:
        port = await call_actor(ranks[0].host, "free_port")
        common = {
            STARTED_BY: "ray",
            "WORLD_SIZE": str(len(ranks)),
            "MASTER_ADDR": ranks[0].address,
            "MASTER_PORT": str(port),
            "RAY_ADDRESS": cluster_address(),
            ROOM_OF_RANKS: room,
            STARTED_AGAIN: "" if is_first else AGAIN_WITH_LESS if len(ranks) < self.num_ranks else "1",
            **{name: os.environ[name] for name in (TOKEN_MODE,) if name in os.environ},
        }
        for rank in ranks:
            beside = [other for other in ranks if other.node == rank.node]
            own = {
                "RANK": str(rank.number),
                "LOCAL_RANK": str(beside.index(rank)),
                "LOCAL_WORLD_SIZE": str(len(beside)),
                "CUDA_VISIBLE_DEVICES": ",".join(gpu for other in beside for gpu in other.gpus) if gpus else "",
            }
            if refused := await call_actor(rank.host, "start", command, os.getcwd(), common | own):
                raise NoCluster(f"{rank.name} cannot be started: {refused}")

    async def _ended(self, ranks: Sequence[_Rank], room: Room | None = None, group: str = "") -> int:
        """Wait until every rank has ended; the exit code of all."""
        tasks = [asyncio.create_task(_follow_all(ranks)), asyncio.create_task(self._bring_to_end(ranks))]
        growth = []
        if room is not None and self.min_ranks is not None:
            growth.append(asyncio.create_task(self._look_around(room, group)))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            tasks += growth
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return exit_code_of_ranks(0 if rank.is_done else _LOST if rank.code is None else rank.code for rank in ranks)

    async def _bring_to_end(self, ranks: Sequence[_Rank]) -> None:
        """Stop the others once one has ended badly, or all where a signal has come or the run is to grow; return when
        none can be left."""
        passed = 0.0
        while not (self._signal or self._grows) and passed < _OTHERS_SECONDS:
            await asyncio.sleep(_GLANCE_SECONDS)
            passed += _GLANCE_SECONDS if any(rank.code is not None for rank in ranks) else 0.0
        is_over = not (self._signal or self._grows) and all(rank.code in (None, 0) for rank in ranks)
        for rank in ranks if is_over else ():
            rank.is_done = True  # they came to their end together: this one only does not leave
            if rank.code is None:
                log.warning("%s does not end, though the others are done: it is ended", rank.name)
        await _tell(ranks, self._signal or signal.SIGTERM)
        passed = 0.0
        while self._grows and not self._signal and passed < _OTHERS_SECONDS:  # an iteration may be long: no hurry
            await asyncio.sleep(_GLANCE_SECONDS)
            passed += _GLANCE_SECONDS if any(rank.code is not None for rank in ranks) else 0.0
        await asyncio.sleep(_SAVE_SECONDS)
        await _tell(ranks, signal.SIGKILL)
        await asyncio.sleep(_END_SECONDS)


def _fewer(num_ranks: int, share: float, places: int) -> int:
    """Return with how many of the ranks a run goes on: at most their share and the places that there are, and so many
    that what was dealt to all of them can be dealt to those (a divisor); 0 where there is none."""
    most = min(int(num_ranks * share + 1e-9), places)
    return max((number for number in range(1, most + 1) if num_ranks % number == 0), default=0)


def _in_order(ranks: Sequence[_Rank]) -> list[_Rank]:
    """Return them numbered, those of a node one after another."""
    nodes = list(dict.fromkeys(rank.node for rank in ranks))
    found = sorted(ranks, key=lambda rank: nodes.index(rank.node))
    for number, rank in enumerate(found):
        rank.number = number
    return found


async def _follow_all(ranks: Sequence[_Rank]) -> None:
    await asyncio.gather(*(_follow(rank) for rank in ranks))


async def _follow(rank: _Rank) -> None:
    """Print what the rank prints until it has ended, and keep its exit code."""
    num_printed = 0
    while rank.code is None:
        try:
            said, rank.code = await call_actor(rank.host, "output", num_printed, patience=_PATIENCE_SECONDS)
        except ActorLost as error:
            log.warning("%s is gone with its node or its actor: %s", rank.name, error)
            rank.code = _LOST
            return
        num_printed += len(said)
        for number, line in said:
            stream = sys.stdout if number == 1 else sys.stderr
            with suppress(OSError):  # nobody reads it, or a disk is full: the ranks go on
                stream.buffer.write(line)
                stream.flush()
    if rank.code < 0:
        log.warning("%s was ended by %s", rank.name, signal.Signals(-rank.code).name)


async def _tell(ranks: Sequence[_Rank], number: int) -> None:
    """Send the ranks that run a signal."""

    serial = next(_SERIALS)

    async def tell(rank: _Rank) -> None:
        with suppress(ActorLost, TimeoutError):
            async with asyncio.timeout(_CALL_SECONDS):
                await call_actor(rank.host, "tell", number, serial, patience=_CALL_SECONDS)

    await asyncio.gather(*(tell(rank) for rank in ranks if rank.code is None))
