"""Several engines in processes of their own: who gets what, and what becomes of it when one of them fails. The engines
are stand-ins without vLLM; a run of main.py with real ones is the last test."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import torch
import yaml
from hydra.errors import HydraException

from espalier.data.records import BadInput
from espalier.data.timeline import DRAWING, read_timeline
from espalier.rl.delivery.receipts import StaleWeights
from espalier.rl.delivery.weight_sync import WeightSync
from espalier.rl.delivery.weight_update_engine import OwnEngine
from espalier.rl.engines_from_config import check_client, engines_of
from espalier.runtime.config_errors import describe_config_error
from espalier.runtime.entrypoint import BadConfig, build, compose_config
from espalier.runtime.schemas import RLConfig, SampleConfig
from espalier.sampling.child_engine import ChildEngine
from espalier.sampling.child_process import CannotStart, group_members
from espalier.sampling.client import Refused, SampleRequest, SamplingParams, ServerGone
from espalier.sampling.data_parallel_engines import DataParallelEngines
from espalier.sampling.engine_arguments import engine_arguments
from espalier.sampling.engine_pool import EnginePool
from espalier.sampling.offline_client import OfflineClient
from espalier.sampling.ray_engines import RayEngines
from espalier.sampling.server import VLLMServer
from espalier.sampling.vllm_client import VLLMClient
from tests.support.rl_cases import read_metrics

ROOT = Path(__file__).resolve().parent.parent.parent
BLOCKS = ROOT / "conf" / "engine_options" / "partial_block_cache.yaml"
TWO = SamplingParams(n=2, temperature=1.0, max_tokens=4)


Pool = TypeVar("Pool", bound=EnginePool)


class Stood(DataParallelEngines):
    program = "tests.support.engine_stand_in"


@asynccontextmanager
async def opened(client: Pool) -> AsyncIterator[Pool]:
    await client.open()
    try:
        yield client
    finally:
        await client.close()


def engines(folder: Path, model: str = "policy", **settings: Any) -> AbstractAsyncContextManager[Stood]:
    return opened(Stood(model, str(folder / "engine.log"), **settings))


def request(name: str, problem: str = "") -> SampleRequest:
    return SampleRequest(name, "", [1, 2], problem_id=problem)


def processes(client: DataParallelEngines) -> list[Any]:
    found = [engine.process for engine in client._engines]
    assert all(process is not None for process in found)
    return found


async def wait_until(holds: Any, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not await holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def test_problems_are_shared_out_evenly_and_stay_where_they_are(tmp_path: Path) -> None:
    async def ask() -> None:
        async with engines(tmp_path, num_engines=3) as client:
            asked = [client.sample(request(str(k), f"p{k}"), TWO) for k in range(30)]
            first = [samples[0].text for samples in await asyncio.gather(*asked)]
            assert Counter(first) == {"0": 10, "1": 10, "2": 10}
            again = [client.sample(request(f"{k}/again", f"p{k}"), TWO) for k in reversed(range(30))]
            assert [samples[0].text for samples in await asyncio.gather(*again)] == first[::-1]
            assert [len(s) for s in await asyncio.gather(*(client.sample(request(str(k)), TWO) for k in range(4)))] == [
                2
            ] * 4
            await WeightSync(engines_of(client, None)).deliver({"a": torch.ones(3)})
            assert client._homes == {}  # no cache to stay for

    asyncio.run(ask())


def test_weights_and_questions_go_to_every_engine(tmp_path: Path) -> None:
    async def ask() -> None:
        async with engines(tmp_path) as client:
            both = cast(list[OwnEngine], engines_of(client, None))
            assert [engine.name for engine in both] == ["engine 0 of 2", "engine 1 of 2"]
            sync = WeightSync(both)
            for step in range(2):
                await sync.deliver({"a": torch.full((3, 2), float(step)), "b": torch.tensor(True)})
                assert sync.is_received  # with receipts of both
            for number, engine in enumerate(both):
                assert await engine.served_version() == "default"
                await engine.stamp("3")
                assert await engine.served_version() == "3"
                assert await engine.client.cached_tokens([1]) == number
                assert await engine.prompt_logprobs([1, 2, 3]) == [float(number)] * 2
            assert await client.is_working()

    asyncio.run(ask())


@pytest.mark.slow
def test_one_engine_that_does_not_follow_is_named(tmp_path: Path) -> None:
    async def ask() -> None:
        async with engines(tmp_path, "stubborn") as client:
            both = engines_of(client, None)
            sync = WeightSync(both, max_logprob_gap=0.1, precision="fp32")
            with pytest.raises(StaleWeights, match="engine 1 of 2 did not empty its prefix cache"):
                await sync.deliver({"a": torch.ones(3)})
            for engine in both:
                await cast(OwnEngine, engine).stamp("3")
            with pytest.raises(StaleWeights, match="engine 1 of 2 says that it serves version 'old', not 3"):
                await sync.check_version(3)

    asyncio.run(ask())


def test_an_engine_that_dies_in_a_delivery_is_left_out_of_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = {name: torch.ones(4_000_000) for name in "abcdefgh"}

    async def ask() -> None:
        async with engines(tmp_path, "mortal") as client:
            sync = WeightSync(engines_of(client, None))
            started = time.monotonic()
            await sync.deliver(weights, "3")
            assert time.monotonic() - started < 15
            assert sync.is_received
            assert sync.num_serving == 1
            await sync.check_version(3)
            assert {(await client.sample(request(str(k)), TWO))[0].text for k in range(4)} == {"0"}
            sync.close()

    asyncio.run(ask())
    again = next(record.message for record in caplog.records if "delivery" in record.message)
    assert re.match(r"a delivery of weights is made again: .*engine 1 of 2 .*exit code 7", again)


@pytest.mark.slow
def test_what_every_engine_refuses_to_take_ends_the_run(tmp_path: Path) -> None:
    async def ask() -> None:
        async with engines(tmp_path, "takes none", max_replaced=1) as client:
            with pytest.raises(ServerGone, match=r"engine . of 2: the vLLM engine takes no weights"):
                await WeightSync(engines_of(client, None)).deliver({"a": torch.ones(3)})
            assert sum(client.num_started) <= 4  # both of the first delivery are one loss

    asyncio.run(ask())


def kill(client: DataParallelEngines, number: int) -> None:
    process = client._engines[number].process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)


def test_an_engine_that_is_started_anew_has_no_request_before_it_has_the_weights_of_now(tmp_path: Path) -> None:
    async def ask() -> None:
        async with engines(tmp_path, max_replaced=1) as client:
            sync = WeightSync(engines_of(client, None))
            await sync.deliver({"a": torch.ones(3)}, "1")

            async def answering() -> set[str]:
                asked = [client.sample(request(f"slow/{k}", f"p{k}"), TWO) for k in range(6)]
                return {samples[0].text for samples in await asyncio.gather(*asked)}

            assert await answering() == {"0", "1"}
            asked = asyncio.create_task(answering())
            await asyncio.sleep(0.1)
            kill(client, 1)
            assert await asked == {"0"}
            assert client.num_moved == 3
            await wait_until(lambda: asyncio.sleep(0, client.num_started[1] == 2))
            assert await answering() == {"0"}
            assert sync.num_serving == 1
            await sync.check_version(1)  # of those that serve
            await sync.deliver({"a": torch.ones(3)}, "2")
            assert sync.num_serving == 2
            await sync.check_version(2)
            assert await answering() == {"0", "1"}
            sync.close()

    asyncio.run(ask())


class LosesOneBehindItsReceipt(Stood):
    """Engine 1 has taken its weights, is lost and is there again while engine 0 still empties its cache."""

    loses = is_taken = False

    async def ask(self, number: int, name: str, *arguments: Any) -> Any:
        if self.loses and name == "reset_cache" and number == 0 and self.num_started[1] == 1:
            await wait_until(lambda: asyncio.sleep(0, self.is_taken))
            kill(self, 1)
            await wait_until(lambda: asyncio.sleep(0, self.num_started[1] == 2))
        found = await super().ask(number, name, *arguments)
        self.is_taken |= self.loses and name == "reset_cache" and number == 1
        return found


@pytest.mark.slow
def test_an_engine_that_was_started_anew_within_a_delivery_is_not_taken_for_the_one_that_took_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def ask() -> None:
        log = str(tmp_path / "pool.log")
        pool = LosesOneBehindItsReceipt("policy", log, num_engines=2, num_threads=1, max_replaced=1)
        async with opened(pool) as client:
            sync = WeightSync(engines_of(client, None))
            await sync.deliver({"a": torch.ones(3)}, "1")
            client.loses = True
            await sync.deliver({"a": 2 * torch.ones(3)}, "2")
            await sync.check_version(2)
            assert sync.num_serving == 2  # the other one has the weights now too, and not only their stamp
            sync.close()

    asyncio.run(ask())
    assert any("a delivery of weights is made again" in record.message for record in caplog.records)


@pytest.mark.slow
def test_engines_that_fail_because_another_one_is_lost_in_a_delivery_are_one_loss(tmp_path: Path) -> None:
    async def ask() -> None:
        async with engines(tmp_path, num_engines=3, max_replaced=1) as client:
            both = cast(list[OwnEngine], engines_of(client, None))
            await asyncio.gather(*(engine.pause() for engine in both))
            for number in range(3):
                client._engines[number].give_up("the group for weights broke")
            await wait_until(lambda: asyncio.sleep(0, client.num_started == [2, 2, 2]))
            sync = WeightSync(both)
            await sync.deliver({"a": torch.ones(3)}, "1")
            assert sync.num_serving == 3
            client._engines[0].give_up("another loss")
            await asyncio.sleep(0.2)
            assert client.num_started == [2, 2, 2]
            sync.close()

    asyncio.run(ask())


@pytest.mark.slow
def test_weights_wait_for_engines_that_are_being_started_and_requests_for_weights_on_their_way(tmp_path: Path) -> None:
    async def ask() -> None:
        async with engines(tmp_path, max_replaced=2) as client:
            both = cast(list[OwnEngine], engines_of(client, None))
            sync = WeightSync(both)
            await sync.deliver({"a": torch.ones(3)}, "1")
            await both[0].pause()  # as a delivery begins
            for number in range(2):
                kill(client, number)
            asked = asyncio.create_task(client.sample(request("good", "p"), TWO))
            await wait_until(lambda: asyncio.sleep(0, sync.num_serving == 0))
            await asyncio.sleep(0.1)
            assert not asked.done()
            await sync.deliver({"a": torch.ones(3)}, "2")
            assert len(await asked) == 2
            await sync.check_version(2)
            sync.close()

    asyncio.run(ask())


@pytest.mark.slow
def test_an_engine_that_is_lost_while_all_sleep_is_started_when_their_devices_are_free(tmp_path: Path) -> None:
    async def ask() -> None:
        async with engines(tmp_path, max_replaced=1) as client:
            client.sleeps = True
            sync = WeightSync(engines_of(client, None))
            await sync.deliver({"a": torch.ones(3)}, "1")
            for _ in range(2):  # the second time they sleep already
                await sync.sleep()
            assert [engine.asleep for engine in client._engines] == [{"weights", "kv_cache"}] * 2
            with pytest.raises(ServerGone, match="engine 1 of 2: EngineAsleep: the engine sleeps"):
                await client.engine(1).prompt_logprobs([1, 2])
            kill(client, 1)
            await wait_until(lambda: asyncio.sleep(0, 1 in client._held))
            await asyncio.sleep(0.3)
            assert client.num_started == [1, 1]  # the learner has the devices
            assert client.is_coming(1)
            await sync.deliver({"a": torch.ones(3)}, "2")  # to the other one; this one is being started by now
            assert sync.num_serving == 1
            await sync.sleep()  # not before it is there
            assert client.num_started == [1, 2]
            assert [engine.asleep for engine in client._engines] == [{"weights", "kv_cache"}] * 2
            await sync.deliver({"a": torch.ones(3)}, "3")
            assert sync.num_serving == 2
            await sync.check_version(3)
            sync.close()

    asyncio.run(ask())


@pytest.mark.slow
def test_the_only_engine_lost_in_its_sleep_is_waited_for_by_the_delivery(tmp_path: Path) -> None:
    async def ask() -> None:
        async with engines(tmp_path, num_engines=1, max_replaced=1) as client:
            client.sleeps = True
            sync = WeightSync(engines_of(client, None))
            await sync.deliver({"a": torch.ones(3)}, "1")
            await sync.sleep()
            kill(client, 0)
            await wait_until(lambda: asyncio.sleep(0, client.is_coming(0)))
            with pytest.raises(ServerGone, match="no engine is left of 1 that has the policy's weights"):
                await client.sample(request("good"), TWO)
            await sync.deliver({"a": torch.ones(3)}, "2")
            assert client.num_started == [2]
            assert len(await client.sample(request("good"), TWO)) == 2
            sync.close()

    asyncio.run(ask())


def test_what_an_engine_refuses_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    async def ask() -> None:
        async with engines(tmp_path, num_engines=1) as client:
            with pytest.raises(Refused, match="too long"):
                await client.sample(request("refused"), TWO)
            with pytest.raises(ServerGone, match="engine 0 of 1: KeyError: 'in\\\\ntwo lines'"):
                await client.sample(request("broken"), TWO)
            assert len(await client.sample(request("good"), TWO)) == 2

    asyncio.run(ask())


def test_a_request_that_is_given_up_is_taken_out_of_its_engine(tmp_path: Path) -> None:
    async def ask() -> None:
        async with engines(tmp_path, num_engines=1) as client:
            asked = asyncio.create_task(client.sample(request("long"), TWO))
            await asyncio.sleep(0.1)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

            async def is_told() -> bool:
                return await client.engine(0).cached_tokens([0]) == 1

            await wait_until(is_told)
            assert client._engines[0].num_owed == 0

    asyncio.run(ask())


def test_where_no_engine_with_the_policys_weights_is_left_every_request_ends(tmp_path: Path) -> None:
    async def ask() -> None:
        async with engines(tmp_path, num_engines=1, max_replaced=1) as client:
            sync = WeightSync(engines_of(client, None))
            await sync.deliver({"a": torch.ones(3)}, "1")
            waiting = asyncio.create_task(client.sample(request("long", "p"), TWO))
            await asyncio.sleep(0.05)
            dying = client._engines[0]
            with pytest.raises(ServerGone, match=r"engine 0 of 1 died \(exit code 7\): RuntimeError: out of memory"):
                await dying.call("sample", request("die"), TWO)
            with pytest.raises(ServerGone, match="no engine is left of 1 that has the policy's weights: engine 0 of 1"):
                await waiting
            with pytest.raises(ServerGone, match="no engine is left that has the policy's weights"):
                await sync.check_version(1)
            sync.close()

    asyncio.run(ask())


class SlowToRead(ChildEngine):
    """Its log takes a while to come, as over a network."""

    async def last_lines(self) -> str:
        await asyncio.sleep(0.5)
        return "the end"


def test_whoever_waits_learns_of_an_engine_that_is_lost_while_its_log_is_read(tmp_path: Path) -> None:
    async def ask() -> None:
        settings = {"model": "policy", "options": {"seed": 0}, "seed": 0}
        engine = SlowToRead("engine 0", str(tmp_path / "e.log"), Stood.program, settings)
        await engine.start({**os.environ, "PYTHONPATH": str(ROOT)}, 60)
        asked = asyncio.create_task(engine.call("sample", request("fail"), TWO))
        await asyncio.sleep(0.3)
        engine.give_up("its node is gone")
        assert engine._reading is not None
        engine._reading.cancel()
        with pytest.raises(ServerGone, match="its node is gone"):
            await asyncio.wait_for(asked, 5)
        await engine.close()

    asyncio.run(ask())


def test_an_answer_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    async def ask() -> None:
        engine = ChildEngine("engine 0 of 1", str(tmp_path / "engine.log"), "none", {})
        _, waiting = engine._expect()
        reader = asyncio.StreamReader()
        reader.feed_data((4).to_bytes(8, "little") + b"junk")
        await engine._read(reader)
        for told in (waiting, asyncio.ensure_future(engine.call("stamp", "1"))):
            with pytest.raises(ServerGone, match="engine 0 of 1 answered what cannot be read: UnpicklingError"):
                await told

    asyncio.run(ask())


def test_an_engine_that_hangs_gives_no_sign_of_life_and_ends_all_the_same(tmp_path: Path) -> None:
    async def ask() -> None:
        async with engines(tmp_path, num_engines=1, probe_seconds=0.2, control_seconds=0.2) as client:
            asked = asyncio.create_task(client.sample(request("hang"), TWO))
            await asyncio.sleep(0.1)
            assert not await client.is_working()
            group = processes(client)[0].pid
            with pytest.raises(ServerGone, match=r"engine 0 of 1 did not answer served_version in 0\.2 s"):
                await client.engine(0).served_version()
            with pytest.raises(ServerGone, match="did not answer served_version"):
                await asked
            await client.close()
            assert group_members(group) == []

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (
            "missing",
            r"engine \d of 2: no vLLM engine can be had .*\nthe end of .*engine-\d.log:\n  \| ValueError: no weights",
        ),
        ("slow", r"engine \d of 2 was not loaded in 1 s\nthe end of "),
    ],
)
def test_engines_that_do_not_start_leave_none_behind(model: str, told: str, tmp_path: Path) -> None:
    client = Stood(model, str(tmp_path / "engine.log"), start_seconds=1.0)
    begun: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "espalier.sampling.child_process.atexit.register", lambda stop: begun.append(stop.__self__.process.pid)
        )
        with pytest.raises(CannotStart, match=told) as caught:
            asyncio.run(client.open())
    assert caught.value.exit_code == 3
    assert len(begun) == 2
    assert [group_members(group) for group in begun] == [[], []]


def test_they_die_with_the_program_that_started_them(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\nfrom espalier.sampling.data_parallel_engines import DataParallelEngines\n"
        "DataParallelEngines.program = 'tests.support.engine_stand_in'\n"
        f"client = DataParallelEngines('policy', {str(tmp_path / 'engine.log')!r})\n"
        "async def main():\n    await client.open()\n"
        "    print(*(engine.process.pid for engine in client._engines), flush=True)\n    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        groups = [int(word) for word in parent.stdout.readline().split()]
        assert all(group_members(group) for group in groups)
        parent.send_signal(signal.SIGKILL)

    async def are_gone() -> bool:
        return not any(group_members(group) for group in groups)

    asyncio.run(wait_until(are_gone))


def test_a_window_that_is_no_number_of_tokens_is_refused() -> None:
    assert DataParallelEngines("m", options={"max_model_len": "4096"}).max_model_length == 4096
    for window in ("16k", "auto", -1):
        with pytest.raises(BadInput, match=r"client\.options\.max_model_len must be a number of tokens, got"):
            DataParallelEngines("m", options={"max_model_len": window})


def test_every_engine_has_a_seed_threads_and_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    client = DataParallelEngines("m", "l", num_engines=3, gpus=[1, "2", 5], seed=5, options={"enforce_eager": True})
    other = DataParallelEngines("m", "l", num_engines=3, gpus=[1, "2", 5], seed=6, options={"enforce_eager": True})
    seeds = {engines.settings(number)["options"]["seed"] for engines in (client, other) for number in range(3)}
    assert len(seeds) == 6  # engine 1 of a run is not engine 0 of a run with the next seed
    assert {client.settings(number)["seed"] for number in range(3)} == {5}  # of seeded requests
    found = [client.environment(number) for number in range(3)]
    assert [row["CUDA_VISIBLE_DEVICES"] for row in found] == ["1", "2", "5"]
    assert {row["OMP_NUM_THREADS"] for row in found} == {"2"}
    assert "RANK" not in found[0]
    assert DataParallelEngines("m", "l", num_threads=3).environment(0)["OMP_NUM_THREADS"] == "3"
    bind = "VLLM_CPU_OMP_THREADS_BIND"
    assert {row[bind] for row in found} == {"nobind"}
    bound = DataParallelEngines("m", "l", num_threads=2, first_core=4)
    assert [bound.environment(number)[bind] for number in range(2)] == ["4-5", "6-7"]
    wide = DataParallelEngines("m", "l", first_core=0, options={"tensor_parallel_size": 2})
    assert [wide.environment(number)[bind] for number in range(2)] == ["0-1|2-3", "4-5|6-7"]
    with pytest.raises(BadInput, match=r"2 engines of 1 GPU each need 2, and client\.gpus names 1"):
        DataParallelEngines("m", "l", gpus=[0])
    with pytest.raises(BadInput, match="num_engines must be at least 1, got 0"):
        DataParallelEngines("m", "l", num_engines=0)


@pytest.mark.parametrize(("gpus", "most"), [(["0", "0", "1"], 2), (["0", "1", "2"], 3)])
def test_engines_that_share_a_gpu_are_started_one_after_the_other(gpus: list[str], most: int, tmp_path: Path) -> None:
    now: list[str] = []
    counts: list[int] = []

    class Started(ChildEngine):
        async def start(self, environment: dict[str, str], seconds: float) -> None:
            device = environment["CUDA_VISIBLE_DEVICES"]
            assert device not in now
            now.append(device)
            counts.append(len(now))
            await asyncio.sleep(0.02)
            now.remove(device)

    class Sharing(Stood):
        def make_engine(self, number: int) -> ChildEngine:
            return Started("engine", str(tmp_path / "log"), self.program, {}, self._lose)

        def environment(self, number: int) -> dict[str, str]:
            return {"CUDA_VISIBLE_DEVICES": gpus[number]}

    asyncio.run(Sharing("policy", str(tmp_path / "engine.log"), num_engines=3).open())
    assert (len(counts), max(counts)) == (3, most)


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_engines_are_eager_where_there_is_no_gpu_unless_they_are_asked_otherwise(
    num_gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    asked: list[tuple[dict[str, Any], bool]] = [
        ({}, num_gpus == 0), ({"enforce_eager": None}, num_gpus == 0), ({"enforce-eager": True}, True),
        ({"enforce_eager": False}, False)]  # fmt: skip
    for options, is_eager in asked:
        assert engine_arguments("m", "float32", None, options, takes_weights=False)["enforce_eager"] is is_eager


def test_they_go_without_a_server_and_copies_are_asked_for_by_their_number() -> None:
    check_client(DataParallelEngines("m", "l"), None)
    check_client(RayEngines("m", "l"), None)
    with pytest.raises(BadConfig, match="set server=none"):
        check_client(DataParallelEngines("m", "l"), VLLMServer("m", "log"))
    with pytest.raises(BadConfig, match=r"server\.options\.data_parallel_size: set client=data_parallel_engines"):
        check_client(VLLMClient("http://localhost:1"), VLLMServer("m", "log", options={"data-parallel-size": 2}))
    with pytest.raises(BadInput, match=r"client\.options\.data_parallel_size: set client\.num_engines in its place"):
        DataParallelEngines("m", "l", options={"data-parallel-size": 2})
    with pytest.raises(BadConfig, match="set client=vllm, data_parallel_engines or ray_engines"):
        check_client(OfflineClient("m"), None)


def test_the_window_that_a_run_asks_of_its_server_is_the_engines() -> None:
    here = ["client=data_parallel_engines", "server=none", "model.path=m", "output_dir=o"]
    asked = compose_config(RLConfig, "exp/ppo/ppo_rho_math", [*here, "critic.model.path=m"])
    assert asked.client["max_model_len"] == asked.server["max_model_len"] > 512
    assert asked.client["options"]["logprobs_mode"] == "processed_logprobs"
    plain = compose_config(RLConfig, "exp/ppo/grpo_word_arithmetic", here)
    assert (plain.client["max_model_len"], plain.client["dtype"]) == (512, "auto")
    offline = compose_config(
        SampleConfig, "api/vllm/trajectories_in_process", ["client=data_parallel_engines", "policy=m", "output=o"]
    )
    assert offline.client["options"]["logprobs_mode"] == "raw_logprobs"  # as every other client
    assert "block_size" not in build(offline.client).options
    states = ["server=none", "policy=m", "output=o", "requests.states=s"]
    kinds = {"data_parallel_engines": False, "data_parallel_engines_partial_block_cache": True, "ray_engines": False}
    for name, shared in kinds.items():
        completing = compose_config(SampleConfig, "api/vllm/completions", [f"client={name}", *states])
        assert completing.client["options"]["block_size"] == completing.server["options"]["block_size"] == 32
        assert ("kv_transfer_config" in completing.client["options"]) == shared
        wide = compose_config(
            SampleConfig, "api/vllm/completions", [f"client={name}", *states, "+server.max_model_len=2048"]
        )
        assert wide.client["max_model_len"] == 2048
    following = compose_config(RLConfig, "rl", [here[0] + "_partial_block_cache", *here[1:]]).client["options"]
    assert following["block_size"] == yaml.safe_load(BLOCKS.read_text())["block_size"]
    assert offline.client["model"] == "m"


def test_several_servers_are_gone() -> None:
    for config, name in ((RLConfig, "exp/ppo/grpo_word_arithmetic"), (SampleConfig, "api/vllm/completions")):
        with pytest.raises(HydraException) as raised:
            compose_config(config, name, ["server=several", "server.num_servers=2"])
        assert describe_config_error(raised.value) == (
            "config: server=several is no longer there: choose client=data_parallel_engines server=none, which has "
            "client.num_engines engines in processes of their own, or start servers and name them in "
            "client.base_url=[...]"
        )


@pytest.mark.parametrize(("old", "new"), [("", ""), ("_shared_blocks", "_partial_block_cache")])
def test_the_engine_in_the_trainers_process_is_gone(old: str, new: str) -> None:
    with pytest.raises(HydraException) as raised:
        compose_config(RLConfig, "exp/ppo/grpo_word_arithmetic", [f"client=in_process{old}", "server=none"])
    assert describe_config_error(raised.value) == (
        f"config: client=in_process{old} is no longer there: choose client=data_parallel_engines{new}, which "
        "has engines in processes of their own"
    )


def settled(run_dir: Path) -> tuple[str, str]:
    made = yaml.safe_load((run_dir / "config.yaml").read_text())
    return made["precision"], made["client"]["dtype"]


@pytest.mark.parametrize(
    "client",
    ["data_parallel_engines_partial_block_cache", "ray_engines"],
)
@pytest.mark.slow
@pytest.mark.server
@pytest.mark.timeout(600)
def test_a_run_with_engines_of_its_own_follows_the_policy(client: str, tiny_policy: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = subprocess.run(
        [
            *(sys.executable, "main.py", "-cn", "exp/ppo/grpo_word_arithmetic"),
            *(f"client={client}", "server=none", f"model.path={tiny_policy}"),
            *(f"output_dir={run_dir}", "num_iterations=4", "rollout.num_problems=8", "update.minibatch_size=64"),
            *("params.max_tokens=64", "evaluation.every=4", "evaluation.num_problems=8", "rollout.max_staleness=1"),
        ],
        capture_output=True, text=True, timeout=560, cwd=ROOT, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "auto" not in settled(run_dir), "what was computed in is written down"
    assert "delivery reaches all" in done.stderr
    for number in range(2):
        assert "Loading weights" in (run_dir / f"engine-{number}.log").read_text()
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 4]
    trained = [row for row in rows if "rollout/reward" in row]
    assert [row["engine/version_lag"] for row in trained] == [0, 1, 1, 1]
    assert sum(row["ledger/generated"] for row in trained) == sum(row["rollout/tokens"] for row in trained)
    events = read_timeline(run_dir / "timeline.jsonl")
    drawn = sum(event.tokens for event in events if event.lane == DRAWING)
    assert drawn == sum(row["ledger/generated"] for row in trained)
    by_engine = [sum(e.tokens for e in events if e.lane.startswith(f"engine {number} of 2")) for number in range(2)]
    assert min(by_engine) > 0
    assert sum(by_engine) > drawn, "evaluations and fixed responses too"
    assert all(0 <= row["engine/canary_gap"] < 0.1 for row in trained[:1] + trained[2:])  # a proof comes with the next
    assert (run_dir / "model" / "model.safetensors").is_file()
