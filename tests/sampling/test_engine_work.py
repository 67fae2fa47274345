"""What engines are asked for and give, in spans of time, and what is lost with one of them."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from espalier.data.timeline import ASKED, BACK, LOST
from espalier.sampling import engine_process, engine_work
from espalier.sampling.client import Sample
from espalier.sampling.engine_work import EngineWork, ShowsWork
from espalier.sampling.vllm_client import VLLMClient
from tests.conftest import CompletionServer
from tests.sampling.test_data_parallel_engines import TWO, Stood, engines, request, wait_until

SAMPLES = [Sample("a", [1, 2, 3], "stop"), Sample("b", [1], "stop")]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be moved by hand."""
    time = [100.0]
    monkeypatch.setattr(engine_work.time, "monotonic", lambda: time[0])
    return time


def test_a_span_ends_with_the_last_answer_and_counts_each_busy_second_once(now: list[float]) -> None:
    work = EngineWork("engine 0", "10.0.0.1")
    work.begin()
    now[0] += 1
    work.begin()
    now[0] += 2
    work.end(SAMPLES)
    now[0] += 4
    work.end(SAMPLES)
    now[0] += 0.05  # too short to end the span, and nothing is owed in it
    work.begin()
    now[0] += 1
    work.end(None)  # given up
    now[0] += 5
    (span,) = work.take()
    assert (span.engine, span.node, span.name) == ("engine 0", "10.0.0.1", ASKED)
    assert (span.begun, span.ended, span.busy_seconds) == pytest.approx((100, 108.05, 8))
    assert (span.num_requests, span.num_samples, span.num_tokens) == (2, 4, 8)
    assert work.take() == []


def test_work_in_progress_is_cut_where_it_is_taken(now: list[float]) -> None:
    work = EngineWork("engine 0")
    work.begin()
    now[0] += 3
    (first,) = work.take()
    now[0] += 2
    work.end(SAMPLES)
    (second,) = work.take()
    assert [(one.begun, one.ended, one.busy_seconds, one.num_tokens) for one in (first, second)] == [
        (100, 103, 3, 0), (103, 105, 2, 4),
    ]  # fmt: skip


def test_of_many_spans_those_with_the_shortest_pauses_are_joined(now: list[float]) -> None:
    work = EngineWork("engine 0")
    for pause in (3, 1, 2, 5, 4, 0):
        work.begin()
        now[0] += 1
        work.end(SAMPLES)
        now[0] += pause
    spans = work.take()
    assert [(span.begun, span.ended) for span in spans] == [(100, 101), (104, 110), (115, 116), (120, 121)]
    assert [span.busy_seconds for span in spans] == [1, 3, 1, 1]
    assert sum(span.num_tokens for span in spans) == 6 * 4


def kill(client: Stood, number: int) -> None:
    os.kill(client._engines[number].process.pid, signal.SIGKILL)


def test_what_a_lost_engine_owed_is_counted_with_the_tokens_that_it_had_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six problems of two samples go to two engines; one of them is gone when each of its three has drawn 6 tokens."""
    assert engine_process._DRAWN_SECONDS == 1.0

    async def ask() -> None:
        async with engines(tmp_path, max_replaced=1) as client:
            asked = [asyncio.create_task(client.sample(request(f"long/{k} at 1", f"p{k}"), TWO)) for k in range(6)]
            await wait_until(lambda: asyncio.sleep(0, len(client._engines[1].drawn) == 3))
            kill(client, 1)
            found = await asyncio.gather(*asked)
            assert (client.num_moved, client.num_lost_samples, client.num_lost_tokens) == (3, 6, 18)
            await wait_until(lambda: asyncio.sleep(0, client.num_started[1] == 2))
            assert isinstance(client, ShowsWork)
            spans = client.take_work()
            of = {name: [span for span in spans if span.name == name] for name in (ASKED, LOST, BACK)}
            (lost,), (back,) = of[LOST], of[BACK]
            assert (lost.engine, lost.num_requests, lost.num_samples, lost.num_tokens) == ("engine 1 of 2", 3, 6, 18)
            assert back.engine == "engine 1 of 2"
            assert back.begun > lost.begun
            assert sum(span.num_samples for span in of[ASKED]) == sum(map(len, found)) == 12
            assert sum(span.num_tokens for span in of[ASKED]) == 24
            assert sum(span.num_requests for span in of[ASKED] if span.engine == "engine 0 of 2") == 6
            assert all(span.node == "127.0.0.1" for span in spans)

    asyncio.run(ask())


def test_requests_that_are_answered_before_their_engine_is_lost_are_not_lost(tmp_path: Path) -> None:
    async def ask() -> None:
        async with engines(tmp_path) as client:
            await asyncio.gather(*(client.sample(request(f"good/{k}", f"p{k}"), TWO) for k in range(4)))
            kill(client, 1)
            await wait_until(lambda: asyncio.sleep(0, bool(client._engines[1].gone)))
            assert (client.num_lost_samples, client.num_lost_tokens) == (0, 0)
            lost = [span for span in client.take_work() if span.name == LOST]
            assert [(span.num_requests, span.num_samples) for span in lost] == [(0, 0)]

    asyncio.run(ask())


def test_every_server_has_its_own_work() -> None:
    async def ask(first: CompletionServer, second: CompletionServer) -> None:
        client = VLLMClient([first.base_url, second.base_url])
        await client.open()
        try:
            found = await asyncio.gather(*(client.sample(request(f"p{k}/0", f"p{k}"), TWO) for k in range(8)))
            spans = client.take_work()
        finally:
            await client.close()
        assert {span.engine for span in spans} == {first.base_url, second.base_url}
        assert {span.node for span in spans} == {"127.0.0.1"}
        assert sum(span.num_requests for span in spans) == 8
        tokens = [len(sample.token_ids) for samples in found for sample in samples]
        assert sum(span.num_tokens for span in spans) == sum(tokens)

    with CompletionServer() as first, CompletionServer() as second:
        asyncio.run(ask(first, second))


def test_spans_that_nobody_takes_do_not_pile_up(now: list[float]) -> None:
    work = EngineWork("engine 0")
    for _ in range(1000):
        work.begin()
        now[0] += 1
        work.end(SAMPLES)
        now[0] += 1
    assert len(work._spans) <= 64
    assert sum(span.num_requests for span in work.take()) == 1000
