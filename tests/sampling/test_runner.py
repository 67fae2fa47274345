"""Sampling runs: every id exactly once, whatever the server, the disk or a signal does.

The server is real (aiohttp on loopback) and answers with a function of the prompt, so every row is checked.
"""

import asyncio
import errno
import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from espalier.data.failed_rows import read_failed, write_failed
from espalier.data.jsonl import read_records, to_line, write_records
from espalier.data.records import BadInput, Completion, State, StepValues, Trajectory
from espalier.sampling.client import Sample, SampleRequest, SamplingParams, ServerGone
from espalier.sampling.job_record import within_limit
from espalier.sampling.runner import Runner, SamplingStopped, Tally, finished_requests
from espalier.sampling.vllm_client import VLLMClient
from tests.support.root_config import root_config

ROOT = Path(__file__).resolve().parent.parent.parent
NUM_SAMPLES = 3
PARAMS = SamplingParams(n=NUM_SAMPLES, temperature=1.0, max_tokens=20)


def make_requests(count: int) -> list[SampleRequest]:
    return [SampleRequest(f"p/{number}#1", f"prompt {number}", [number, 7]) for number in range(count)]


def make_records(request: SampleRequest, samples: list[Sample]) -> list[Completion]:
    return [
        Completion(
            f"{request.id}/{k}",
            request.id,
            "p",
            sample.text,
            sample.token_ids,
            sample.finish_reason,
            None,
            False,
        )
        for k, sample in enumerate(samples)
    ]


def sample_all(url: str, requests: Sequence[SampleRequest], path: Path, **options: Any) -> Tally:
    """One run, resumed where the file stands."""
    names = ("request_seconds", "prompts_per_request")
    of_client = {"request_seconds": 5.0, **{name: options.pop(name) for name in names if name in options}}
    client = VLLMClient(url, patience_seconds=0.5, **of_client)
    settings: dict[str, Any] = {
        "concurrency": 8,
        "stall_seconds": 20.0,
        "on_progress": lambda done, fields: None,
    }
    runner = Runner(client, PARAMS, make_records, path, **{**settings, **options})
    return asyncio.run(runner.run(requests, finished_requests(path, requests, NUM_SAMPLES)))


def check_complete(path: Path, requests: Sequence[SampleRequest], server: Any) -> None:
    """Every id once, each with the answer to its own prompt."""
    rows = {row.id: row for row in read_records(Completion, path)}
    assert sorted(rows) == sorted(f"{request.id}/{k}" for request in requests for k in range(NUM_SAMPLES))
    for request in requests:
        for k in range(NUM_SAMPLES):
            row = rows[f"{request.id}/{k}"]
            assert (row.response, row.response_ids) == server.samples(request.prompt_ids, k)


# --- a server that works, and one that does not -------------------------------------------------------------


def test_every_request_is_asked_once_and_every_row_is_its_own(tmp_path: Path, completion_server: Any) -> None:
    requests, path, seen = make_requests(50), tmp_path / "c.jsonl", []
    with completion_server() as server:
        tally = sample_all(server.base_url, requests, path, on_progress=lambda done, fields: seen.append(done))
        assert len(server.prompts) == 50
    check_complete(path, requests, server)
    assert (tally.before, tally.done, tally.failed) == (0, 50, [])
    assert tally.tokens == sum(len(row.response_ids) for row in read_records(Completion, path))
    assert seen == list(range(1, 51))


def test_records_that_cannot_be_made_end_the_run_and_what_came_before_is_kept(
    tmp_path: Path, completion_server: Any
) -> None:
    """Answers are handed over together: the error of one is its own, and none is written in another's place."""
    requests, path = make_requests(12), tmp_path / "c.jsonl"

    def make(request: SampleRequest, samples: list[Sample]) -> list[Completion]:
        if request.id == "p/9#1":
            raise BadInput("another tokenizer")
        return make_records(request, samples)

    with completion_server() as server:
        client = VLLMClient(server.base_url, patience_seconds=0.5)
        runner = Runner(client, PARAMS, make, path, concurrency=4, stall_seconds=20.0, on_progress=lambda done, _: None)
        with pytest.raises(BadInput, match="another tokenizer"):
            asyncio.run(runner.run(requests, set()))
        written = {row.id.rpartition("/")[0] for row in read_records(Completion, path)}
        assert "p/9#1" not in written
        assert len(written) >= 4
        sample_all(server.base_url, requests, path)
    check_complete(path, requests, server)


def test_the_number_in_flight_is_bounded(tmp_path: Path, completion_server: Any) -> None:
    most = []
    with completion_server(seconds=0.01) as server:

        def count(done: int, fields: dict[str, float]) -> None:
            most.append(len(server.prompts) - done)

        sample_all(server.base_url, make_requests(40), tmp_path / "c.jsonl", concurrency=4, on_progress=count)
    assert max(most) <= 4


def test_nothing_is_lost_or_doubled_at_thirty_percent_faults(tmp_path: Path, completion_server: Any) -> None:
    requests, path = make_requests(80), tmp_path / "c.jsonl"
    faults = ("429", "500", "garbled", "closed", "cut body", "fewer choices", "aborted", "not http")
    with completion_server(faults=faults, fault_share=0.3, first_faults=len(faults)) as server:
        tally = sample_all(server.base_url, requests, path, concurrency=32)
    check_complete(path, requests, server)
    assert (tally.done, tally.failed) == (80, [])
    assert set(server.num_faults) == set(faults)
    assert len(server.prompts) < 2 * 80


def test_refused_rows_are_listed_and_the_rest_is_sampled(tmp_path: Path, completion_server: Any) -> None:
    requests, path = make_requests(20), tmp_path / "c.jsonl"
    with completion_server(refuses=lambda ids: ids[0] % 10 == 3) as server:
        tally = sample_all(server.base_url, requests, path, prompts_per_request=1)
        assert len(server.prompts) == 20
    check_complete(path, [request for request in requests if request.prompt_ids[0] % 10 != 3], server)
    assert sorted(key for key, _ in tally.failed) == ["p/13#1", "p/3#1"]
    beside = write_failed(path, tally.failed)
    assert beside.name == "c.failed.jsonl"
    rows = [json.loads(line) for line in beside.read_text().splitlines()]
    assert all("this prompt is refused" in row["reason"] for row in rows)


def test_a_list_of_failures_goes_when_nothing_fails_any_more(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    assert write_failed(path, [("a", "too long")]).is_file()
    assert not write_failed(path, []).exists()


def test_a_stalled_server_ends_the_run_and_what_was_written_is_kept(tmp_path: Path, completion_server: Any) -> None:
    requests, path = make_requests(30), tmp_path / "c.jsonl"
    with completion_server(hang_after=10) as server:
        began = time.monotonic()
        alone = {"prompts_per_request": 1, "request_seconds": 60.0}
        with pytest.raises(ServerGone, match=f"no answer for 1 s: what was written is kept in {path}") as caught:
            sample_all(server.base_url, requests, path, stall_seconds=1.0, **alone)
        assert time.monotonic() - began < 4.0
    assert caught.value.exit_code == 3
    assert len(finished_requests(path, requests, NUM_SAMPLES)) == 10
    with completion_server() as server:
        tally = sample_all(server.base_url, requests, path)
        assert (tally.before, tally.done, len(server.prompts)) == (10, 20, 20)
    check_complete(path, requests, server)


def test_a_server_that_dies_midway_ends_the_run_and_another_one_goes_on(tmp_path: Path, completion_server: Any) -> None:
    requests, path = make_requests(30), tmp_path / "c.jsonl"
    with (
        completion_server(die_after=10, seconds=0.01) as server,
        pytest.raises(ServerGone, match="has not answered"),
    ):
        sample_all(server.base_url, requests, path)
    assert 10 <= len(finished_requests(path, requests, NUM_SAMPLES)) < 30
    with completion_server() as server:
        sample_all(server.base_url, requests, path)
    check_complete(path, requests, server)


def test_a_server_of_our_own_that_has_died_ends_the_run_at_once(tmp_path: Path, completion_server: Any) -> None:
    def check() -> None:
        raise ServerGone("the vLLM server died")

    with completion_server(hang_after=1) as server, pytest.raises(ServerGone, match="the vLLM server died"):
        sample_all(server.base_url, make_requests(5), tmp_path / "c.jsonl", check_server=check, prompts_per_request=1)


def test_a_run_that_ends_early_leaves_no_complaint_of_asyncio(
    tmp_path: Path, completion_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with completion_server(hang_after=1) as server, pytest.raises(ServerGone):
        sample_all(server.base_url, make_requests(30), tmp_path / "c.jsonl", stall_seconds=0.1)
    gc.collect()
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


def test_an_error_in_making_records_ends_the_run_with_that_error(tmp_path: Path, completion_server: Any) -> None:
    def fail(request: SampleRequest, samples: list[Sample]) -> list[Any]:
        raise BadInput(f"{request.id}: the steps do not join")

    with completion_server() as server:
        runner = Runner(VLLMClient(server.base_url), PARAMS, fail, tmp_path / "c.jsonl", concurrency=4,
                        stall_seconds=5.0, on_progress=lambda done, fields: None)  # fmt: skip
        with pytest.raises(BadInput, match="the steps do not join"):
            asyncio.run(runner.run(make_requests(5), set()))


def test_a_signal_ends_a_client_that_is_loading(tmp_path: Path) -> None:
    class Loading:
        is_closed = False

        async def open(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)

        async def close(self) -> None:
            self.is_closed = True

    client: Any = Loading()
    runner = Runner(client, PARAMS, lambda request, samples: [], tmp_path / "c.jsonl", concurrency=4,
                    stall_seconds=5.0, on_progress=lambda done, fields: None)  # fmt: skip
    with pytest.raises(SamplingStopped, match="stopped by SIGTERM"):
        asyncio.run(asyncio.wait_for(runner.run(make_requests(5), set()), 5.0))
    assert client.is_closed


def test_no_request_in_flight_is_refused_instead_of_sampling_nothing(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="concurrency must be at least 1, got 0"):
        sample_all("http://127.0.0.1:9", make_requests(2), tmp_path / "c.jsonl", concurrency=0)


# --- going on where a file stands ---------------------------------------------------------------------------


def rows_of(*ids: str) -> list[Completion]:
    return [Completion(one, one.rpartition("/")[0], "p", "x", [1], "stop", None, False) for one in ids]


def group(number: int, count: int = NUM_SAMPLES) -> list[Completion]:
    return rows_of(*(f"p/{number}#1/{k}" for k in range(count)))


def test_a_file_that_is_not_there_has_nothing_finished(tmp_path: Path) -> None:
    assert finished_requests(tmp_path / "c.jsonl", make_requests(3), NUM_SAMPLES) == set()


def test_whole_groups_are_finished_in_whatever_order(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    write_records(path, [*group(2), *group(0)])
    before = path.read_bytes()
    assert finished_requests(path, make_requests(3), NUM_SAMPLES) == {"p/2#1", "p/0#1"}
    assert path.read_bytes() == before


@pytest.mark.parametrize("count", [1, 2])
def test_an_incomplete_last_group_is_cut_and_asked_again(count: int, tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    write_records(path, [*group(2), *group(0, count)])
    assert finished_requests(path, make_requests(3), NUM_SAMPLES) == {"p/2#1"}
    assert [row.id for row in read_records(Completion, path)] == [row.id for row in group(2)]


def test_a_file_cut_at_any_byte_goes_on_with_each_id_once(tmp_path: Path, completion_server: Any) -> None:
    requests, whole, path = make_requests(4), tmp_path / "whole.jsonl", tmp_path / "c.jsonl"
    with completion_server() as server:
        sample_all(server.base_url, requests, whole)
        content = whole.read_bytes()
        for cut in random.Random(0).sample(range(len(content)), 12):
            path.write_bytes(content[:cut])
            sample_all(server.base_url, requests, path)
            check_complete(path, requests, server)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (rows_of("q/0#1/0"), "c.jsonl:1: id 'q/0#1/0' is not of this run: choose another output"),
        ([*group(0), *rows_of("p/9#1/0")], "c.jsonl:4: id 'p/9#1/0' is not of this run"),
        ([*group(0), *group(0)], "c.jsonl:4: id 'p/0#1/0' is out of order or stands twice"),
        (rows_of("p/0#1/0", "p/0#1/0"), "c.jsonl:2: id 'p/0#1/0' is out of order or stands twice"),
        (rows_of("p/0#1/1"), "c.jsonl:1: id 'p/0#1/1' is out of order or stands twice"),
        (rows_of("p/0#1/0", "p/0#1/2"), "c.jsonl:2: id 'p/0#1/2' is out of order or stands twice"),
        ([*group(0, 2), *group(1)], "request 'p/0#1' has 2 of 3 rows"),
        ([*group(0, 4), *group(1)], "request 'p/0#1' has 4 of 3 rows"),
        (
            [*group(0, 2), *group(1), *rows_of("p/0#1/2")],
            "c.jsonl:6: id 'p/0#1/2' is out of order or stands twice",
        ),
        (
            [*group(0, 1), *group(1), *rows_of("p/0#1/1")],
            "c.jsonl:5: id 'p/0#1/1' is out of order or stands twice",
        ),
    ],
)
def test_a_file_of_another_run_is_refused_and_left_as_it_is(
    rows: list[Completion], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "c.jsonl"
    write_records(path, rows)
    before = path.read_bytes()
    with pytest.raises(BadInput, match=message):
        finished_requests(path, make_requests(3), NUM_SAMPLES)
    assert path.read_bytes() == before


@pytest.mark.parametrize("line", ["\n", "not json\n", "[1]\n", '{"no": "id"}\n', '{"id": 7}\n'])
def test_a_line_in_the_middle_that_is_no_row_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text("".join(map(to_line, group(0))) + line + "".join(map(to_line, group(1))))
    if line.strip():
        with pytest.raises(BadInput, match=r"c.jsonl:4: "):
            finished_requests(path, make_requests(3), NUM_SAMPLES)
    else:
        assert finished_requests(path, make_requests(3), NUM_SAMPLES) == {"p/0#1", "p/1#1"}


def test_an_incomplete_group_after_a_blank_line_is_cut_at_its_own_start(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text("".join(map(to_line, group(0))) + "\n\n" + "".join(map(to_line, group(1, 2))))
    assert finished_requests(path, make_requests(3), NUM_SAMPLES) == {"p/0#1"}
    assert read_records(Completion, path) == group(0)


# --- a process that is stopped, killed, or has no disk left -------------------------------------------------


def start_process(url: str, count: int, path: Path, concurrency: int = 4, setup: str = "") -> subprocess.Popen[str]:
    """A program of its own around `sample_all`; ends as the entrypoints do: a line, the error's exit code."""
    program = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.sampling import test_runner
{setup}
try:
    requests, path = test_runner.make_requests({count}), Path({str(path)!r})
    test_runner.sample_all({url!r}, requests, path, concurrency={concurrency})
except Exception as error:
    print(repr(error))
    sys.exit(getattr(error, "exit_code", 4 if isinstance(error, OSError) else 9))
"""
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


def wait_until(is_true: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def has_grown(path: Path, size: int) -> Callable[[], bool]:
    return lambda: path.exists() and path.stat().st_size > size


def test_kill_nine_at_random_moments_loses_and_doubles_nothing(tmp_path: Path, completion_server: Any) -> None:
    requests, path, rng = make_requests(120), tmp_path / "c.jsonl", random.Random(0)
    with completion_server(seconds=0.01) as server:
        for _ in range(3):
            size = path.stat().st_size if path.exists() else 0
            process = start_process(server.base_url, 120, path)
            wait_until(has_grown(path, size + rng.randint(0, 3000)))
            process.kill()
            assert process.wait(10) == -signal.SIGKILL
        lost_work = len(server.prompts)
        tally = sample_all(server.base_url, requests, path)
        assert 0 < tally.before < 120
        assert len(server.prompts) - lost_work == 120 - tally.before
    check_complete(path, requests, server)


def test_sigterm_drains_what_is_in_flight_and_ends_with_143(tmp_path: Path, completion_server: Any) -> None:
    requests, path = make_requests(200), tmp_path / "c.jsonl"
    with completion_server(seconds=0.02) as server:
        process = start_process(server.base_url, 200, path)
        wait_until(has_grown(path, 0))
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=10)
        assert process.returncode == 143
        assert "stopped by SIGTERM: run the same command to go on" in output
        content = path.read_bytes()
        num_written = len(finished_requests(path, requests, NUM_SAMPLES))
        assert path.read_bytes() == content
        assert len(server.prompts) == num_written < 200
        sample_all(server.base_url, requests, path, concurrency=32)
    check_complete(path, requests, server)


def test_an_interrupt_ends_with_130() -> None:
    assert SamplingStopped(signal.SIGINT).exit_code == 130
    assert "SIGINT" in str(SamplingStopped(signal.SIGINT))


def test_the_handlers_of_signals_are_given_back(tmp_path: Path, completion_server: Any) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with completion_server() as server:
        sample_all(server.base_url, make_requests(2), tmp_path / "c.jsonl")
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_disk_that_is_full_ends_cleanly_and_the_file_goes_on(tmp_path: Path, completion_server: Any) -> None:
    requests, path = make_requests(60), tmp_path / "c.jsonl"
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (7000, resource.RLIM_INFINITY))"
    with completion_server() as server:
        process = start_process(server.base_url, 60, path, setup=limit)
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 4
        assert output.startswith(f"OSError({errno.EFBIG}")
        assert path.stat().st_size <= 7000
        assert len(read_records(Completion, path)) % NUM_SAMPLES == 0, "whole requests, nothing torn"
        tally = sample_all(server.base_url, requests, path)
        assert 0 < tally.before < 60
    check_complete(path, requests, server)


# --- a whole job --------------------------------------------------------------------------------------------


def job_config(url: str, policy: Path, output: Path, **changes: Any) -> Any:
    from espalier.runtime.schemas import SampleConfig

    return replace(SampleConfig(
        output=str(output), policy=str(policy),
        task={"_target_": "espalier.data.tasks.word_arithmetic.WordArithmetic", "num_train": 12},
        requests={"_target_": "espalier.sampling.requests.TrajectoryRequests", "split": "train"},
        params={"_target_": "espalier.sampling.client.SamplingParams", "n": 2, "temperature": 1.0, "max_tokens": 20},
        client={"_target_": "espalier.sampling.vllm_client.VLLMClient", "base_url": url},
    ), **changes)  # fmt: skip


def run_the_job(config: Any) -> int:
    from espalier.models.load import check_model_folder, load_tokenizer
    from espalier.sampling.job import run_job

    return run_job(config, load_tokenizer, check_model_folder)


@pytest.fixture(scope="module")
def answer(tokenizer: Any) -> Callable[[list[int], int], tuple[str, list[int]]]:
    """Every problem is answered in two steps, in the tiny policy's tokens."""
    text = "buys: 3 + 4 = 7\n#### 7"
    return lambda prompt_ids, index: (text, [*tokenizer(text).input_ids, tokenizer.eos_token_id])


def test_a_job_writes_graded_trajectories_and_their_provenance(
    tmp_path: Path, tiny_policy: Path, completion_server: Any, answer: Any
) -> None:
    output = tmp_path / "t.jsonl"
    with completion_server(answer=answer, max_model_len=256) as server:
        config = job_config(server.base_url, tiny_policy, output)
        assert run_the_job(config) == 0
    rows = read_records(Trajectory, output)
    assert sorted(row.id for row in rows) == sorted(f"wa-train-{p}/{k}" for p in range(12) for k in range(2))
    assert all(row.steps == ["buys: 3 + 4 = 7\n", "#### 7"] for row in rows)
    assert all(row.is_correct == (row.gold == "7") and row.answer == "7" for row in rows)
    assert all(row.step_ends[1] == len(row.response_ids) for row in rows)
    meta = json.loads((tmp_path / "t.meta.json").read_text())
    num_correct = sum(row.is_correct for row in rows)
    tokens = sum(len(row.response_ids) for row in rows)
    assert meta["is_complete"]
    assert meta["counts"] == {
        "requests": 12, "rows": 24, "correct": num_correct, "unparseable": 0.0, "failed": 0, "unanswered": 0,
        "generated_tokens": tokens,
    }  # fmt: skip
    assert run_the_job(config) == 0, "a complete file needs no server: this one is gone"


@pytest.mark.parametrize("return_logprobs", [True, False])
def test_log_probs_are_kept_one_a_token_where_they_are_asked_for(
    return_logprobs: bool, tmp_path: Path, tiny_policy: Path, completion_server: Any, answer: Any
) -> None:
    output = tmp_path / "t.jsonl"
    with completion_server(answer=answer, max_model_len=256) as server:
        config = job_config(server.base_url, tiny_policy, output)
        assert run_the_job(replace(config, params={**config.params, "return_logprobs": return_logprobs})) == 0
    for row in read_records(Trajectory, output):
        assert row.logprobs == ([-token / 8 for token in row.response_ids] if return_logprobs else None)


def test_rows_written_before_log_probs_were_kept_still_read(tmp_path: Path) -> None:
    old = {"id": "p/0", "problem_id": "p", "prompt": "Q", "response": "ab", "steps": ["ab"], "prompt_ids": [1],
           "response_ids": [2], "step_ends": [1], "finish_reason": "stop", "gold": "5", "answer": None,
           "is_correct": False, "num_options": 0}  # fmt: skip
    (tmp_path / "t.jsonl").write_text(json.dumps(old) + "\n")
    assert read_records(Trajectory, tmp_path / "t.jsonl")[0].logprobs is None


def test_a_job_with_refused_rows_ends_with_one_and_asks_them_again(
    tmp_path: Path, tiny_policy: Path, completion_server: Any, answer: Any
) -> None:
    output = tmp_path / "t.jsonl"
    with completion_server(answer=answer, max_model_len=256) as server:
        server.refuses = lambda ids: ids == server.prompts[0]
        config = job_config(server.base_url, tiny_policy, output)
        assert run_the_job(config) == 1
        assert len((tmp_path / "t.failed.jsonl").read_text().splitlines()) == 1
        assert not json.loads((tmp_path / "t.meta.json").read_text())["is_complete"]
        server.refuses = lambda ids: False
        num_asked = len(server.prompts)
        assert run_the_job(config) == 0
        assert len(server.prompts) == num_asked + 1
    assert len(read_records(Trajectory, output)) == 24
    assert not (tmp_path / "t.failed.jsonl").exists()


def test_a_job_whose_refused_rows_are_few_enough_is_finished_without_them(
    tmp_path: Path, tiny_policy: Path, completion_server: Any, answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    output = tmp_path / "t.jsonl"
    with completion_server(answer=answer, max_model_len=256) as server:
        server.refuses = lambda ids: ids == server.prompts[0]
        config = job_config(server.base_url, tiny_policy, output, max_failed_share=0.08)
        assert run_the_job(config) == 1, "1 of 12 is more than 8 %"
        assert any("max_failed_share=0.09 finishes without them" in row.message for row in caplog.records)
        config = replace(config, max_failed_share=0.1)
        assert run_the_job(config) == 0
        told = f"1 of 12 requests were refused: see {tmp_path}/t.failed.jsonl; the run is finished without them"
        assert any(row.message.startswith(told) for row in caplog.records)
        (refused,) = read_failed(output)
        num_asked = len(server.prompts)
        assert run_the_job(config) == 0
        assert len(server.prompts) == num_asked, "what is listed is not asked again"
        server.refuses = lambda ids: False
        assert run_the_job(replace(config, max_failed_share=0.0)) == 0
        assert len(server.prompts) == num_asked + 1, "by a run that lets none fail it is"
    assert {row.problem_id for row in read_records(Trajectory, output)[-2:]} == {refused}
    with pytest.raises(BadInput, match=r"max_failed_share must be in \[0, 1\), got 1"):
        run_the_job(replace(config, max_failed_share=1.0))


def test_requests_that_were_never_answered_are_counted_apart_from_refused_ones(
    tmp_path: Path, tiny_policy: Path, completion_server: Any, answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    output = tmp_path / "t.jsonl"
    with completion_server(answer=answer, max_model_len=256) as server:
        server.breaks = lambda ids: ids == server.prompts[0]
        config = job_config(server.base_url, tiny_policy, output, max_failed_share=0.1)
        config.client["max_attempts"] = 2
        assert run_the_job(config) == 0
    assert "1 of 12 requests were refused" in caplog.text
    assert "1 of them used up their attempts without an answer: what is left favours" in caplog.text
    assert json.loads((tmp_path / "t.meta.json").read_text())["counts"]["unanswered"] == 1


def test_a_share_is_compared_with_counts_and_not_with_their_rounding() -> None:
    assert within_limit(29, 100, 0.29)
    assert not within_limit(30, 100, 0.29)
    assert within_limit(0, 7, 0.0)
    assert not within_limit(1, 1000, 0.0)


def test_the_pipeline_goes_on_without_a_problem_and_a_state_that_are_refused(
    tmp_path: Path, tiny_policy: Path, tokenizer: Any, completion_server: Any
) -> None:
    """One prompt is longer than the window; one state is answered 400. Neither is worth 0, nor 1."""
    from espalier.data.examples.step_examples import StepValueExamples
    from espalier.data.tasks.word_arithmetic import WordArithmetic
    from espalier.pipeline.stage import run_stage
    from espalier.pipeline.values.cut_states import CutStates
    from espalier.pipeline.values.estimate_values import EstimateValues
    from espalier.runtime.schemas import StageConfig

    def answer(prompt_ids: list[int], index: int) -> tuple[str, list[int]]:
        text = f"buys: 3 + {index} = 7\n#### {index}"
        return text, [*tokenizer(text).input_ids, tokenizer.eos_token_id]

    def stage(made: Any, name: str, source: str) -> None:
        node = {"_target_": type(made).__name__}
        config = StageConfig(
            output=str(tmp_path / f"{name}.jsonl"), input=str(tmp_path / f"{source}.jsonl"), stage=node
        )
        assert run_stage(made, None, config) == 0

    problems = WordArithmetic(num_train=12).problems("train")
    prompts = {problem.id: len(tokenizer(WordArithmetic().prompt(problem)).input_ids) for problem in problems}
    too_long = max(prompts, key=prompts.__getitem__)
    num_long = sum(length >= prompts[too_long] for length in prompts.values())
    trajectories, states = tmp_path / "trajectories.jsonl", tmp_path / "states.jsonl"
    with completion_server(answer=answer, max_model_len=prompts[too_long]) as server:
        config = job_config(server.base_url, tiny_policy, trajectories, max_failed_share=0.2)
        assert run_the_job(config) == 0
    assert len(read_failed(trajectories)) == num_long
    stage(CutStates(), "states", "trajectories")
    refused = read_records(State, states)[0]
    asked = refused.prompt_ids + refused.prefix_ids
    with completion_server(answer=answer, max_model_len=256, refuses=lambda ids: ids == asked) as server:
        requests = {"_target_": "espalier.sampling.requests.CompletionRequests", "states": str(states)}
        output = tmp_path / "completions.jsonl"
        config = job_config(server.base_url, tiny_policy, output, requests=requests, max_failed_share=0.2)
        assert run_the_job(config) == 0
    stage(EstimateValues(str(trajectories), str(states)), "values", "completions")
    values = read_records(StepValues, tmp_path / "values.jsonl")
    assert [row.id for row in values] == [row.id for row in read_records(Trajectory, trajectories)]
    assert {row.id for row in values if None in row.labels} == {refused.trajectory_id}
    assert len(values) == 2 * (12 - num_long)
    counts = json.loads((tmp_path / "values.meta.json").read_text())["counts"]
    assert (counts["states_failed"], counts["trajectories_with_unlabelled_steps"]) == (1, 1)
    assert StepValueExamples(str(tmp_path / "values.jsonl"), max_length=512).load(tokenizer)


def test_a_job_asked_otherwise_is_refused_but_may_ask_another_server(
    tmp_path: Path, tiny_policy: Path, completion_server: Any, answer: Any
) -> None:
    output = tmp_path / "t.jsonl"
    with completion_server(answer=answer, max_model_len=256) as server:
        config = job_config(server.base_url, tiny_policy, output)
        run_the_job(config)
    with pytest.raises(BadInput, match=r"was made otherwise .params.temperature was 1.0, now 0.5"):
        run_the_job(replace(config, params={**config.params, "temperature": 0.5}))
    with pytest.raises(BadInput, match=r"was made otherwise .seed was 0, now 1"):
        run_the_job(replace(config, seed=1))
    meta = tmp_path / "t.meta.json"
    stored = json.loads(meta.read_text())
    stored["config"] |= {"concurrency": 192, "stall_seconds": 180.0}  # as an earlier version names how it was asked
    meta.write_text(json.dumps(stored))
    assert (
        run_the_job(root_config(config, client={**config.client, "base_url": "http://elsewhere"}, concurrency=3)) == 0
    )


@pytest.mark.parametrize("server_node", [None, {}], ids=["null", "none.yaml"])
def test_a_job_without_a_server_of_its_own_asks_the_one_it_is_told(
    server_node: Any, tmp_path: Path, tiny_policy: Path, completion_server: Any, answer: Any
) -> None:
    with completion_server(answer=answer, max_model_len=256) as server:
        config = job_config(server.base_url, tiny_policy, tmp_path / "t.jsonl", server=server_node)
        assert run_the_job(config) == 0


def test_rows_without_provenance_are_not_taken_for_ones_own(tmp_path: Path, tiny_policy: Path) -> None:
    output = tmp_path / "t.jsonl"
    output.write_text("{}\n")
    with pytest.raises(BadInput, match=r"t.jsonl exists without t.meta.json"):
        run_the_job(job_config("http://127.0.0.1:9", tiny_policy, output))
    assert output.read_text() == "{}\n"


def test_a_job_without_its_states_is_refused(tmp_path: Path, tiny_policy: Path) -> None:
    states = str(tmp_path / "gone.jsonl")
    requests = {"_target_": "espalier.sampling.requests.CompletionRequests", "states": states}
    with pytest.raises(BadInput, match=r"gone.jsonl: no such file"):
        run_the_job(job_config("http://127.0.0.1:9", tiny_policy, tmp_path / "c.jsonl", requests=requests))
    assert not os.path.exists(tmp_path / "c.jsonl")
