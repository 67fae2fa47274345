"""Engines in processes of their own behind the sampling programs: what becomes of a run when some of them die, and that
every kind of requests is taken. The engines are stand-ins without vLLM; the last test has real ones."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from espalier.data.jsonl import read_records, write_records
from espalier.data.records import BadInput, Completion, Trajectory
from espalier.sampling.child_engine import ChildEngine
from espalier.sampling.child_process import CannotStart, group_members
from espalier.sampling.client import SampleRequest, SamplingParams, ServerGone
from espalier.sampling.data_parallel_engines import DataParallelEngines
from espalier.sampling.runner import Runner, Tally, finished_requests
from tests.sampling.test_data_parallel_engines import ROOT, TWO, Stood, engines, kill, processes, request, wait_until
from tests.sampling.test_runner import job_config, run_the_job
from tests.sampling.test_sampling_input import states_of

SEEDS = [str(4096 * 5 + number) for number in range(3)]  # of the engines of seed 5
SEEDED = SamplingParams(n=2, temperature=1.0, max_tokens=4, is_seeded=True)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_engine_that_dies_hands_its_problems_on_under_their_ids_and_seeds_and_one_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def ask() -> None:
        async with engines(tmp_path, num_engines=3, seed=5) as client:
            rows = [request(f"slow/{k}", f"p{k % 9}") for k in range(18)]
            asked = [asyncio.create_task(client.sample(row, SEEDED)) for row in rows]
            await asyncio.sleep(0.1)
            kill(client, 1)
            for row, samples in zip(rows, await asyncio.gather(*asked), strict=True):
                assert [sample.stop for sample in samples] == [f"{row.id}: {row.seed(5)}"] * 2
            assert [engine.num_owed for engine in client._engines] == [0, 0, 0]
            later = await asyncio.gather(*(client.sample(row, TWO) for row in rows))
            assert {samples[0].text for samples in later} == {SEEDS[0], SEEDS[2]}  # of the engines that live

    asyncio.run(ask())
    (line,) = warnings(caplog)
    assert line.startswith("engine 1 of 3 died (exit code -9) (")
    assert line.endswith("engine-1.log): its problems go to the other 2")


def test_a_lost_engine_is_started_anew_as_often_as_is_allowed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def ask() -> None:
        async with engines(tmp_path, num_engines=1, max_replaced=2, seed=5) as client:
            for _ in range(2):
                kill(client, 0)
                assert [sample.text for sample in await client.sample(request("good", "p"), TWO)] == [SEEDS[0]] * 2
                assert await client.is_working()
            assert {path.name for path in tmp_path.glob("*.lost*")} == {"engine-0.lost-0.log", "engine-0.lost-1.log"}
            kill(client, 0)
            with pytest.raises(ServerGone, match="no engine is left of 1: engine 0 of 1 died"):
                await client.sample(request("good", "p"), TWO)

    asyncio.run(ask())
    first, second = warnings(caplog)
    assert first.endswith("engine-0.lost-0.log): its problems go to the other 0, and another one is started")
    assert "engine-0.lost-1.log" in second


@pytest.mark.slow
def test_a_lost_engine_is_ended_though_the_pool_is_closed_meanwhile(tmp_path: Path) -> None:
    """One that is stopped does not end by SIGTERM: only SIGKILL, 15 seconds later, ends it."""

    async def ask() -> int:
        async with engines(tmp_path, num_engines=2, max_replaced=1, silence_seconds=0.2, probe_seconds=0.2) as client:
            hung = processes(client)[0]
            os.kill(hung.pid, signal.SIGSTOP)
            assert len(await client.sample(request("good", "p"), TWO)) == 2
        return int(hung.pid)

    assert group_members(asyncio.run(ask())) == []


def test_an_engine_that_cannot_be_started_anew_stays_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def ask() -> None:
        async with engines(tmp_path, num_engines=2, max_replaced=1, seed=5) as client:
            client.model = "missing"
            kill(client, 0)
            assert [sample.text for sample in await client.sample(request("good", "p"), TWO)] == [SEEDS[1]] * 2
            await wait_until(lambda: asyncio.sleep(0, not client._replacing))
            assert [engine.gone == "" for engine in client._engines] == [False, True]
        assert not client._replacing

    asyncio.run(ask())
    assert warnings(caplog)[1] == "engine 0 of 2 was not replaced: engine 0 of 2: no vLLM engine can be had for missing"


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("die at 0", r"engine 0 of 2 died \(exit code 7\): RuntimeError: out of memory"),
        ("fail at 0", "engine 0 of 2: the vLLM engine failed: RuntimeError: no memory"),
        ("hang at 0", "engine 0 of 2 gave no answer for 0.2 s, nor a sign of life in 0.2 s"),
    ],
)
def test_an_engine_that_dies_fails_or_hangs_is_ended_and_its_problems_move(
    what: str, line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def ask() -> None:
        async with engines(tmp_path, silence_seconds=0.2, probe_seconds=0.2) as client:
            group = processes(client)[0].pid
            asked = [client.sample(request(name, "p"), TWO) for name in (what, "good")]
            assert [samples[0].text for samples in await asyncio.gather(*asked)] == ["1", "1"]

            async def is_ended() -> bool:
                return group_members(group) == []

            await wait_until(is_ended)

    asyncio.run(ask())
    assert len(warnings(caplog)) == 1
    assert warnings(caplog)[0].startswith(line.replace("\\", ""))


def test_an_engine_that_is_slow_but_gives_signs_of_life_is_waited_for(tmp_path: Path) -> None:
    async def ask() -> None:
        async with engines(tmp_path, silence_seconds=0.05, probe_seconds=2.0) as client:
            assert (await client.sample(request("slow"), TWO))[0].text == "0"
            assert client._lost == []

    asyncio.run(ask())


def test_a_watch_that_is_cancelled_in_the_moment_of_an_answer_ends() -> None:
    """Else the engine is watched for ever, and the run's end waits for it."""

    async def ask() -> None:
        answer = asyncio.get_running_loop().create_future()
        asking = asyncio.create_task(ChildEngine("engine", "engine.log", "m", {})._within(60, answer, "gave none"))
        await asyncio.sleep(0)
        answer.set_result(True)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(ask())


def test_a_request_that_kills_engines_does_not_kill_them_all(tmp_path: Path) -> None:
    async def ask() -> None:
        async with engines(tmp_path, num_engines=4) as client:
            with pytest.raises(ServerGone, match=r"^3 engines were gone while they had request 'die', which is asked"):
                await client.sample(request("die"), TWO)
            assert len(await client.sample(request("good"), TWO)) == 2

    asyncio.run(ask())


def test_requests_of_a_problem_share_a_lane_and_every_lane_is_used() -> None:
    client = DataParallelEngines("m", "l", num_engines=3)
    lanes = [client.lane_of(request(f"{k}", f"p{k // 2}")) for k in range(40)]
    assert lanes[::2] == lanes[1::2]
    assert set(lanes) == {0, 1, 2}


# --- runs -------------------------------------------------------------------------------------------------------


def sample_all(
    requests: list[SampleRequest], path: Path, at: dict[int, Callable[[DataParallelEngines], None]]
) -> Tally:
    """A run with two engines; `at[k]` is called when k requests are done."""
    client = Stood("policy", str(path.with_suffix(".log")))

    def make_records(row: SampleRequest, samples: Any) -> list[Completion]:
        return [Completion(f"{row.id}/{k}", row.id, "p", one.text, one.token_ids, "stop", None, False)
                for k, one in enumerate(samples)]  # fmt: skip

    def on_progress(done: int, fields: dict[str, float]) -> None:
        at.pop(done, lambda client: None)(client)

    runner = Runner(client, TWO, make_records, path, concurrency=4, stall_seconds=20.0, on_progress=on_progress,
                    lane_of=client.lane_of, is_working=client.is_working)  # fmt: skip
    return asyncio.run(runner.run(requests, finished_requests(path, requests, TWO.n)))


def test_a_run_outlives_one_engine_and_ends_with_the_last_and_goes_on_exactly(tmp_path: Path) -> None:
    requests, path = [request(f"p{k // 3}/{k}", f"p{k // 3}") for k in range(60)], tmp_path / "c.jsonl"
    with pytest.raises(ServerGone, match=r"no engine is left of 2: engine 1 of 2 died \(exit code -9\)") as caught:
        sample_all(requests, path, {10: lambda client: kill(client, 0), 30: lambda client: kill(client, 1)})
    assert caught.value.exit_code == 3
    kept = read_records(Completion, path)
    assert 60 <= len(kept) < 120
    tally = sample_all(requests, path, {})
    assert (tally.before, tally.before + tally.done) == (len(kept) // 2, 60)
    rows = read_records(Completion, path)
    assert rows[: len(kept)] == kept
    assert sorted(row.id for row in rows) == sorted(f"{one.id}/{k}" for one in requests for k in range(2))


@pytest.fixture
def files(tokenizer: Any, tmp_path: Path) -> dict[str, str]:
    """Trajectories of two steps, half of them right, and their states."""
    states = states_of(tokenizer)
    rows = []
    for k, state in enumerate(states):
        rest = f"#### {7 + k % 2}"
        ids, ends = [*state.prefix_ids, *tokenizer(rest).input_ids], len(state.prefix_ids)
        rows.append(Trajectory(state.trajectory_id, state.problem_id, state.prompt, state.prefix + rest,
                               [state.prefix, rest], state.prompt_ids, ids, [ends, len(ids)], "stop", "7",
                               str(7 + k % 2), k % 2 == 0))  # fmt: skip
    write_records(tmp_path / "s.jsonl", states)
    write_records(tmp_path / "t.jsonl", rows)
    return {"states": str(tmp_path / "s.jsonl"), "trajectories": str(tmp_path / "t.jsonl")}


def engines_config(policy: Path, output: Path, **changes: Any) -> Any:
    client = {"_target_": "espalier.sampling.data_parallel_engines.DataParallelEngines", "model": str(policy),
              "options": {"answer": "#### 7"}}  # fmt: skip
    return job_config("", policy, output, client=client, **changes)


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("requests.TrajectoryRequests", {"split": "train"}),
        ("requests.CompletionRequests", {"states": ...}),
        ("adaptive_completions.AdaptiveCompletions", {"states": ..., "max_completions": 4}),
        ("adaptive_completions.AdaptiveCompletions",
         {"states": ..., "trajectories": ..., "estimator": "smoothed", "max_width": 0.0, "mean_completions": 4.0}),
        ("first_error_completions.FirstErrorCompletions", {"states": ..., "trajectories": ..., "needs_solved": False}),
    ],
)  # fmt: skip
def test_every_kind_of_requests_is_taken(
    kind: str, extra: dict[str, Any], files: dict[str, str], tiny_policy: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(DataParallelEngines, "program", Stood.program)
    requests = {"_target_": f"espalier.sampling.{kind}"}
    requests |= {name: files[name] if value is ... else value for name, value in extra.items()}
    output = tmp_path / "out.jsonl"
    assert run_the_job(engines_config(tiny_policy, output, requests=requests)) == 0
    meta = json.loads((tmp_path / "out.meta.json").read_text())
    assert meta["is_complete"]
    assert meta["counts"]["rows"] == 2 * meta["counts"]["requests"] >= 8
    assert (tmp_path / "out.jsonl.engine-1.log").is_file()
    assert run_the_job(engines_config(tiny_policy, output, requests=requests)) == 0  # and asks nothing


def test_a_node_without_a_server_starts_none(
    tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DataParallelEngines, "program", Stood.program)
    server = {"options": {"block_size": 32}}  # what is left of `-cn api/vllm/completions server=none`
    assert run_the_job(engines_config(tiny_policy, tmp_path / "t.jsonl", server=server)) == 0


def test_what_a_run_with_engines_cannot_use_is_one_line(tiny_policy: Path, tmp_path: Path) -> None:
    output = tmp_path / "t.jsonl"
    server = {"_target_": "espalier.sampling.server.VLLMServer", "model": str(tiny_policy), "log": "l"}
    with pytest.raises(BadInput, match="this client asks no server: set server=none"):
        run_the_job(engines_config(tiny_policy, output, server=server))
    config = engines_config(tiny_policy, output)
    with pytest.raises(Exception, match="no such model folder"):
        run_the_job(config.__class__(**{**vars(config), "client": {**config.client, "model": str(tmp_path / "no")}}))
    assert not output.exists()


def test_engines_that_do_not_start_end_the_run_with_the_command_that_goes_on(
    tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DataParallelEngines, "program", "tests.no_such_program")
    with pytest.raises(CannotStart, match=r"(?s)engine \d of 2 died .*No module named.*holds 0 rows; to go on"):
        run_the_job(engines_config(tiny_policy, tmp_path / "t.jsonl"))


@pytest.mark.server
@pytest.mark.slow
def test_a_sampling_run_outlives_a_real_engine(tiny_policy: Path, tmp_path: Path) -> None:
    output = tmp_path / "t.jsonl"
    command = [sys.executable, "service_api_caller_v1.py", f"policy={tiny_policy}", f"output={output}", "server=none",
               "client=data_parallel_engines_partial_block_cache", "engine.concurrency=4", "params.n=4",
               "requests.limit=300",
               "client.max_model_len=256", "params.is_seeded=true",
               "+client.options.max_num_batched_tokens=65536"]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT,
                          env={**os.environ, "OMP_NUM_THREADS": "1"}) as run:  # fmt: skip
        while not output.exists() or output.read_bytes().count(b"\n") < 40:
            assert run.poll() is None
            time.sleep(0.05)
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        found = [int(pid) for pid in children if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(found) == 2
        os.kill(found[0], signal.SIGKILL)
        _, printed = run.communicate(timeout=280)
        assert run.returncode == 0, printed[-3000:]
    assert printed.count("died (exit code -9)") == 1
    assert "its problems go to the other 1" in printed
    assert len({row.id for row in read_records(Trajectory, output)}) == 1200
    assert group_members(found[1]) == []
