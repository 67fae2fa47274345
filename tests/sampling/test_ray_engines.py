"""Engines on two Ray nodes (raylets of this machine): who gets what, and what becomes of it when an engine, its actor
or its node is gone. The engines are stand-ins without vLLM; the last test has real ones."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.data.steps import TokenRow
from espalier.rl.delivery.weight_sync import WeightSync
from espalier.rl.engines_from_config import engines_of
from espalier.runtime import ray_cluster
from espalier.runtime.ranks import AGAIN_WITH_LESS, STARTED_AGAIN
from espalier.runtime.ray_cluster import (
    ActorLost,
    NoCluster,
    call_actor,
    join_cluster,
    leave_cluster,
    place_actor,
    release,
    reserve,
)
from espalier.runtime.ray_rooms import BadRoom, Room, missing_room
from espalier.sampling.child_process import CannotStart
from espalier.sampling.client import Refused
from espalier.sampling.engine_scorer import EngineScorer
from espalier.sampling.ray_engines import RayEngines
from tests.sampling.test_data_parallel_engines import TWO, opened, request, wait_until

ray = pytest.importorskip("ray")


class Stood(RayEngines):
    program = "tests.support.engine_stand_in"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without room for engines, and two nodes with room for two each."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        made.add_node(num_cpus=2)
    before = signal.getsignal(signal.SIGTERM)
    joined = join_cluster(made.address)
    assert signal.getsignal(signal.SIGTERM) is before, "a run saves a checkpoint at SIGTERM, by a handler of its own"
    yield made
    if joined:
        leave_cluster()
    made.shutdown()


def engines(folder: Path, model: str = "policy", **settings: Any) -> AbstractAsyncContextManager[Stood]:
    return opened(Stood(model, str(folder / "engine.log"), **settings))


def stand_ins() -> list[int]:
    """Return the processes of stand-ins that actors started."""
    asked = ["ps", "-ww", "-eo", "pid=,ppid=,args="]
    rows = [line.split(None, 2) for line in subprocess.run(asked, capture_output=True, text=True).stdout.splitlines()]
    actors = {pid for pid, _, words in rows if words.startswith("ray::")}
    return [int(pid) for pid, parent, words in rows if parent in actors and "engine_stand_in" in words]


def test_problems_are_shared_out_over_the_nodes_and_nothing_is_left_behind(cluster: Any, tmp_path: Path) -> None:
    folders = set(Path(tempfile.gettempdir()).glob("espalier-engine-*"))

    async def ask() -> None:
        async with engines(tmp_path, num_engines=2, placement="STRICT_SPREAD") as client:
            asked = [client.sample(request(str(k), f"p{k}"), TWO) for k in range(20)]
            assert Counter(samples[0].text for samples in await asyncio.gather(*asked)) == {"0": 10, "1": 10}
            with pytest.raises(Refused, match="too long"):
                await client.sample(request("refused"), TWO)
            assert await client.is_working()
            assert len(stand_ins()) == 2

    asyncio.run(ask())
    assert stand_ins() == []
    assert set(Path(tempfile.gettempdir()).glob("espalier-engine-*")) <= folders
    assert (tmp_path / "engine-1.log").is_file()
    asyncio.run(wait_until(all_is_free))


@pytest.mark.slow
def test_engines_that_score_are_asked_on_every_node_and_one_that_is_lost_is_done_without(
    cluster: Any, tmp_path: Path
) -> None:
    rows = [TokenRow("slow" if k else "row", [k, 7], [0]) for k in range(16)]
    scorer = EngineScorer(Stood(num_engines=2, placement="STRICT_SPREAD"), str(tmp_path / "engine.log"))
    found: dict[int, list[list[float]]] = {}

    def on_batch(places: list[int], logits: list[list[list[float]]]) -> None:
        found.update(zip(places, logits, strict=True))
        if len(found) == 2:  # both engines have more to do
            os.kill(stand_ins()[1], signal.SIGKILL)

    scorer.open("prm")
    try:
        scorer.token_logits(rows, 2, on_batch)
    finally:
        scorer.close()
    assert sorted((place, pair[0]) for place, pairs in found.items() for pair in pairs) == [(k, k) for k in range(16)]
    assert {pair[1] for pairs in found.values() for pair in pairs} == {0.0, 1.0}
    assert stand_ins() == []
    asyncio.run(wait_until(all_is_free))


def test_new_weights_reach_the_engines_of_every_node(cluster: Any, tmp_path: Path) -> None:
    weights = {"a": torch.arange(5e5), "b": torch.tensor(True)}

    async def ask() -> None:
        async with engines(tmp_path, num_engines=2, placement="STRICT_SPREAD") as client:
            sync = WeightSync(engines_of(client, None))
            for _ in range(2):
                await sync.deliver(weights)
                assert sync.is_received  # with receipts of both, held against what was sent
            os.kill(stand_ins()[1], signal.SIGKILL)
            started = time.monotonic()
            await sync.deliver(weights)
            assert time.monotonic() - started < 30
            assert (sync.num_serving, sync.is_received) == (1, True)
            sync.close()

    asyncio.run(ask())
    asyncio.run(wait_until(all_is_free))


async def all_is_free() -> bool:
    """Say whether nothing of the cluster is reserved; it knows a moment later."""
    return bool(ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])


@pytest.mark.slow
def test_what_cannot_be_started_says_why(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(**settings: Any) -> None:
        async with engines(tmp_path, **settings):
            pass

    with pytest.raises(CannotStart, match=r"had for missing\nthe end of .*\n.*ValueError: no weights"):
        asyncio.run(start(model="missing"))
    with pytest.raises(CannotStart, match="there is no folder /no/such on this node"):
        asyncio.run(start(model="/no/such"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with monkeypatch.context() as patched:
        patched.setattr("espalier.sampling.ray_engines.model_fingerprint", lambda path: "of other weights")
        with pytest.raises(CannotStart, match="model is another model on this node than where the program runs"):
            asyncio.run(start(model=str(tmp_path / "model")))
    asyncio.run(wait_until(all_is_free, seconds=30))  # room is given within start_seconds, and a busy Ray takes some
    with pytest.raises(CannotStart, match=r"was not (loaded|started) in 6 s"):
        asyncio.run(start(model="slow", start_seconds=6))
    assert stand_ins() == []


def test_what_the_cluster_cannot_hold_is_said_with_numbers(cluster: Any, tmp_path: Path) -> None:
    async def start(**settings: Any) -> None:
        async with engines(tmp_path, **settings):
            pass

    with pytest.raises(BadRoom, match=r"2 engines of 1 CPU, 3 GPUs each are wanted, and the cluster has room for 0"):
        asyncio.run(start(gpus_each=3))
    with pytest.raises(BadRoom, match="1 engines of 1 CPU, 1 for_engines each are wanted, and the cluster has room"):
        asyncio.run(start(num_engines=1, resources={"for_engines": 1}))
    with pytest.raises(BadRoom, match=r"client.placement must be one of PACK"):
        Stood("m", "l", placement="TIGHT")
    with pytest.raises(BadRoom, match="need at least 1 CPU each"):
        Stood("m", "l", cpus_each=0)
    nodes = [{"CPU": 2.0}, {"CPU": 3.0, "GPU": 1.0}]
    two = {"CPU": 2.0}
    assert missing_room(Room("engines", 2, two, "STRICT_SPREAD"), nodes) == ""
    assert "on one node" in missing_room(Room("engines", 2, two, "STRICT_PACK"), nodes)
    assert missing_room(Room("engines", 5, {"CPU": 1.0}, "PACK"), nodes) == ""
    assert missing_room(Room("engines", 6, {"CPU": 1.0}, "PACK"), nodes).startswith(
        "6 engines of 1 CPU each are wanted"
    )


@pytest.mark.slow
def test_engines_are_on_nodes_that_have_what_they_ask_for_besides(cluster: Any, tmp_path: Path) -> None:
    """Apart from learners: of `ray start --resources '{"for_engines": 2}'`."""
    made = cluster.add_node(num_cpus=2, resources={"for_engines": 2})

    async def where(number: int) -> set[str]:
        async with engines(tmp_path, num_engines=number, placement="SPREAD", resources={"for_engines": 1}) as client:
            return set(ray.util.placement_group_table(client._group)["bundles_to_node_id"].values())

    try:
        with pytest.raises(
            BadRoom, match="3 engines of 1 CPU, 1 for_engines each are wanted, and the cluster has room"
        ):
            asyncio.run(where(3))
        assert asyncio.run(where(2)) == {made.node_id}
    finally:
        cluster.remove_node(made)


def test_a_program_is_in_one_cluster(cluster: Any) -> None:
    assert join_cluster("auto") is False
    assert join_cluster(cluster.address) is False
    with pytest.raises(NoCluster, match=r"is in the cluster at .* already, and cannot join 10\.0\.0\.1:6379 too"):
        join_cluster("10.0.0.1:6379")


@pytest.mark.parametrize(
    ("num_failures", "patience", "is_reached"), [(2, 10.0, True), (2, 0.0, False), (99, 0.3, False)]
)
def test_an_actor_that_cannot_be_reached_for_a_while_is_asked_again(
    num_failures: int, patience: float, is_reached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray says so of a break in the network, and does not know whether the actor lives."""
    monkeypatch.setattr(ray_cluster, "_AGAIN_SECONDS", 0.05)
    asked = []

    class Method:
        async def remote(self) -> str:
            asked.append(1)
            if len(asked) <= num_failures:
                raise ray.exceptions.ActorUnavailableError("no answer", b"0" * 16)
            return "here"

    class Handle:
        wait = Method()

    if is_reached:
        assert asyncio.run(call_actor(Handle(), "wait", patience=patience)) == "here"
    else:
        with pytest.raises(ActorLost, match="no answer"):
            asyncio.run(call_actor(Handle(), "wait", patience=patience))


@pytest.mark.slow
def test_what_went_wrong_in_an_actor_is_named(cluster: Any) -> None:
    class Broken:
        async def work(self) -> None:
            raise OSError("no space left")

    async def ask() -> None:
        room = Room("places", 1, {"CPU": 1})
        group = await reserve(room, 20)
        try:
            await call_actor(place_actor(Broken, group, 0, room.resources), "work")
        finally:
            release(group)

    with pytest.raises(ActorLost, match=r"^OSError: no space left$"):
        asyncio.run(ask())
    asyncio.run(wait_until(all_is_free))


def test_room_that_others_hold_is_waited_for_with_a_deadline(cluster: Any, tmp_path: Path) -> None:
    held = asyncio.run(reserve(Room("others", int(ray.cluster_resources()["CPU"]), {"CPU": 1}), 20))

    async def start() -> None:
        async with engines(tmp_path, num_engines=1, start_seconds=1):
            pass

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reserve(Room("engines", 1, {"CPU": 1}), 60), 0.5)

    asyncio.run(give_up())
    with pytest.raises(NoCluster, match=r"no room for 1 engines of 1 CPU each was given in 1 s \(free now: 0 CPUs\)"):
        asyncio.run(start())
    release(held)
    asyncio.run(wait_until(all_is_free))


@pytest.mark.slow
def test_a_program_that_is_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    code = (
        "import asyncio, os, signal\nfrom espalier.sampling.ray_engines import RayEngines\n"
        "RayEngines.program = 'tests.support.engine_stand_in'\n"
        f"client = RayEngines('policy', {str(tmp_path / 'engine.log')!r}, num_engines=1)\n"
        "async def run():\n    await client.open()\n    print(os.getpid(), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\nasyncio.run(run())\n"
    )
    before = set(own_processes())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr[-500:]

    async def is_clean() -> bool:
        return not set(own_processes()) - before

    asyncio.run(wait_until(is_clean, 20))


def own_processes() -> list[str]:
    """Return Ray's processes and stand-ins, but for Ray's two agents, which take half a minute to end."""
    asked = ["pgrep", "-f", "raylet/raylet|gcs_server|ray::EngineHost|engine_stand_in"]
    found = subprocess.run(asked, capture_output=True, text=True)
    return found.stdout.split()


def test_no_cluster_at_an_address_is_one_line(tmp_path: Path) -> None:
    code = (
        "from espalier.runtime.ray_cluster import join_cluster, NoCluster\n"
        "try:\n    join_cluster('127.0.0.1:1')\nexcept NoCluster as error:\n    print('LINE', error)\n"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "LINE client.address=127.0.0.1:1 cannot be had: " in done.stdout, done.stderr[-500:]
    assert time.monotonic() - started < 45


@pytest.mark.slow
@pytest.mark.parametrize("what", ["process", "actor", "node"])
def test_the_problems_of_an_engine_that_is_gone_go_to_the_others(
    what: str, cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = cluster.add_node(num_cpus=4, resources={"gone": 1}) if what == "node" else None

    async def ask() -> None:
        room = {"cpus_each": 4} if node else {"max_replaced": 1}
        async with engines(tmp_path, num_engines=2, placement="PACK", **room) as client:
            asked = [asyncio.create_task(client.sample(request(f"slow/{k}", f"p{k}"), TWO)) for k in range(8)]
            await asyncio.sleep(0.1)
            if what == "process":
                os.kill(stand_ins()[0], signal.SIGKILL)
            elif what == "actor":
                ray.kill(client._engines[0].actor)
            elif node is not None:
                cluster.remove_node(node, allow_graceful=False)
            assert [len(samples) for samples in await asyncio.gather(*asked)] == [2] * 8

            async def is_known() -> bool:
                return len(client._lost) == 1 and sum(bool(engine.gone) for engine in client._engines) == bool(node)

            await wait_until(is_known, 30)
            assert len(await client.sample(request("good", "p0"), TWO)) == 2

    if what == "node":
        cluster.add_node(num_cpus=4)
    with caplog.at_level(logging.WARNING):
        asyncio.run(ask())
    (line,) = [record.message for record in caplog.records if record.name == "sample"]
    assert line.endswith("its problems go to the other 1" + ("" if node else ", and another one is started"))
    assert stand_ins() == []


@pytest.mark.slow
def test_the_engine_of_a_lost_node_is_started_when_a_node_has_room_for_it(
    cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run shrinks with a node, and grows when it is back."""
    node, other = cluster.add_node(num_cpus=8), cluster.add_node(num_cpus=8)

    async def ask() -> None:
        async with engines(tmp_path, num_engines=2, cpus_each=8, max_replaced=1) as client:
            sync = WeightSync(engines_of(client, None))
            await sync.deliver({"a": torch.ones(3)}, "1")
            cluster.remove_node(node, allow_graceful=False)
            await wait_until(lambda: asyncio.sleep(0, any("no room" in one for one in messages())), 30)
            assert sync.num_serving == 1
            assert len(await client.sample(request("good", "p0"), TWO)) == 2
            await sync.deliver({"a": torch.ones(3)}, "2")
            back = cluster.add_node(num_cpus=8)
            await wait_until(lambda: asyncio.sleep(0, max(client.num_started) == 2), 30)
            await sync.deliver({"a": torch.ones(3)}, "3")
            assert sync.num_serving == 2
            await sync.check_version(3)
            both = await asyncio.gather(*(client.sample(request("slow", f"p{k}"), TWO) for k in range(2)))
            assert {one.text for answers in both for one in answers} == {"0", "1"}
            sync.close()
        cluster.remove_node(back)
        cluster.remove_node(other)

    def messages() -> list[str]:
        return [record.message for record in caplog.records if record.name == "sample"]

    asyncio.run(ask())
    assert stand_ins() == []


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["SPREAD", "STRICT_SPREAD"])
def test_a_run_that_is_started_again_begins_with_the_engines_that_there_is_room_for(
    placement: str,
    cluster: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And has the others as soon as a node is back, where they do not ask for places that know of one another."""
    monkeypatch.setenv(STARTED_AGAIN, AGAIN_WITH_LESS)
    monkeypatch.setattr(ray_cluster, "_REACH_SECONDS", 2.0)
    nodes = [cluster.add_node(num_cpus=8)]

    async def ask() -> None:
        async with engines(tmp_path, num_engines=2, cpus_each=8, placement=placement) as client:
            sync = WeightSync(engines_of(client, None))
            await sync.deliver({"a": torch.ones(3)}, "1")
            assert sync.num_serving == 1
            assert len(await client.sample(request("good", "p0"), TWO)) == 2
            nodes.append(cluster.add_node(num_cpus=8))
            if placement == "SPREAD":
                await wait_until(lambda: asyncio.sleep(0, max(client.num_started) == 2), 30)
            else:
                await asyncio.sleep(5)
            await sync.deliver({"a": torch.ones(3)}, "2")
            assert sync.num_serving == (2 if placement == "SPREAD" else 1)
            await sync.check_version(2)
            sync.close()

    asyncio.run(ask())
    assert "nodes are away: there are 1 of 2 engines" in caplog.text
    assert stand_ins() == []
    end = time.monotonic() + 20
    while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
        assert time.monotonic() < end, "a group of an engine that came later is held"
        time.sleep(0.1)
    for node in nodes:
        cluster.remove_node(node)


@pytest.mark.slow
def test_a_look_for_room_ends_before_the_cluster_is_left(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that asks Ray after the program has left it joins it anew, and the program never ends."""
    entered, left = threading.Event(), threading.Event()

    def slow(group: Any, number: int) -> bool:
        entered.set()
        time.sleep(1.5)
        left.set()
        return False

    monkeypatch.setattr("espalier.sampling.ray_engines.has_place", slow)

    async def ask() -> None:
        async with engines(tmp_path, num_engines=2, max_replaced=1):
            os.kill(stand_ins()[0], signal.SIGKILL)
            await wait_until(lambda: asyncio.sleep(0, entered.is_set()), 30)
        assert left.is_set()

    asyncio.run(ask())
    assert stand_ins() == []


@pytest.mark.slow
def test_nobody_joins_a_cluster_by_asking_it_something(tmp_path: Path) -> None:
    """Ray's own functions start or join one where the program is in none; we say where and when."""
    program = "from espalier.runtime.ray_cluster import join_cluster, leave_cluster, has_place\n" \
              "join_cluster(''); leave_cluster()\nimport ray\ntry:\n    has_place(None, 0)\n" \
              "except Exception as error:\n    print('refused', ray.is_initialized())\n"  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment)
    assert run.stdout.strip() == "refused False", run.stderr[-2000:]


def test_a_question_that_ray_does_not_answer_has_a_deadline() -> None:
    started = time.monotonic()
    assert ray_cluster._within(0.2, lambda: time.sleep(3600)) is None
    assert ray_cluster._within(5.0, lambda: 7) == 7
    with pytest.raises(KeyError):
        ray_cluster._within(5.0, lambda: {}["a"])
    assert time.monotonic() - started < 3


def test_engines_of_a_run_that_is_started_again_wait_for_a_node_that_is_away(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room("engines", 99, {"CPU": 1.0})
    with pytest.raises(BadRoom, match="99 engines"):
        asyncio.run(reserve(room, 0.2))
    monkeypatch.setenv(STARTED_AGAIN, "1")
    with pytest.raises(NoCluster, match="99 engines"):
        asyncio.run(reserve(room, 0.2))
