"""One device for learner and engine: the engine sleeps from the last request of an iteration to the next delivery, and
a run is the same as one whose engine never does."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.rl.advantages.grpo import GRPO
from espalier.rl.advantages.spo import SPO
from espalier.rl.combinations import check_combinations
from espalier.rl.combinations import check_sleep as check_sleep_settings
from espalier.rl.delivery.weight_update_engine import OwnEngine
from espalier.rl.engines_from_config import check_sleep, engines_of, make_client
from espalier.rl.estimator_context import AdvantageEstimator
from espalier.rl.probes.checks import ProbeFailed
from espalier.rl.trainer import Trainer
from espalier.runtime.entrypoint import BadConfig, compose_config
from espalier.runtime.schemas import ProbesConfig, RLConfig
from espalier.sampling.client import EngineAsleep, SamplingParams, ServerGone
from espalier.sampling.data_parallel_engines import DataParallelEngines
from espalier.sampling.engine_arguments import engine_arguments
from espalier.sampling.one_process_engine import OneProcessEngine
from espalier.sampling.ray_engines import RayEngines
from espalier.sampling.vllm_client import VLLMClient
from tests.support.rl_cases import make_trainer, read_metrics, share_of_even_tokens
from tests.support.root_config import root_config
from tests.support.sleeping_engine import SleepingEngine, SleepingEngines

Make = Callable[..., tuple[Trainer, Any]]


@pytest.fixture
def make(tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path) -> Make:
    """Two iterations of a small run on an engine that samples by request and weights alone: in this process, or, with
    `is_pool`, in one of its own behind the run's client."""

    def made(
        name: str, sleeps: bool, estimator: AdvantageEstimator | None = None, is_pool: bool = False, **options: Any
    ) -> tuple[Trainer, Any]:
        trainer = make_trainer(
            tiny_policy, task, tokenizer, tmp_path / name, "", estimator or GRPO(divide_by_std=True),
            num_iterations=2, rollout_num_problems=3, evaluation_num_problems=2, save_every=1, sleeps=sleeps,
            probes=ProbesConfig(),
        )  # fmt: skip
        options["calls"] = str(tmp_path / name / "calls")
        source, sync = trainer.rollout_source, trainer.delivery.sync
        if is_pool:
            log = str(tmp_path / name / "engine.log")
            pool = SleepingEngines(
                str(tiny_policy), log, num_engines=1, num_threads=1, options=options, max_replaced=1
            )  # fmt: skip
            pool.sleeps = sleeps
            source.sampler.client, sync.engines = pool, engines_of(pool, None)
        else:
            engine = SleepingEngine(str(tiny_policy), {"enable_sleep_mode": sleeps, **options}, max_model_len=512)
            source.sampler.client, sync.engines = engine, [OwnEngine(engine)]
        source.reward = share_of_even_tokens
        source.params = SamplingParams(n=4, temperature=1.0, max_tokens=6, return_logprobs=True)
        return trainer, source.sampler.client

    return made


def calls(folder: Path) -> list[str]:
    """What the engine was asked, in order; equal neighbours once."""
    return [call for call, _ in groupby((folder / "calls").read_text().splitlines())]


WAKE = ["wake weights", "receive", "wake kv_cache"]


def test_an_engine_sleeps_from_the_last_request_to_the_delivery_and_the_run_is_the_same(
    make: Make, tmp_path: Path
) -> None:
    sleeping, _ = make("sleeping", True)
    sleeping.run()
    awake, _ = make("awake", False)
    awake.run()
    start = calls(tmp_path / "awake")[: calls(tmp_path / "awake").index("stamp 0") + 1]
    assert calls(tmp_path / "sleeping") == [
        *start, "prove", "sample",  # the start, an evaluation of it and the first rollouts
        "prove", "sleep", *WAKE, "stamp 1", "prove", "sample",  # a checkpoint is due: proven at once
        "prove", "sleep", *WAKE, "stamp 2", "prove", "sample",
    ]  # fmt: skip
    rows = read_metrics(tmp_path / "awake")
    assert rows == read_metrics(tmp_path / "sleeping")
    assert any(row["engine/policy_moved"] > 0 for row in rows if "engine/policy_moved" in row)
    states = [trainer.policy.engine.model.state_dict() for trainer in (awake, sleeping)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    seconds = [json.loads(line) for line in (tmp_path / "sleeping" / "metrics.jsonl").read_text().splitlines()]
    assert all({"seconds/engine_sleep", "seconds/engine_wake"} <= row.keys() for row in seconds if "epoch" in row)


@pytest.mark.slow
def test_an_estimator_that_samples_more_is_answered_before_the_engine_sleeps(make: Make, tmp_path: Path) -> None:
    trainer, _ = make("spo", True, SPO(completions_per_state=2, num_segments=2, masks_other_tokens=False))
    trainer.run()
    found = calls(tmp_path / "spo")
    assert "asked while asleep" not in found
    assert found.count("sleep") == 2
    steps = [k for k, call in enumerate(found) if call == "sleep"]
    assert all(found[k + 1 : k + 4] == WAKE for k in steps)


def test_an_estimator_that_asks_and_does_not_say_so_gets_one_clear_error(make: Make) -> None:
    estimator: Any = SPO(completions_per_state=2, num_segments=2, masks_other_tokens=False)
    estimator.samples_more = False
    trainer, _ = make("silent", True, estimator)
    with pytest.raises(EngineAsleep, match="the engine sleeps"):
        trainer.run()


def test_a_weight_that_is_lost_in_sleep_and_has_a_good_receipt_ends_the_run(make: Make) -> None:
    trainer, _ = make("losing", True, keeps_losing="model.layers.0.mlp.down_proj.weight")
    with pytest.raises(ProbeFailed, match="the engine read every tensor as it was sent"):
        trainer.run()


@pytest.mark.slow
def test_an_engine_that_dies_in_its_sleep_is_replaced_for_the_delivery_and_the_run_is_the_same(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, pool = make("dead", True, is_pool=True)

    def killed(*_: Any) -> dict[str, float]:
        process = pool._engines[0].process
        if pool.num_started == [1]:
            os.kill(process.pid, signal.SIGKILL)
        return learn(*_)

    learn = trainer.learn
    trainer.learn = killed  # type: ignore[method-assign]
    trainer.run()
    found = calls(tmp_path / "dead")
    again = [k for k, call in enumerate(found) if call == "open"][1]
    assert found[again - 1] == "sleep"  # it was lost while it slept, and is started for the delivery
    assert found[again + 1 : again + 3] == ["receive", "stamp 1"]
    assert pool.num_started == [2]
    awake, _ = make("awake", False)
    awake.run()
    of_engines = ("rollout/asked_again", "rollout/lost_")  # which the other run has none of
    rows = [
        {name: value for name, value in row.items() if not name.startswith(of_engines)}
        for row in read_metrics(tmp_path / "dead")
    ]
    assert rows == read_metrics(tmp_path / "awake")
    assert "another one is started" in caplog.text


@pytest.mark.slow
def test_a_device_that_is_full_at_waking_ends_the_run_in_one_line(make: Make) -> None:
    trainer, _ = make("full", True, fails_to_wake=True)
    with pytest.raises(ServerGone, match=r"the vLLM engine fails in wake_up: .* out of memory") as raised:
        trainer.run()
    assert raised.value.exit_code == 3


# --- what cannot be had -----------------------------------------------------------------------------------------------


def test_what_cannot_sleep_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = root_config(RLConfig, sleeps=True, max_staleness=1)
    with pytest.raises(BadConfig, match=r"rollout\.max_staleness=1 has them draw meanwhile: set rollout\.max_stale"):
        check_sleep_settings(ahead)
    check_sleep_settings(root_config(RLConfig, sleeps=True))
    with pytest.raises(BadConfig, match="client=vllm asks a server: set client=data_parallel_engines server=none"):
        check_sleep(VLLMClient("http://localhost:1"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(BadConfig, match=r"there is no GPU here \(vLLM does not sleep on CPUs\): set engine\.sleeps="):
        check_sleep(DataParallelEngines("m", "l"))
    check_sleep(RayEngines("m", "l"))  # its nodes may have some
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    check_sleep(DataParallelEngines("m", "l"))


def test_engines_of_a_run_that_lets_them_sleep_are_started_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    here = ["client=data_parallel_engines", "server=none", "model.path=m", "output_dir=o", "client.gpus_each=0"]
    for line, sleeps in (("engine.sleeps=true", True), ("engine.sleeps=false", None)):
        config = compose_config(RLConfig, "exp/ppo/grpo_word_arithmetic", [*here, line])
        _, client = make_client(config)
        assert isinstance(client, DataParallelEngines)
        options = client.settings(0)["options"]
        assert options.get("enable_sleep_mode") == sleeps
        assert engine_arguments("m", "bfloat16", 512, options, True).get("enable_sleep_mode") == sleeps


def test_vllm_knows_sleep_mode_and_refuses_it_on_cpus(tiny_policy: Path) -> None:
    arguments = pytest.importorskip("vllm.engine.arg_utils")
    platforms = pytest.importorskip("vllm.platforms")
    if platforms.current_platform.is_sleep_mode_available():
        pytest.skip("there is a GPU")
    made = arguments.EngineArgs(model=str(tiny_policy), enable_sleep_mode=True)
    with pytest.raises(ValueError, match="Sleep mode is not supported on current platform"):
        made.create_model_config()


# --- vLLM's own engine ------------------------------------------------------------------------------------------------


class SleepMode:
    """vLLM's `LLMEngine` as far as sleep goes: `EngineCore.sleep` and `wake_up` and the executor's tags (0.32)."""

    def __init__(self) -> None:
        self.sleeping_tags: set[str] = set()
        self.calls: list[tuple[str, Any]] = []
        self.has_memory = True

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.calls.append(("sleep", level))
        self.sleeping_tags = {"weights", "kv_cache"}

    def wake_up(self, tags: list[str] | None = None) -> bool:
        self.calls.append(("wake_up", tags))
        if not self.has_memory:
            raise RuntimeError("CUDA Error: out of memory")
        self.sleeping_tags -= set(tags or self.sleeping_tags)
        return not self.sleeping_tags

    def is_sleeping(self) -> bool:
        return bool(self.sleeping_tags)

    def add_request(self, *_: Any) -> None:
        self.calls.append(("add_request", None))


@pytest.fixture
def vllm_engine() -> tuple[OneProcessEngine, SleepMode]:
    client, mode = OneProcessEngine("m"), SleepMode()
    client._engine = mode
    return client, mode


def test_vllms_own_core_and_executor_answer_as_the_stand_in_for_them(
    vllm_engine: tuple[OneProcessEngine, SleepMode],
) -> None:
    core_of, executors = pytest.importorskip("vllm.v1.engine.core"), pytest.importorskip("vllm.v1.executor.abstract")
    asked: list[tuple[str, Any]] = []

    class Executor(executors.Executor):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            self.sleeping_tags: set[str] = set()

        def _init_executor(self) -> None: ...

        def check_health(self) -> None: ...

        def collective_rpc(self, method: str, **kwargs: Any) -> None:
            asked.append((method, kwargs["kwargs"]))

    core = SimpleNamespace(
        model_executor=Executor(), pause_scheduler=lambda **_: None, resume_scheduler=lambda: asked.append(("go on", 0))
    )
    mode = vllm_engine[1]
    core_of.EngineCore.sleep(core, 2)
    mode.sleep(level=2)
    assert core.model_executor.sleeping_tags == mode.sleeping_tags
    for part in ("weights", "kv_cache"):
        assert core_of.EngineCore.wake_up(core, [part]) == mode.wake_up(tags=[part]) == (part == "kv_cache")
    assert asked == [
        ("sleep", {"level": 2}), ("wake_up", {"tags": ["weights"]}), ("wake_up", {"tags": ["kv_cache"]}), ("go on", 0)
    ]  # fmt: skip


def test_vllms_engine_drops_everything_and_takes_its_memory_back_in_two_parts(
    vllm_engine: tuple[OneProcessEngine, SleepMode],
) -> None:
    client, mode = vllm_engine

    async def ask() -> None:
        await client.wake("weights")  # it does not sleep
        await client.sleep()
        for part in ("weights", "kv_cache"):
            with pytest.raises(Exception, match="the engine sleeps while the learner computes on its device"):
                await client.prompt_logprobs([1, 2])
            await client.wake(part)
        await client.wake("kv_cache")
        assert mode.calls == [("sleep", 2), ("wake_up", ["weights"]), ("wake_up", ["kv_cache"])]

    asyncio.run(ask())


def test_vllms_engine_is_not_put_to_sleep_under_a_request_and_says_when_it_does_not_wake(
    vllm_engine: tuple[OneProcessEngine, SleepMode],
) -> None:
    client, mode = vllm_engine

    async def ask() -> None:
        client._waiting["0"] = asyncio.get_running_loop().create_future()
        with pytest.raises(Exception, match="1 requests under way"):
            await client.sleep()
        client._waiting.clear()
        await client.sleep()
        mode.has_memory = False
        with pytest.raises(ServerGone, match="the vLLM engine fails in wake_up: RuntimeError: CUDA Error: out of mem"):
            await client.wake("weights")
        mode.has_memory = True
        mode.sleeping_tags.add("more")  # as where a part is not woken: it warns and does nothing
        await client.wake("weights")
        with pytest.raises(ServerGone, match="does not take its kv_cache again"):
            await client.wake("kv_cache")

    asyncio.run(ask())


def test_a_recipe_of_a_cluster_takes_turns_on_one_gpu_by_its_layout() -> None:
    given = ["model.path=M", "output_dir=D", "deepspeed=none", "layout=one_gpu"]
    with pytest.raises(BadConfig, match=r"set rollout.max_staleness=0"):
        check_combinations(compose_config(RLConfig, "exp/debug/ppo/tulu", given))
    config = compose_config(RLConfig, "exp/debug/ppo/tulu", [*given, "rollout.max_staleness=0"])
    check_combinations(config)
    assert config.launcher is None
    assert config.engine.sleeps
    assert config.client["_target_"].endswith("DataParallelEngines")
    assert (config.client["num_engines"], config.client["max_model_len"]) == (1, 256)
    assert config.client["options"]["gpu_memory_utilization"] == 0.5
    on_ray = compose_config(RLConfig, "exp/debug/ppo/tulu", given[:2])
    assert (on_ray.client["address"], on_ray.launcher["num_ranks"], on_ray.engine.sleeps) == ("", 1, False)
