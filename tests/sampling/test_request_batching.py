"""Prompts that leave in one HTTP request: every one gets its own answer, and no other's failure."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from espalier.sampling.client import Refused, Sample, SampleRequest, SamplingParams, ServerGone
from espalier.sampling.completion_api import Transient
from espalier.sampling.request_batching import Gathering
from espalier.sampling.vllm_client import VLLMClient

PATH = "/v1/completions"


def ask_all(url: str, prompts: Sequence[list[int]], **options: Any) -> list[Any]:
    """Each prompt's two samples, or the error it met; all are asked at once."""
    params = SamplingParams(n=2, temperature=1.0, max_tokens=20, is_seeded=options.pop("is_seeded", False))

    async def run() -> list[Any]:
        client = VLLMClient(url, **{"patience_seconds": 0.5, "request_seconds": 5.0, "max_attempts": 3, **options})
        await client.open()
        try:
            requests = [SampleRequest(f"p{number}", "", prompt) for number, prompt in enumerate(prompts)]
            asked = (client.sample(request, params) for request in requests)
            return await asyncio.gather(*asked, return_exceptions=True)
        finally:
            await client.close()

    return asyncio.run(run())


def answers(server: Any, prompt: list[int]) -> list[Sample]:
    return [Sample(*server.samples(prompt, k), "stop") for k in range(2)]


PROMPTS = [[number, 7, number] for number in range(20)]


def test_prompts_asked_at_once_share_requests_and_get_their_own_answers(completion_server: Any) -> None:
    with completion_server() as server:
        found = ask_all(server.base_url, PROMPTS, prompts_per_request=8)
    assert found == [answers(server, prompt) for prompt in PROMPTS]
    by_first = sorted((body["prompt"] for body in server.bodies), key=lambda prompts: prompts[0])
    assert by_first == [PROMPTS[:8], PROMPTS[8:16], PROMPTS[16:]], "requests side by side arrive in any order"


@pytest.mark.parametrize("more", [{"prompts_per_request": 1}, {"is_seeded": True}], ids=["one each", "seeds"])
def test_where_they_may_not_share_each_leaves_alone(more: dict[str, Any], completion_server: Any) -> None:
    with completion_server() as server:
        assert ask_all(server.base_url, PROMPTS, **more) == [answers(server, prompt) for prompt in PROMPTS]
    assert sorted(body["prompt"] for body in server.bodies) == PROMPTS


def test_where_few_are_in_flight_few_share_a_request() -> None:
    sizes = {bound: VLLMClient("http://127.0.0.1:9", in_flight_each=bound).prompts_per_request
             for bound in (0, 4, 32, 64, 192, 1000)}  # fmt: skip
    assert sizes == {0: 8, 4: 1, 32: 2, 64: 4, 192: 8, 1000: 8}


def test_what_is_asked_otherwise_leaves_apart(completion_server: Any) -> None:
    """Near the window's end a prompt has room for fewer tokens."""
    long = [[number] * 90 for number in range(4)]
    with completion_server(max_model_len=100) as server:
        found = ask_all(server.base_url, [*PROMPTS[:4], *long])
    assert found == [answers(server, prompt) for prompt in [*PROMPTS[:4], *long]]
    assert sorted((body["max_tokens"], len(body["prompt"])) for body in server.bodies) == [(10, 4), (20, 4)]


def test_a_refusal_finds_the_prompt_it_is_for(completion_server: Any) -> None:
    with completion_server(refuses=lambda ids: ids[0] == 3) as server:
        found = ask_all(server.base_url, PROMPTS[:8])
    assert isinstance(found[3], Refused)
    assert found[:3] + found[4:] == [answers(server, prompt) for prompt in PROMPTS[:8] if prompt[0] != 3]
    assert len(server.bodies) == 1 + 8, "together, then each alone once"


def test_lists_become_shorter_by_refusals_and_longer_by_answers() -> None:
    """One prompt of eight refused again and again costs few prompts that are asked twice; after that lists grow."""
    posted: list[Any] = []

    async def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        posted.append(len(prompts))
        if any(prompt[0] < 0 for prompt in prompts):
            raise Refused("HTTP 400: a negative token")
        return {"choices": [{"index": number} for number in range(len(prompts))]}

    async def run() -> None:
        gathering = Gathering(post, 8)
        for start in range(0, 160, 8):
            prompts = [[-1 if k == 3 else start + k] for k in range(8)]
            asked = (gathering.ask(PATH, {"prompt": prompt, "n": 1}) for prompt in prompts)
            found = await asyncio.gather(*asked, return_exceptions=True)
            assert [isinstance(answer, Refused) for answer in found] == [k == 3 for k in range(8)]
        assert sum(posted) < 160 * 1.25
        for _ in range(20):
            await asyncio.gather(*(gathering.ask(PATH, {"prompt": [k], "n": 1}) for k in range(8)))
        assert posted[-1] == 8

    asyncio.run(run())


def test_a_prompt_that_breaks_the_server_fails_alone(completion_server: Any) -> None:
    with completion_server(breaks=lambda ids: ids[0] == 3) as server:
        found = ask_all(server.base_url, PROMPTS[:8])
    assert isinstance(found[3], Refused)
    assert "3 attempts failed" in str(found[3])
    assert found[:3] + found[4:] == [answers(server, prompt) for prompt in PROMPTS[:8] if prompt[0] != 3]


@pytest.mark.parametrize("fault", ["429", "garbled", "fewer choices", "no choices", "aborted", "closed"])
def test_a_fault_of_all_is_tried_again_by_each(fault: str, completion_server: Any) -> None:
    with completion_server(faults=(fault,), first_faults=1) as server:
        assert ask_all(server.base_url, PROMPTS[:8]) == [answers(server, prompt) for prompt in PROMPTS[:8]]
    assert 2 <= len(server.bodies) <= 1 + 8


def test_a_server_that_takes_no_lists_is_asked_for_one_prompt_from_then_on() -> None:
    posted: list[Any] = []

    async def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        posted.append(body["prompt"])
        if isinstance(body["prompt"][0], list):
            raise Refused("HTTP 400: prompt must be one prompt")
        return {"choices": [{"index": 0, "text": str(body["prompt"])}]}

    async def run() -> list[Any]:
        gathering = Gathering(post, 4)
        found = []
        for _ in range(2):
            found += await asyncio.gather(*(gathering.ask(PATH, {"prompt": [k], "n": 1}) for k in range(4)))
        return found

    found = asyncio.run(run())
    assert [row["choices"][0]["text"] for row in found] == [f"[{k}]" for k in range(4)] * 2
    assert sum(isinstance(prompt[0], list) for prompt in posted) == 1


GOOD = [{"index": index, "prompt_token_ids": [index // 2]} for index in range(4)]
MALFORMED = {
    "null": None, "a list": [], "no choices": {}, "null choices": {"choices": [None] * 4},
    "no index": {"choices": [{}] * 4}, "one too few": {"choices": GOOD[:3]}, "one twice": {"choices": GOOD[:3] * 2},
    "shifted": {"choices": [{**GOOD[k], "prompt_token_ids": [1]} for k in range(4)]},
}  # fmt: skip


@pytest.mark.parametrize("answer", MALFORMED.values(), ids=MALFORMED)
def test_an_answer_that_is_not_whole_is_no_answer_to_anyone(answer: Any) -> None:
    """What one prompt lacks would be another one's: choices are counted through the list."""
    posted = []

    async def post(path: str, body: dict[str, Any]) -> Any:
        posted.append(body["prompt"])
        return answer if len(posted) == 1 else {"choices": GOOD}

    async def run() -> list[Any]:
        gathering = Gathering(post, 2)
        asked = [{"prompt": [k], "n": 2} for k in range(2)]
        first = await asyncio.gather(*(gathering.ask(PATH, body) for body in asked), return_exceptions=True)
        return [first, await asyncio.gather(*(gathering.ask(PATH, body) for body in asked))]

    first, second = asyncio.run(run())
    assert all(isinstance(error, Transient) for error in first)
    assert [[choice["prompt_token_ids"] for choice in row["choices"]] for row in second] == [[[0], [0]], [[1], [1]]]


def test_a_request_that_nobody_waits_for_any_more_is_let_go() -> None:
    ended = []

    async def post(path: str, body: dict[str, Any]) -> Any:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(len(body["prompt"]))

    async def run() -> None:
        gathering = Gathering(post, 2)
        asked = [asyncio.create_task(gathering.ask(PATH, {"prompt": [k]})) for k in range(2)]
        await asyncio.sleep(0.02)
        asked[0].cancel()
        await asyncio.sleep(0.02)
        assert not ended
        asked[1].cancel()
        await asyncio.sleep(0.02)

    asyncio.run(run())
    assert ended == [2]


def test_a_server_that_goes_ends_all_who_wait(completion_server: Any) -> None:
    with completion_server(hang_after=0, hangs_behind=True) as server:
        found = ask_all(server.base_url, PROMPTS[:8], silence_seconds=0.3, probe_seconds=0.3)
    assert all(isinstance(error, ServerGone) for error in found)


def test_what_waits_at_the_end_is_let_go_without_a_complaint() -> None:
    async def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(3600)
        return {}

    async def run() -> list[Any]:
        gathering = Gathering(post, 4)
        asked = [asyncio.create_task(gathering.ask(PATH, {"prompt": [k]})) for k in range(6)]
        await asyncio.sleep(0.05)
        await gathering.close()
        return await asyncio.gather(*asked, return_exceptions=True)

    assert all(isinstance(found, asyncio.CancelledError) for found in asyncio.run(run()))
