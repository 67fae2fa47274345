"""A Ray cluster: joined by its address, or started on this machine for as long as it is needed; and what it has.

`ray` is imported here alone, inside functions.
"""

import asyncio
import atexit
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import espalier
from espalier.runtime.ranks import AGAIN_WITH_LESS, STARTED_AGAIN
from espalier.runtime.ray_rooms import ROOM_OF_RANKS, BadRoom, Room, missing_room, places_of, places_on, spelled

log = logging.getLogger("espalier.ray_cluster")
R = TypeVar("R")

ROOT = str(Path(espalier.__file__).resolve().parent.parent)
_REACH_SECONDS = 10.0
_LEAVE_SECONDS = 30.0
_TELL_SECONDS = 5.0
_AGAIN_SECONDS = 0.5
TOKEN_VARIABLES = "RAY_AUTH_"
"""What the variables begin with that say whether a cluster asks for a token, and which it is."""
TOKEN_MODE = "RAY_AUTH_MODE"
_TOKEN = (
    ". A head asks for the token in ~/.ray/auth_token where it was started with one: have the same file here, or start "
    "Ray with RAY_AUTH_MODE=disabled on every node"
)
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # a call after `leave_cluster` would join again, for ever
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}


class NoCluster(RuntimeError):
    """No cluster can be had, or it has no room now; the message says what is missing."""

    exit_code = 3


class ActorLost(RuntimeError):
    """An actor answers no more: it, its process or its node is gone, or it failed."""

    exit_code = 3


def join_cluster(address: str, section: str = "client") -> bool:
    """Join the cluster at `address` ("auto": the one that this machine is a node of), or start one on this machine
    where it is empty. Return whether it was joined now: who joined it leaves it. `section` of the config that names
    it, in messages. Raises NoCluster."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    import ray
    import ray.exceptions

    if ray.is_initialized():
        own = ray.get_runtime_context().gcs_address
        if ":" in address and address != own:
            raise NoCluster(f"this program is in the cluster at {own} already, and cannot join {address} too")
        return False
    if ":" in address:
        _check_reachable(address, section)
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if not address:
        options |= {"num_cpus": len(os.sched_getaffinity(0)), "include_dashboard": False}
    try:
        with _own_signals():
            try:
                ray.init(address=address or "local", **options)
            except ConnectionError:
                if ":" not in address or not _show_token():
                    raise
                ray.init(address=address, **options)
    except (OSError, RuntimeError, ValueError, AssertionError, ray.exceptions.RayError) as error:
        where = f"{section}.address={address}" if address else "Ray on this machine"
        remedy = _TOKEN if isinstance(error, ConnectionError) and ":" in address else ""
        raise NoCluster(f"{where} cannot be had: {_first_line(error)}{remedy}") from None
    return True


def _show_token() -> bool:
    """Have Ray show the token of this home; say whether there is one. A head asks for the one that it was started with,
    and unasked only programs that find their cluster themselves ("auto") show theirs."""
    if TOKEN_MODE in os.environ:
        return False
    from ray._private.authentication import authentication_token_setup as tokens

    return bool(tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False))


def _check_reachable(address: str, section: str) -> None:
    """Raise NoCluster where nobody listens there: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        raise NoCluster(f"{section}.address={address} cannot be had: {error}: name the head's HOST:PORT, 6379 unless "
                        "it was started with another, or auto on a node of the cluster") from None  # fmt: skip


def await_nodes(address: str, number: int, seconds: float = 300.0) -> int:
    """Return 0 when the head at `address` answers and so many nodes have joined it; the exit code of `NoCluster`, with
    a line, where that is not so in time."""
    end, joined, why = time.monotonic() + seconds, False, ""
    try:
        while time.monotonic() < end:
            try:
                joined = joined or join_cluster(address)
                found = len(nodes_beside_ranks())
                if found >= number:
                    return 0
                why = f"{found} of {number} nodes are there"
            except NoCluster as error:
                why = str(error)
            time.sleep(_AGAIN_SECONDS)
    finally:
        if joined:
            leave_cluster()
    print(f"error: after {seconds:g} s: {why}: see what Ray says on each of them", file=sys.stderr)
    return NoCluster.exit_code


def leave_cluster() -> None:
    """Leave the cluster; one that was started here ends. A cluster whose head does not answer is left to itself."""
    import ray

    def leave() -> bool:
        with _own_signals():
            ray.shutdown()
        return True

    if not _within(_LEAVE_SECONDS, leave):
        log.warning("Ray does not let go of this program within %g s: it ends without", _LEAVE_SECONDS)
        atexit.unregister(ray.shutdown)  # which would wait again


def _within(seconds: float, function: Callable[[], R]) -> R | None:
    """Return what a function of Ray's returns, or raise what it raises; None where it has not ended within `seconds`.
    It may wait for ever for a head that does not answer, in a thread that the program does not wait for."""
    found: list[R] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            found.append(function())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="ray", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    return found[0] if found else None


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray puts a handler of its own on SIGTERM, which would end a run without its checkpoint; not from another thread
    than the main one, where nobody can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if kept is not None:
            signal.signal(signal.SIGTERM, kept)


async def reserve(room: Room, seconds: float, awaits_nodes: bool = False) -> Any:
    """Return a placement group that holds it. Raises BadRoom where the cluster cannot hold it (unless one
    `awaits_nodes` that may come), NoCluster where it is not free within `seconds`: nothing stays reserved then, nor
    where it is cancelled."""
    import ray
    from ray.util import placement_group

    awaits_nodes = awaits_nodes or bool(os.environ.get(STARTED_AGAIN))
    if not awaits_nodes and (lacking := missing_room(room, nodes_beside_ranks())):
        raise BadRoom(lacking)
    group = placement_group([dict(room.resources)] * room.number, strategy=room.strategy, name=_name_of_group())
    end, is_told = time.monotonic() + seconds, False
    try:
        while not group.wait(0):
            if not is_told and time.monotonic() >= end - seconds + _TELL_SECONDS:
                is_told = True
                log.warning("no room for %d %s yet: waiting, %g s at most", room.number, room.what, seconds)
            if time.monotonic() >= end:
                free = {name: ray.available_resources().get(name, 0.0) for name in room.resources}
                wanted = f"{room.number} {room.what} of {spelled(room.resources)} each"
                raise NoCluster(
                    f"no room for {wanted} was given in {seconds:g} s (free now: {spelled(free)}): other work holds "
                    "the cluster, or it is slow to give what is free"
                )
            await asyncio.sleep(0.1)
    except BaseException:
        release(group)
        raise
    return group


async def reserve_most(room: Room, seconds: float) -> tuple[Any, int]:
    """Return what `reserve` does and its number of places; of a run that goes on with less (`AGAIN_WITH_LESS`) soon a
    group of as many as the nodes that are left can hold. Raises as `reserve`."""
    is_less = os.environ.get(STARTED_AGAIN) == AGAIN_WITH_LESS
    try:
        return await reserve(room, _REACH_SECONDS if is_less else seconds), room.number
    except NoCluster:
        fewer = places_of(room, nodes_beside_ranks())
        if not is_less or not 0 < fewer < room.number:
            raise
        log.warning("nodes are away: there are %d of %d %s", fewer, room.number, room.what)
        return await reserve(replace(room, number=fewer), seconds), fewer


def request_place(resources: Mapping[str, float]) -> Any:
    """Return a placement group of one place, which Ray makes once it is free."""
    from ray.util import placement_group

    return placement_group([dict(resources)], name=_name_of_group())


def _name_of_group() -> str:
    """Return a name that says of which ranks' run it is, where they reserve it."""
    return f"{os.environ[ROOM_OF_RANKS]}-{uuid.uuid4().hex}" if os.environ.get(ROOM_OF_RANKS) else ""


def nodes_of_run(room: Room, room_of_ranks: str) -> frozenset[str]:
    """Return the living nodes that could hold a place of the room and that the ranks of a run (by the id of their
    group), or what they reserved themselves, are on."""
    import ray
    from ray.util import placement_group_table

    able = {
        node["NodeID"] for node in ray.nodes() if node["Alive"] and places_on(room.resources, node["Resources"]) > 0
    }
    groups = [group for number, group in placement_group_table().items() if group["state"] == "CREATED"
              and (number == room_of_ranks or group["name"].startswith(f"{room_of_ranks}-"))]  # fmt: skip
    return frozenset(node for group in groups for node in group["bundles_to_node_id"].values() if node in able)


def free_places(room: Room, but: Collection[str] = ()) -> dict[str, int]:
    """Return how many places of the room are free now on each living node that has any, `but` of these nodes."""
    import ray
    from ray._private.state import available_resources_per_node

    living = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    places = {name: places_on(room.resources, free) for name, free in available_resources_per_node().items()}
    return {name: number for name, number in places.items() if number > 0 and name in living and name not in but}


def nodes_beside_ranks() -> list[dict[str, float]]:
    """Return the resources of every living node, but for those that the ranks of this very run hold."""
    import ray
    from ray.util import placement_group_table

    found = {node["NodeID"]: dict(node["Resources"]) for node in ray.nodes() if node["Alive"]}
    own = placement_group_table().get(os.environ.get(ROOM_OF_RANKS, ""), {})
    for number, node in own.get("bundles_to_node_id", {}).items():
        for name, amount in own["bundles"][number].items() if node in found else ():
            found[node][name] = found[node].get(name, 0.0) - amount
    return list(found.values())


def has_place(group: Any, number: int) -> bool:
    """Say whether place `number` of a reserved room is on a node that lives; Ray moves places of nodes that are gone to
    others with room for them."""
    import ray
    from ray.util import placement_group_table

    def look() -> dict[str, Any] | None:
        found = placement_group_table(group)
        living = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        return living.get(found["bundles_to_node_id"].get(number)) if found["state"] == "CREATED" else None

    node = _within(_REACH_SECONDS, look)
    if node is None:
        return False
    try:  # Ray misses a node only after some heartbeats
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), _REACH_SECONDS).close()
    except OSError:
        return False
    return True


def release(group: Any) -> None:
    """Give back what `reserve` returned."""
    from ray.util import remove_placement_group

    remove_placement_group(group)


def has_gpus() -> bool:
    """Say whether any node of the cluster has a GPU."""
    import ray

    return bool(ray.cluster_resources().get("GPU"))


def node_address() -> str:
    """Return the address by which other nodes reach this one."""
    import ray.util

    return str(ray.util.get_node_ip_address())


def place_actor(kind: type, group: Any, number: int, resources: Mapping[str, float], *arguments: Any) -> Any:
    """Return a handle of a new actor in place `number` of a reserved room; its methods are called by `call_actor`."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    made: Any = ray.remote(kind).options(
        num_cpus=resources.get("CPU", 0),
        num_gpus=resources.get("GPU", 0),
        max_concurrency=100,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
        runtime_env={"env_vars": {"PYTHONPATH": ROOT}},
    )
    return made.remote(*arguments)


def place_of_actor() -> tuple[str, str, list[str]]:
    """In an actor: (its node, the address of that, the GPUs that are its own)."""
    import ray

    found = ray.get_runtime_context()
    return found.get_node_id(), node_address(), [str(gpu) for gpu in ray.get_gpu_ids()]


def cluster_address() -> str:
    """Return the address of the cluster that this program is in."""
    import ray

    return str(ray.get_runtime_context().gcs_address)


async def call_actor(handle: Any, name: str, *arguments: Any, patience: float = 0.0) -> Any:
    """Return what that method of an actor returns. One that cannot be reached for a while, though nobody knows that it
    is dead, is asked again for `patience` seconds: the method may then run twice. Raises ActorLost."""
    import ray.exceptions

    end = math.inf
    while True:
        try:
            return await getattr(handle, name).remote(*arguments)
        except ray.exceptions.ActorUnavailableError as error:
            end = min(end, time.monotonic() + patience)
            if time.monotonic() >= end:
                raise ActorLost(_first_line(error)) from None
        except ray.exceptions.RayError as error:
            raise ActorLost(_first_line(error)) from None
        await asyncio.sleep(_AGAIN_SECONDS)


def end_actor(handle: Any, name: str, seconds: float) -> Any:
    """Return what the actor's last method returns, None where it does not within `seconds`, and end it."""
    import ray
    import ray.exceptions

    found = None
    with suppress(ray.exceptions.RayError):  # it is gone, or does not answer in time
        found = ray.get(getattr(handle, name).remote(), timeout=seconds)
    with suppress(ray.exceptions.RayError):
        _within(_REACH_SECONDS, lambda: ray.kill(handle))
    return found


def _first_line(error: Exception) -> str:
    """Return what went wrong in an actor (Ray's own text of it begins with a header), or the first line of an error."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):
        return f"{type(cause).__name__}: {_first_line(cause)}"
    return str(error).strip().split("\n")[0] or type(error).__name__
