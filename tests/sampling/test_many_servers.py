"""Several servers: a problem always goes to the same one, and what happens when one dies or freezes."""

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from espalier.data.jsonl import read_records
from espalier.data.records import Completion
from espalier.sampling.client import SampleRequest, SamplingParams, ServerGone
from espalier.sampling.runner import Runner, Tally
from espalier.sampling.vllm_client import VLLMClient

PARAMS = SamplingParams(n=1, temperature=1.0, max_tokens=20)
URLS = ["http://a:1", "http://b:1", "http://c:1"]


def states(num_problems: int, each: int) -> list[SampleRequest]:
    """`each` states of every problem; the first token says the problem."""
    return [
        SampleRequest(f"p{p}/0#{s}", "", [p, s], problem_id=f"p{p}") for s in range(each) for p in range(num_problems)
    ]


def sample_all(urls: Sequence[str], requests: list[SampleRequest], path: Path, **options: Any) -> Tally:
    client = VLLMClient(
        list(urls), **{"patience_seconds": 0.3, "silence_seconds": 0.4, "probe_seconds": 0.3, **options}
    )

    def make_records(request: SampleRequest, samples: Any) -> list[Completion]:
        sample = samples[0]
        return [Completion(f"{request.id}/0", request.id, "p", sample.text, sample.token_ids, "stop", None, False)]

    runner = Runner(client, PARAMS, make_records, path, concurrency=4, stall_seconds=20.0,
                    on_progress=lambda done, fields: None, lane_of=client.lane_of)  # fmt: skip
    return asyncio.run(runner.run(requests, set()))


def problems_of(server: Any) -> set[int]:
    return {prompt[0] for prompt in server.prompts if len(prompt) == 2}


def test_all_states_of_a_problem_go_to_one_server_and_all_servers_work(tmp_path: Path, completion_server: Any) -> None:
    with completion_server() as one, completion_server() as other:
        sample_all([one.base_url, other.base_url], states(20, 3), tmp_path / "c.jsonl")
    assert problems_of(one) | problems_of(other) == set(range(20))
    assert not problems_of(one) & problems_of(other)
    assert min(len(problems_of(one)), len(problems_of(other))) >= 3
    assert len(read_records(Completion, tmp_path / "c.jsonl")) == 60


def test_where_a_problem_goes_depends_on_its_id_and_the_addresses_alone() -> None:
    lanes = [VLLMClient(URLS).lane_of(request) for request in states(9, 1)]
    assert lanes == [VLLMClient(URLS, seed=7).lane_of(request) for request in states(9, 2)[9:]]
    turned = [VLLMClient(URLS[::-1]).lane_of(request) for request in states(9, 1)]
    assert [URLS[lane] for lane in lanes] == [URLS[::-1][lane] for lane in turned]


def test_without_one_server_only_its_own_problems_move() -> None:
    before = [URLS[VLLMClient(URLS).lane_of(request)] for request in states(200, 1)]
    after = [URLS[:2][VLLMClient(URLS[:2]).lane_of(request)] for request in states(200, 1)]
    assert all(old == new for old, new in zip(before, after, strict=True) if old != URLS[2])
    assert {new for old, new in zip(before, after, strict=True) if old == URLS[2]} == set(URLS[:2])
    assert all(40 < before.count(url) < 95 for url in URLS), "about a third each"


def test_a_server_that_dies_hands_its_problems_on_and_a_line_says_so(
    tmp_path: Path, completion_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with completion_server(die_after=5) as one, completion_server() as other:
        tally = sample_all([one.base_url, other.base_url], states(20, 3), tmp_path / "c.jsonl")
        assert (tally.done, tally.failed) == (60, [])
    assert len(read_records(Completion, tmp_path / "c.jsonl")) == 60
    lines = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("left out, its problems go to the other 1" in line for line in lines) == 1
    assert any(one.base_url in line for line in lines)


def test_a_server_that_freezes_while_the_other_goes_on_is_left_out(tmp_path: Path, completion_server: Any) -> None:
    with completion_server(hang_after=5, hangs_behind=True) as one, completion_server() as other:
        began = time.monotonic()
        tally = sample_all([one.base_url, other.base_url], states(20, 2), tmp_path / "c.jsonl", request_seconds=60,
                           prompts_per_request=1)  # fmt: skip
        assert time.monotonic() - began < 15
    assert tally.done == 40
    assert one.num_answers == 5


def test_a_server_that_is_slow_but_alive_is_waited_for(tmp_path: Path, completion_server: Any) -> None:
    """Its long answers come after the silence that makes us ask; one token for us is sign enough."""
    answered: list[float] = []

    async def late(client: VLLMClient) -> Any:
        began = time.monotonic()
        await client.sample(SampleRequest("p", "", [1, 2]), PARAMS)
        answered.append(time.monotonic() - began)

    async def run(url: str) -> None:
        client = VLLMClient(url, silence_seconds=0.1, probe_seconds=1.0)
        await client.open()
        try:
            await late(client)
        finally:
            await client.close()

    with completion_server(slow=lambda ids: 1.5 if len(ids) == 2 else 0.0) as server:
        asyncio.run(run(server.base_url))
    assert answered[0] >= 1.5


def test_when_no_server_is_left_the_run_ends_with_three(tmp_path: Path, completion_server: Any) -> None:
    with (
        completion_server(die_after=5) as one,
        completion_server(die_after=5) as other,
        pytest.raises(ServerGone) as caught,
    ):
        sample_all([one.base_url, other.base_url], states(30, 2), tmp_path / "c.jsonl")
    assert caught.value.exit_code == 3
    assert 10 <= len(read_records(Completion, tmp_path / "c.jsonl")) < 60


def test_one_of_two_that_does_not_answer_at_the_start_is_left_out(tmp_path: Path, completion_server: Any) -> None:
    with completion_server() as gone:
        url = gone.base_url
    with completion_server() as server:
        assert sample_all([url, server.base_url], states(5, 1), tmp_path / "c.jsonl").done == 5


def test_the_requests_at_one_server_are_bounded_also_when_it_takes_over(tmp_path: Path, completion_server: Any) -> None:
    with completion_server() as gone:
        url = gone.base_url
    with completion_server(seconds=0.01) as server:
        sample_all([url, server.base_url], states(20, 2), tmp_path / "c.jsonl", in_flight_each=3,
                   prompts_per_request=1)  # fmt: skip
        assert server.most_at_once == 3


def test_a_frozen_engine_behind_a_healthy_front_ends_the_run(tmp_path: Path, completion_server: Any) -> None:
    with completion_server(hang_after=3, hangs_behind=True) as server:
        began = time.monotonic()
        with pytest.raises(ServerGone, match=r"gave no answer for 0.4 s, nor one token for a sign of life in 0.3 s"):
            sample_all([server.base_url], states(5, 2), tmp_path / "c.jsonl", request_seconds=60.0,
                       prompts_per_request=1)  # fmt: skip
        assert time.monotonic() - began < 10
    assert len(read_records(Completion, tmp_path / "c.jsonl")) == 3


def test_a_request_that_always_fails_is_listed_while_others_are_answered(
    tmp_path: Path, completion_server: Any
) -> None:
    with completion_server(breaks=lambda ids: ids == [3, 0]) as server:
        tally = sample_all([server.base_url], states(8, 1), tmp_path / "c.jsonl", max_attempts=3)
        assert (tally.done, [key for key, _ in tally.failed]) == (7, ["p3/0#0"])
        assert "3 attempts failed, the last with: HTTP 500" in tally.failed[0][1]
        asked = [prompt for prompt in server.prompts if prompt == [3, 0]]
        assert len(asked) == 3


def test_a_request_that_always_fails_is_listed_even_when_it_is_the_last(tmp_path: Path, completion_server: Any) -> None:
    with completion_server(breaks=lambda ids: ids == [3, 0]) as server:
        tally = sample_all([server.base_url], states(4, 1)[3:], tmp_path / "c.jsonl", max_attempts=2)
    assert [key for key, _ in tally.failed] == ["p3/0#0"]


def test_a_server_that_fails_every_request_is_gone_though_it_answers_a_prompt_of_our_own(
    tmp_path: Path, completion_server: Any
) -> None:
    with (
        completion_server(breaks=lambda ids: len(ids) == 2) as server,
        pytest.raises(ServerGone, match="answered none of this run's requests: 1 attempts failed"),
    ):
        sample_all([server.base_url], states(40, 1), tmp_path / "c.jsonl", max_attempts=1)


def test_a_server_that_hangs_from_the_start_is_not_waited_for_long(
    tmp_path: Path, completion_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("espalier.sampling.connection.OPEN_SECONDS", 0.3)
    with completion_server(hang_after=0) as server, pytest.raises(ServerGone, match=r"does not answer .TimeoutError"):
        sample_all([server.base_url], states(2, 1), tmp_path / "c.jsonl")


def test_a_refused_request_is_refused_by_one_server_only(completion_server: Any, tmp_path: Path) -> None:
    with completion_server(refuses=lambda ids: True) as one, completion_server(refuses=lambda ids: True) as other:
        tally = sample_all([one.base_url, other.base_url], states(1, 1), tmp_path / "c.jsonl")
        assert len(one.bodies) + len(other.bodies) == 1
    assert "HTTP 400" in tally.failed[0][1]
