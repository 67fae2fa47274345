"""vLLM engines on the nodes of a Ray cluster, behind one client (`sampling.engine_pool`).

Each engine is a process beside an actor (`sampling.engine_host`), in a placement group of its own resources; its caller
talks with it over a socket between the two nodes. An engine is lost with its process, its actor or its node.
"""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.runtime.fingerprints import model_fingerprint
from espalier.runtime.ray_cluster import (
    ActorLost,
    call_actor,
    end_actor,
    has_gpus,
    has_place,
    join_cluster,
    leave_cluster,
    place_actor,
    release,
    request_place,
    reserve_most,
)
from espalier.runtime.ray_rooms import Room
from espalier.sampling.child_engine import EngineConnection
from espalier.sampling.child_process import numbered
from espalier.sampling.client import ServerGone
from espalier.sampling.engine_arguments import ON_NODES, num_devices
from espalier.sampling.engine_host import TOKEN_BYTES, EngineHost
from espalier.sampling.engine_pool import EnginePool
from espalier.sampling.kept_engines import engine_name

_END_SECONDS = 20.0
_TAIL_SECONDS = 5.0
_PATIENCE_SECONDS = 60.0  # with an actor that cannot be reached


class RayEngine(EngineConnection):
    """Args: `name` of the engine; `log`, the file that its log goes to when it ends; `make_host` starts its actor;
    `model` that its node must have; the rest as of every connection."""

    def __init__(
        self,
        name: str,
        log: Path,
        make_host: Callable[[str], Any],
        model: str,
        settings: dict[str, Any],
        on_lost: Callable[[Any], None],
    ):
        super().__init__(settings, on_lost)
        self.name = name
        self.log = log
        self.make_host = make_host
        self.model = model
        self.actor: Any = None
        self._fingerprint = model_fingerprint(model) if Path(model).is_dir() else ""
        self._end: asyncio.Task[str] | None = None

    async def start(self, environment: dict[str, str], seconds: float) -> None:
        """Start it on the node that it is given and wait until it has loaded the model. Raises ServerGone."""
        self.actor = self.make_host(self.name)
        token = secrets.token_bytes(TOKEN_BYTES)
        try:
            async with asyncio.timeout(seconds):
                address = await call_actor(self.actor, "listen")
                starting = asyncio.create_task(
                    call_actor(self.actor, "start", token, self.model, self._fingerprint, seconds)
                )
                end = await _connected(address, token)
                if refused := await starting:
                    end.close()
                    raise ServerGone(f"{self.name} at {address[0]}: {refused}")
        except TimeoutError:
            raise ServerGone(f"{self.name} was not started in {seconds:g} s") from None
        except (OSError, ActorLost) as error:
            raise ServerGone(self._lost(error)) from None
        self.host = address[0]
        self.name = f"{self.name} at {self.host}"
        self._end = asyncio.create_task(self._ended())
        await self.load(end, seconds)

    async def why_it_ended(self) -> str:
        """Wait until its end is known and say why, with the log's first error and its last lines."""
        assert self._end is not None
        try:
            async with asyncio.timeout(_END_SECONDS):
                return await asyncio.shield(self._end)
        except TimeoutError:
            return f"{self.name} closed its socket, and nothing is known of its end"

    async def last_lines(self) -> str:
        """Return the end of its log."""
        none = "(no log: its node does not answer)"
        if self.actor is None:
            return none
        try:
            async with asyncio.timeout(_TAIL_SECONDS):
                return str(await call_actor(self.actor, "tail"))
        except (ActorLost, TimeoutError):
            return none

    def stop(self) -> None:
        """End the process and its actor, and keep its log."""
        actor, self.actor = self.actor, None
        if actor is not None and (found := end_actor(actor, "end", _END_SECONDS)) is not None:
            with contextlib.suppress(OSError):  # a full disk
                self.log.parent.mkdir(parents=True, exist_ok=True)
                self.log.write_bytes(found)

    def _lost(self, error: Exception) -> str:
        return f"{self.name} is gone with its node or its actor: {error}"

    async def _ended(self) -> str:
        """Wait for the end of its process, its actor or its node, and give it up."""
        try:
            why = str(await call_actor(self.actor, "wait", patience=_PATIENCE_SECONDS))
        except ActorLost as error:
            why = self._lost(error)
        self.give_up(why)
        return why

    async def close(self) -> None:
        """End the process."""
        if self._end is not None:
            self._end.cancel()
            await asyncio.gather(self._end, return_exceptions=True)
        await super().close()


async def _connected(address: tuple[str, int], token: bytes) -> socket.socket:
    end = await asyncio.to_thread(socket.create_connection, (address[0], address[1]), 10.0)
    end.setblocking(False)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    await asyncio.get_running_loop().sock_sendall(end, token)
    return end


@dataclass(eq=False)
class RayEngines(EnginePool):
    """Args, beside those of every pool: `address` of the cluster ("auto": the one this machine is a node of; empty: one
    on this machine, for as long as the client is open); `cpus_each` and `gpus_each` of an engine (null: as many GPUs as
    its `options` need, where the cluster has any); `placement` of the engines (`runtime.ray_cluster.Room`);
    `resources`, other ones of an engine, by which nodes are chosen.
    """

    address: str = ""
    cpus_each: int = 1
    gpus_each: int | None = None
    placement: str = "SPREAD"
    resources: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        self.dtype = ON_NODES if self.dtype == "auto" else self.dtype
        super().__post_init__()
        self._room = self._wanted(0)  # a misspelt placement ends the run here
        self._group: Any = None
        self._own_groups: dict[int, Any] = {}  # of engines that there was no room for at the start
        self._joined = False

    def _wanted(self, gpus: int) -> Room:
        resources = {"CPU": float(self.cpus_each)} | ({"GPU": float(gpus)} if gpus else {}) | {**(self.resources or {})}
        return Room("engines", self.num_engines, resources, self.placement)

    async def open(self) -> None:
        """Join the cluster, reserve what the engines need, start them; return when every one has loaded the model.
        Raises BadRoom, NoCluster, CannotStart; nothing stays behind then."""
        if Path(self.model).is_dir():
            self.model = str(Path(self.model).resolve())  # a node has another working directory
        self._joined = join_cluster(self.address)
        try:
            gpus = self.gpus_each
            if gpus is None:
                gpus = num_devices(self.options) if has_gpus() else 0
            self._room = self._wanted(gpus)
            self._group, number = await reserve_most(self._room, self.start_seconds)
            self.absent = set(range(number, self.num_engines))
            await super().open()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End the engines, give back what they had, leave the cluster."""
        await super().close()
        groups = [*self._own_groups.values()] + ([] if self._group is None else [self._group])
        self._group, self._own_groups = None, {}
        for group in groups:
            with contextlib.suppress(Exception):  # of a cluster that is gone
                release(group)
        if self._joined:
            self._joined = False
            leave_cluster()

    async def has_room(self, number: int) -> bool:
        """Say whether its place is on a node that lives: Ray gives it another one, once one is free."""
        if number in self.absent:
            if self.placement.startswith("STRICT"):  # a place of its own would know nothing of the others
                return False
            if number not in self._own_groups:
                self._own_groups[number] = request_place(self._room.resources)
        looking = asyncio.create_task(asyncio.to_thread(has_place, *self._place(number)))
        self._ending = [task for task in self._ending if not task.done()]
        self._ending.append(looking)  # the thread is waited for before the cluster is left, also where this is ended
        return await asyncio.shield(looking)

    def _place(self, number: int) -> tuple[Any, int]:
        own = self._own_groups.get(number)
        return (self._group, number) if own is None else (own, 0)

    def can_sleep(self) -> bool:
        """Say True: what its nodes have is known when they are joined, and vLLM refuses to sleep on CPUs."""
        return True

    def make_engine(self, number: int) -> RayEngine:
        """Return engine `number`, which is not started yet."""
        name = engine_name(number, self.num_engines)
        log = numbered(Path(self.log), number)

        def make_host(name: str) -> Any:
            threads = max(1, self.cpus_each // num_devices(self.options))  # of each of its workers
            own = (name, self.program, self.kv_cache_gib, threads)
            return place_actor(EngineHost, *self._place(number), self._room.resources, *own)

        return RayEngine(name, log, make_host, self.model, self.settings(number), self._lose)

    def environment(self, number: int) -> dict[str, str]:
        """Return nothing: the environment of an engine is its node's."""
        return {}
