"""Ranks on two Ray nodes (raylets of this machine): where they are, what they get, and what becomes of the run
when one of them, its node or the launcher ends. The ranks are plain programs; the last test trains."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from espalier.runtime import ray_launcher
from espalier.runtime.process_lifetime import is_running
from espalier.runtime.rank_host import RankHost
from espalier.runtime.ray_cluster import (
    NoCluster,
    join_cluster,
    leave_cluster,
    nodes_of_run,
    release,
    reserve,
)
from espalier.runtime.ray_launcher import RayLauncher
from espalier.runtime.ray_rooms import BadRoom, Room
from tests.support.ray_head import Head, free_port

ray = pytest.importorskip("ray")

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = 240

PROGRAM = """
import json, os, signal, sys, time
folder, word = sys.argv[1:]
rank = os.environ["RANK"]
path = os.path.join(folder, f"{word}-{rank}.jsonl")
def stop(number, frame):
    print("saved", file=sys.stderr)
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, stop)
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES", "RAY_ADDRESS",
         "OMP_NUM_THREADS")
with open(path, "a") as file:
    own = {"pid": os.getpid(), "AGAIN": os.environ["ESPALIER_STARTED_AGAIN"]}
    file.write(json.dumps({name: os.environ.get(name) for name in names} | own) + "\\n")
start = len(open(path).readlines())
print(f"rank {rank} is here", flush=True)
if word == "killed" and start == 1:
    time.sleep(60 if rank == "0" else 0.5)
    os.kill(os.getpid(), signal.SIGKILL)
if word == "bad" and rank == "1":
    sys.exit(2)
if word == "three":
    sys.exit(3)
if word == "waits" and start == 1 or word in ("bad", "shrinks"):
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without room for ranks, and two nodes with room for two each."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        made.add_node(num_cpus=2)
    joined = join_cluster(made.address)
    yield made
    if joined:
        leave_cluster()
    made.shutdown()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("espalier.runtime.ray_launcher._OTHERS_SECONDS", 1.0)
    monkeypatch.setattr("espalier.runtime.ray_launcher._PAUSE_SECONDS", 0.1)


def launch(folder: Path, word: str, **settings: Any) -> int:
    (folder / "program.py").write_text(PROGRAM)
    return RayLauncher(**settings).run([sys.executable, str(folder / "program.py"), str(folder), word])


def starts(folder: Path, word: str, rank: int = 0) -> list[dict[str, Any]]:
    path = folder / f"{word}-{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def launched(cluster: Any, folder: Path, word: str, **settings: Any) -> subprocess.Popen[bytes]:
    """The same in a process of its own, beside this one."""
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(folder / "program.py"), str(folder), word]
    lines = f"""
from espalier.runtime import ray_launcher
from espalier.runtime.ray_launcher import RayLauncher
ray_launcher._OTHERS_SECONDS, ray_launcher._LOOK_SECONDS = 1.0, 2.0
raise SystemExit(RayLauncher({cluster.address!r}, **{settings!r}).run({command!r}))
"""
    return subprocess.Popen([sys.executable, "-c", lines], cwd=ROOT)


def wait_for(found: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end
        time.sleep(0.05)


def assert_nothing_is_left(folder: Path, word: str) -> None:
    pids = [row["pid"] for rank in range(4) for row in starts(folder, word, rank)]
    end = time.monotonic() + 20
    while any(is_running(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [pid for pid in pids if is_running(pid)]
    while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"] and time.monotonic() < end:
        time.sleep(0.05)
    assert ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"]


def test_ranks_get_what_a_launcher_gives_them_and_those_of_a_node_stand_together(
    cluster: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert launch(tmp_path, "ends", num_ranks=4, placement="SPREAD") == 0
    rows = [starts(tmp_path, "ends", rank)[0] for rank in range(4)]
    assert [row["RANK"] for row in rows] == ["0", "1", "2", "3"]
    assert [row["LOCAL_RANK"] for row in rows] == ["0", "1", "0", "1"]
    for row in rows:
        assert (row["WORLD_SIZE"], row["LOCAL_WORLD_SIZE"], row["OMP_NUM_THREADS"]) == ("4", "2", "1")
        assert (row["MASTER_ADDR"], row["RAY_ADDRESS"]) == (rows[0]["MASTER_ADDR"], cluster.address)
        assert row["CUDA_VISIBLE_DEVICES"] == "", "of the program that launched"
    assert sorted(capfd.readouterr().out.splitlines()) == [f"rank {rank} is here" for rank in range(4)]
    assert_nothing_is_left(tmp_path, "ends")


@pytest.mark.slow
def test_a_run_that_lost_a_rank_is_started_again_and_one_with_bad_data_is_not(cluster: Any, tmp_path: Path) -> None:
    assert launch(tmp_path, "killed", num_ranks=2, placement="STRICT_SPREAD") == 0
    assert [len(starts(tmp_path, "killed", rank)) for rank in range(2)] == [2, 2]
    assert launch(tmp_path, "bad", num_ranks=2) == 2
    assert len(starts(tmp_path, "bad")) == 1
    assert launch(tmp_path, "three", num_ranks=1, max_restarts=1) == 3
    assert len(starts(tmp_path, "three")) == 2
    assert_nothing_is_left(tmp_path, "killed")
    assert_nothing_is_left(tmp_path, "bad")


def test_a_signal_goes_on_to_the_ranks_which_save(cluster: Any, tmp_path: Path) -> None:
    process = launched(cluster, tmp_path, "waits", num_ranks=2)
    wait_for(lambda: all(starts(tmp_path, "waits", rank) for rank in range(2)))
    process.terminate()
    assert process.wait(60) == 143
    assert len(starts(tmp_path, "waits")) == 1
    assert_nothing_is_left(tmp_path, "waits")


@pytest.mark.slow
def test_ranks_end_with_a_launcher_that_is_killed(cluster: Any, tmp_path: Path) -> None:
    process = launched(cluster, tmp_path, "waits", num_ranks=2)
    wait_for(lambda: all(starts(tmp_path, "waits", rank) for rank in range(2)))
    process.kill()
    process.wait()
    assert_nothing_is_left(tmp_path, "waits")


@pytest.mark.slow
def test_a_run_waits_for_a_node_in_place_of_the_lost_one(cluster: Any, tmp_path: Path) -> None:
    lost = cluster.add_node(num_cpus=3)
    process = launched(cluster, tmp_path, "waits", num_ranks=1, cpus_each=3)
    wait_for(lambda: bool(starts(tmp_path, "waits")))
    cluster.remove_node(lost, allow_graceful=False)
    wait_for(lambda: not is_running(starts(tmp_path, "waits")[0]["pid"]))
    another = cluster.add_node(num_cpus=3)
    assert process.wait(60) == 0
    assert len(starts(tmp_path, "waits")) == 2
    assert_nothing_is_left(tmp_path, "waits")
    cluster.remove_node(another)


@pytest.mark.slow
def test_a_run_whose_node_stays_away_goes_on_with_fewer_ranks_and_grows_again(
    cluster: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The head has no room for ranks; nodes of 3 CPUs hold one rank each. One that nobody uses is not missed."""
    nodes = [cluster.add_node(num_cpus=3) for _ in range(3)]
    process = launched(cluster, tmp_path, "shrinks", num_ranks=2, cpus_each=3, min_ranks=1, start_seconds=25.0,
                       max_restarts=1)  # fmt: skip
    wait_for(lambda: all(starts(tmp_path, "shrinks", rank) for rank in range(2)))
    free = ray._private.state.available_resources_per_node()
    (unused,) = [node for node in nodes if free[node.node_id].get("CPU") == 3]
    time.sleep(5)  # until the launcher has looked
    cluster.remove_node(unused)
    gone, left = (node for node in nodes if node is not unused)
    cluster.remove_node(gone, allow_graceful=False)
    wait_for(lambda: any(row["WORLD_SIZE"] == "1" for row in starts(tmp_path, "shrinks")), 120)
    another = cluster.add_node(num_cpus=3)
    wait_for(lambda: [row["WORLD_SIZE"] for row in starts(tmp_path, "shrinks")][1:] == ["1", "2"], 120)
    process.terminate()
    assert process.wait(60) == 143
    assert [row["AGAIN"] for row in starts(tmp_path, "shrinks")] == ["", "less", "1"]
    said = capfd.readouterr().err
    assert "1 of 2 nodes are there: the run goes on with 1 of 2 ranks" in said
    assert "all nodes are there again: started with 2 ranks" in said
    assert "(2 of 1)" not in said, "growing is no restart after a loss"
    assert_nothing_is_left(tmp_path, "shrinks")
    for node in (left, another):
        cluster.remove_node(node)


def test_the_nodes_of_a_run_are_those_of_its_ranks_and_of_what_they_reserve_that_could_hold_ranks(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room("ranks", 2, {"CPU": 2.0}, "STRICT_SPREAD")

    async def look() -> Any:
        ranks = await reserve(room, 30)
        for_engines = cluster.add_node(num_cpus=9, resources={"engines": 1})
        own = ranks.id.hex()
        assert len(nodes_of_run(room, own)) == 2
        others = await reserve(Room("others", 1, {"CPU": 1.0, "engines": 0.5}), 30)
        assert len(nodes_of_run(room, own)) == 2, "of another run"
        monkeypatch.setenv("ESPALIER_ROOM", own)
        engines = await reserve(Room("engines", 1, {"CPU": 1.0, "engines": 0.5}), 30)
        assert len(nodes_of_run(room, own)) == 3
        assert len(nodes_of_run(Room("ranks", 2, {"CPU": 2.0, "learners": 1.0}), own)) == 0, "none could hold a rank"
        monkeypatch.delenv("ESPALIER_ROOM")
        for group in (ranks, others, engines):
            release(group)
        return for_engines

    cluster.remove_node(asyncio.run(look()))


def test_what_cannot_be_is_one_line(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(BadRoom, match=r"launcher.min_ranks must be 1 to launcher.num_ranks \(2\), got 3"):
        RayLauncher(num_ranks=2, min_ranks=3)
    with pytest.raises(BadRoom, match=r"99 ranks of 1 CPU each are wanted, and the cluster has room for"):
        launch(tmp_path, "ends", num_ranks=99)
    with pytest.raises(BadRoom, match=r"launcher\.placement must be one of PACK"):
        launch(tmp_path, "ends", placement="pack")
    with pytest.raises(BadRoom, match=r"launcher\.num_ranks must be at least 1"):
        launch(tmp_path, "ends", num_ranks=0)
    with pytest.raises(BadRoom, match=r"launcher\.gpus_each must be 0, 1 or null"):
        launch(tmp_path, "ends", gpus_each=2)
    with pytest.raises(NoCluster, match=r"cannot be started: .*/none: No such file or directory"):
        RayLauncher().run(["/none"])


@pytest.mark.slow
def test_engines_that_have_no_room_beside_the_ranks_end_the_run_at_once(
    cluster: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    total = int(ray.cluster_resources()["CPU"])
    (tmp_path / "asks.py").write_text(f"""
import asyncio, sys
from espalier.runtime.ray_cluster import join_cluster, reserve
from espalier.runtime.ray_rooms import BadRoom, Room
join_cluster("auto")
asyncio.run(reserve(Room("engines", {total - 1}, {{"CPU": 1.0}}), 20))
try:
    asyncio.run(reserve(Room("engines", {total}, {{"CPU": 1.0}}), 20))
except BadRoom as error:
    sys.exit(f"{{error}}")
""")
    started = time.monotonic()
    launcher = RayLauncher(num_ranks=1, max_restarts=0)
    assert launcher.run([sys.executable, str(tmp_path / "asks.py")]) == 1
    assert f"room for {total - 1} of them beside the ranks" in capfd.readouterr().err
    assert time.monotonic() - started < 30


def test_a_rank_of_another_launcher_does_not_launch() -> None:
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "1"}
    settings = ["-cn", "exp/sft/word_arithmetic", "model.path=m", "examples.path=e", "output_dir=o", "launcher=ray"]
    command = [sys.executable, "trainer_base_ds_mul.py", *settings]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "run the program without launch.py or torchrun" in done.stderr
    assert done.returncode == 2


@pytest.mark.parametrize(("first", "code"), [(0, 0), (3, 3)])
def test_a_rank_that_does_not_end_behind_another_one_is_ended(
    first: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work is done where one of them says so: they come to their end together."""
    signals = []

    async def call(host: str, name: str, *arguments: Any, patience: float = 0.0) -> Any:
        if name == "tell":
            signals.append((host, arguments[0]))
        elif host == "ends":
            return [], first
        else:
            await asyncio.sleep(3600)
        return None

    monkeypatch.setattr(ray_launcher, "call_actor", call)
    for name in ("_OTHERS_SECONDS", "_SAVE_SECONDS", "_END_SECONDS"):
        monkeypatch.setattr(ray_launcher, name, 0.3)
    ranks = [ray_launcher._Rank("ends", "n", "a", [], 0), ray_launcher._Rank("hangs", "n", "a", [], 1)]
    found = asyncio.run(asyncio.wait_for(RayLauncher()._ended(ranks), 20))
    assert found == code
    assert signals == [("hangs", signal.SIGTERM), ("hangs", signal.SIGKILL)]


def test_ranks_go_on_where_nobody_reads_what_they_print(monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter([([(1, b"one\n")], None), ([(1, b"two\n")], None), ([], 0)])

    async def call(host: str, name: str, *arguments: Any, patience: float = 0.0) -> Any:
        return next(said)

    class Gone:
        @property
        def buffer(self) -> "Gone":
            return self

        def write(self, line: bytes) -> None:
            raise BrokenPipeError

        def flush(self) -> None: ...

    monkeypatch.setattr(ray_launcher, "call_actor", call)
    monkeypatch.setattr(sys, "stdout", Gone())
    ranks = [ray_launcher._Rank("h", "n", "a", [], 0)]
    assert asyncio.run(RayLauncher()._ended(ranks)) == 0


def test_a_signal_whose_answer_was_lost_is_not_sent_twice(tmp_path: Path) -> None:
    """A rank takes a second one, seconds later, as a wish to end without saving."""
    program = "import signal, sys, time\nseen = []\nsignal.signal(15, lambda *_: seen.append(1))\n"
    program += "print('up', flush=True)\ntime.sleep(1.5)\nsys.exit(len(seen))\n"

    async def ask() -> int:
        host = RankHost()
        await host.start([sys.executable, "-c", program], str(tmp_path), {})
        await host.output(0)
        for serial in (7, 7):
            await host.tell(signal.SIGTERM, serial)
            await asyncio.sleep(0.2)
        assert host._process is not None
        return host._process.wait(20)

    assert asyncio.run(ask()) == 1


def test_lines_whose_answer_was_lost_on_its_way_come_again(tmp_path: Path) -> None:
    async def ask() -> list[Any]:
        host = RankHost()
        await host.start([sys.executable, "-c", "print(1); print(2)"], str(tmp_path), {})
        assert host._process is not None
        host._process.wait(20)
        for reader in host._readers:
            reader.join(20)
        return [await host.output(number) for number in (0, 0, 1, 2)]

    one, two = (1, b"1\n"), (1, b"2\n")
    assert asyncio.run(ask()) == [([one, two], None), ([one, two], None), ([two], None), ([], 0)]


def test_a_run_that_is_started_again_wants_the_gpus_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster whose only GPU node is away has none to see."""
    seen, codes, attempts = iter([True, False, False]), iter([3, 0]), []

    async def attempt(self: RayLauncher, command: list[str], gpus: int, is_first: bool) -> int:
        attempts.append((gpus, is_first))
        return next(codes)

    monkeypatch.setattr(ray_launcher, "has_gpus", lambda: next(seen))
    monkeypatch.setattr(ray_launcher, "join_cluster", lambda *_: False)
    monkeypatch.setattr(ray_launcher, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(RayLauncher, "_attempt", attempt)
    assert RayLauncher().run(["program"]) == 0
    assert attempts == [(1, True), (1, False)]


@pytest.mark.parametrize(("share", "places", "number"), [
    (0.5, 99, 8), (0.75, 99, 8), (1.0, 99, 16), (1.0, 9, 8), (0.5, 3, 2), (0.0, 99, 0), (1.0, 0, 0),
])  # fmt: skip
def test_a_run_goes_on_with_a_divisor_of_its_ranks(share: float, places: int, number: int) -> None:
    """A batch of 64 rows for 16 ranks is none for 12."""
    assert ray_launcher._fewer(16, share, places) == number


@pytest.mark.parametrize(("codes", "restarts", "found"), [
    ([0], 0, 0),  # it ended while it was asked to save
    ([2, 0], 5, 2), ([143, 0], 0, 0), ([143, 3, 3, 0], 1, 3), ([137, 0], 1, 0), ([137, 0], 0, 137),
])  # fmt: skip
def test_growing_is_no_restart_and_starts_nothing_that_is_over(
    codes: list[int], restarts: int, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest, attempts = iter(codes), []

    async def attempt(self: RayLauncher, command: list[str], gpus: int, is_first: bool) -> int:
        self._grows = is_first
        attempts.append(is_first)
        return next(rest)

    monkeypatch.setattr(ray_launcher, "has_gpus", lambda: False)
    monkeypatch.setattr(ray_launcher, "join_cluster", lambda *_: False)
    monkeypatch.setattr(ray_launcher, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(RayLauncher, "_attempt", attempt)
    assert RayLauncher(max_restarts=restarts, min_ranks=1).run(["program"]) == found


@pytest.mark.slow
def test_a_run_grows_only_where_there_is_free_room_for_all_of_it(
    cluster: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A node that is there, and held by others, is no room."""
    nodes = [cluster.add_node(num_cpus=3) for _ in range(2)]
    process = launched(cluster, tmp_path, "shrinks", num_ranks=2, cpus_each=3, min_ranks=1, start_seconds=10.0)
    wait_for(lambda: all(starts(tmp_path, "shrinks", rank) for rank in range(2)))
    time.sleep(5)  # until the launcher has looked
    cluster.remove_node(nodes.pop(), allow_graceful=False)
    wait_for(lambda: any(row["WORLD_SIZE"] == "1" for row in starts(tmp_path, "shrinks")), 120)
    nodes.append(cluster.add_node(num_cpus=3))
    held = asyncio.run(reserve(Room("others", 1, {"CPU": 3.0}), 30))
    time.sleep(10)
    assert [row["WORLD_SIZE"] for row in starts(tmp_path, "shrinks")] == ["2", "1"]
    release(held)
    wait_for(lambda: [row["WORLD_SIZE"] for row in starts(tmp_path, "shrinks")] == ["2", "1", "2"], 60)
    process.terminate()
    assert process.wait(60) == 143
    assert_nothing_is_left(tmp_path, "shrinks")
    for node in nodes:
        cluster.remove_node(node)


@pytest.mark.slow
def test_a_head_that_asks_for_a_token_is_joined_with_that_of_the_home_or_of_the_environment(tmp_path: Path) -> None:
    token, homes = "0123456789abcdef" * 4, [tmp_path / "with_token", tmp_path / "without"]
    for home in homes:
        (home / ".ray").mkdir(parents=True)
    (homes[0] / ".ray" / "auth_token").write_text(token)
    none = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    given = {"HOME": str(homes[1]), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    head = Head(free_port(), tmp_path / "head.log", given)
    rank = "import os; print('rank', *(os.environ.get(f'RAY_AUTH_{name}') for name in ('MODE', 'TOKEN')))"
    code = f"""
import sys
from espalier.runtime.ray_cluster import NoCluster
from espalier.runtime.ray_launcher import RayLauncher
try:
    RayLauncher({head.address!r}, num_ranks=1).run([sys.executable, "-c", {rank!r}])
except NoCluster as error:
    print(error)
"""
    try:
        programs = [
            subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=none | own, stdout=subprocess.PIPE, text=True)
            for own in ({"HOME": str(homes[0])}, {"HOME": str(homes[1])}, given)
        ]
        of_home, without, of_environment = (program.communicate(timeout=150)[0] for program in programs)
    finally:
        head.end()
    assert f"rank token {token}" in of_home
    assert f"rank token {token}" in of_environment
    assert f"launcher.address={head.address} cannot be had: " in without
    assert "have the same file here, or start Ray with RAY_AUTH_MODE=disabled on every node" in without
