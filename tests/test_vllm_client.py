"""The HTTP client against a real server on loopback: what is sent, what is tried again, what is final."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from data.records import BadInput
from sampling.client import Refused, Sample, SampleRequest, SamplingParams, ServerGone
from sampling.vllm_client import VLLMClient

REQUEST = SampleRequest("p", "prompt", [5, 6, 7])


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"n": 2, "temperature": 1.0, "max_tokens": 50, **changes})


def with_client(url: str, use: Callable[[VLLMClient], Awaitable[Any]], **options: Any) -> Any:
    """Open a client, use it, close it."""

    async def run() -> Any:
        client = VLLMClient(url, **{"patience_seconds": 0.5, "request_seconds": 5.0, "probe_seconds": 0.3, **options})
        await client.open()
        try:
            return await use(client)
        finally:
            await client.close()

    return asyncio.run(run())


def test_samples_come_back_in_order_with_their_token_ids(completion_server: Any) -> None:
    with completion_server() as server:
        samples = with_client(server.base_url, lambda client: client.sample(REQUEST, params()))
    assert samples == [Sample(*completion_server.samples([5, 6, 7], k), "stop") for k in range(2)]


def test_the_body_says_all_that_was_asked(completion_server: Any) -> None:
    asked = params(stop=["\n\n"], top_p=0.9, has_logprobs=True, is_seeded=True)
    with completion_server() as server:
        body = with_client(server.base_url, lambda client: asyncio.sleep(0, client.body(REQUEST, asked)), seed=3)
    assert body == {
        "model": "policy", "prompt": [5, 6, 7], "n": 2, "max_tokens": 50, "temperature": 1.0, "top_p": 0.9,
        "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "return_token_ids": True, "stop": ["\n\n"], "logprobs": 0, "seed": REQUEST.seed(3),
    }  # fmt: skip


def test_a_seed_depends_on_the_id_and_the_runs_seed_alone() -> None:
    assert REQUEST.seed(0) == SampleRequest("p", "another prompt", [1]).seed(0)
    assert len({REQUEST.seed(0), REQUEST.seed(1), SampleRequest("q", "prompt", []).seed(0)}) == 3


def test_no_seed_is_sent_where_none_is_asked(completion_server: Any) -> None:
    with completion_server() as server:
        with_client(server.base_url, lambda client: client.sample(REQUEST, params()))
    assert "seed" not in server.bodies[0]
    assert "logprobs" not in server.bodies[0]
    assert "stop" not in server.bodies[0]


def test_max_tokens_shrinks_to_the_window(completion_server: Any) -> None:
    with completion_server(max_model_len=20) as server:
        with_client(server.base_url, lambda client: client.sample(REQUEST, params(max_tokens=50)))
    assert server.bodies[0]["max_tokens"] == 17


def test_a_prompt_that_fills_the_window_is_refused_before_it_is_sent(completion_server: Any) -> None:
    with completion_server(max_model_len=3) as server:
        with pytest.raises(Refused, match="prompt of 3 tokens leaves no room in a window of 3"):
            with_client(server.base_url, lambda client: client.sample(REQUEST, params()))
        assert server.bodies == []


def test_a_400_is_final_and_asked_once(completion_server: Any) -> None:
    with completion_server(refuses=lambda ids: True) as server:
        with pytest.raises(Refused, match=r"HTTP 400: .*this prompt is refused"):
            with_client(server.base_url, lambda client: client.sample(REQUEST, params()))
        assert len(server.bodies) == 1


FAULTS = [
    "429",
    "500",
    "503",
    "garbled",
    "fewer choices",
    "no choices",
    "aborted",
    "cut body",
    "closed",
    "not http",
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_tried_again_until_the_answer_is_whole(fault: str, completion_server: Any) -> None:
    with completion_server(faults=(fault,), fault_share=0.5) as server:
        for number in range(2):
            request = SampleRequest(f"p{number}", "prompt", [number])
            samples = with_client(server.base_url, lambda client, r=request: client.sample(r, params()))
            assert [sample.text for sample in samples] == [completion_server.samples([number], k)[0] for k in range(2)]
        assert server.num_faults[fault] >= 1


@pytest.mark.parametrize("fault", ["500", "garbled", "closed", "not http"])
def test_a_fault_that_stays_ends_in_server_gone_after_the_attempts(fault: str, completion_server: Any) -> None:
    with completion_server(faults=(fault,), fault_share=1.0) as server:
        with pytest.raises(ServerGone, match="3 attempts failed, the last with: "):
            with_client(server.base_url, lambda client: client.sample(REQUEST, params()), max_attempts=3)
        asked = [body for body in server.bodies if body["prompt"] == REQUEST.prompt_ids]
        assert len(asked) == 3
        assert all(body["max_tokens"] == 1 for body in server.bodies if body not in asked), "signs of life"


def test_a_server_that_goes_away_is_waited_for_no_longer_than_the_patience(completion_server: Any) -> None:
    async def use(client: VLLMClient) -> float:
        server.__exit__()
        began = asyncio.get_running_loop().time()
        with pytest.raises(ServerGone, match=r"has not answered for 0.5 s"):
            await client.sample(REQUEST, params())
        return asyncio.get_running_loop().time() - began

    server = completion_server()
    with server:
        assert with_client(server.base_url, use) < 3.0


def test_a_server_that_comes_back_garbled_is_not_back(completion_server: Any) -> None:
    async def use(client: VLLMClient) -> None:
        server.models = b'{"data": ['
        await client.sample(REQUEST, params())

    server = completion_server(faults=("closed",), fault_share=1.0)
    with server, pytest.raises(ServerGone, match=r"has not answered for 0.5 s"):
        with_client(server.base_url, use)


def test_nobody_at_the_address_is_server_gone(completion_server: Any) -> None:
    with completion_server() as server:
        url = server.base_url
    with pytest.raises(ServerGone, match=f"{url} does not answer") as caught:
        with_client(url, lambda client: asyncio.sleep(0))
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("url", [None, "", "127.0.0.1:9", "http://"])
def test_an_address_that_is_none_is_server_gone(url: str | None) -> None:
    with pytest.raises(ServerGone):
        with_client(url, lambda client: asyncio.sleep(0))  # type: ignore[arg-type]


@pytest.mark.parametrize("models", [[], {}, {"data": []}, {"data": None}, "text", None], ids=str)
def test_a_server_of_another_kind_is_server_gone(models: Any, completion_server: Any) -> None:
    with completion_server(models=models) as server, pytest.raises(ServerGone, match="does not answer"):
        with_client(server.base_url, lambda client: asyncio.sleep(0))


def test_a_model_that_is_not_served_is_named(completion_server: Any) -> None:
    with completion_server() as server, pytest.raises(BadInput, match="serves policy, not 'other'"):
        with_client(server.base_url, lambda client: asyncio.sleep(0), model="other")


def test_a_client_that_was_not_opened_says_so() -> None:
    with pytest.raises(RuntimeError, match="open"):
        asyncio.run(VLLMClient("http://127.0.0.1:9").sample(REQUEST, params()))


@pytest.mark.parametrize(
    ("name", "value"), [("n", 0), ("temperature", -0.1), ("max_tokens", 0), ("top_p", 0.0), ("top_p", 1.1)]
)
def test_sampling_parameters_out_of_range_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"params.{name} must be"):
        params(**{name: value})
