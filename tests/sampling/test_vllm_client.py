"""The HTTP client against a real server on loopback: what is sent, what is tried again, what is final."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from espalier.data.records import BadInput
from espalier.data.token_text import PROBE_TEXT
from espalier.sampling.client import Refused, Sample, SampleRequest, SamplingParams, ServerGone
from espalier.sampling.completion_api import Transient, parse_samples
from espalier.sampling.engine_counters import EngineCounters, parse_counters
from espalier.sampling.vllm_client import VLLMClient, _pause
from tests.support.slow import slow_unless

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
    asked = params(stop=["\n\n"], top_p=0.9, return_logprobs=True, is_seeded=True)
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


@pytest.mark.parametrize(
    "fault", slow_unless(lambda fault: fault in ("500", "garbled", "cut body", "closed", "not http"), FAULTS)
)
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


@pytest.mark.parametrize(
    ("told", "at_least", "at_most"), [("0.3", 0.3, 0.6), ("0", 0.0, 0.25), ("soon", 0.0, 0.5)], ids=str
)
def test_a_retry_leaves_when_the_server_said_and_not_before(
    told: str, at_least: float, at_most: float, completion_server: Any
) -> None:
    faults = {"faults": ("429",), "first_faults": 1, "headers": {"Retry-After": told}}
    with completion_server(**faults) as server:
        with_client(server.base_url, lambda client: client.sample(REQUEST, params()))
        waits = [b - a for a, b in zip(server.times, server.times[1:], strict=False)]
    assert waits, "the first answer was a fault"
    assert waits[0] >= at_least
    assert min(waits) <= at_most + 0.3, "on a loaded machine an answer is late, never early"


def test_the_pause_of_a_retry_has_full_jitter_and_a_bound() -> None:
    early = [_pause(0, None) for _ in range(200)]
    late = [_pause(11, None) for _ in range(200)]
    assert max(early) <= 0.25
    assert max(late) <= 8.0
    assert min(late) < 1.0 < 7.0 < max(late), "spread from nothing to the bound"
    assert 60.0 <= _pause(0, 999.0) <= 61.1, "a longer wait than a minute is asked about again after a minute"


@pytest.mark.parametrize(("key", "message"), [
    ("", "wants an API key .HTTP 401., read from VLLM_API_KEY: it is not set: export it"),
    ("wrong-secret", "wants an API key .HTTP 401., read from VLLM_API_KEY: the key in it is refused"),
])  # fmt: skip
def test_a_key_that_is_missing_or_refused_is_one_line_that_does_not_hold_it(
    key: str, message: str, completion_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", key)
    with completion_server(key="right-secret") as server, pytest.raises(BadInput, match=message) as caught:
        with_client(server.base_url, lambda client: asyncio.sleep(0))
    assert caught.value.exit_code == 2
    assert "secret" not in str(caught.value)


def test_the_key_of_the_environment_opens_the_server(completion_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "right-secret")
    with completion_server(key="right-secret") as server:
        assert len(with_client(server.base_url, lambda client: client.sample(REQUEST, params()))) == 2


@pytest.mark.parametrize("status", ["401", "403", "404"])
def test_what_no_request_can_get_past_ends_the_run_at_once(status: str, completion_server: Any) -> None:
    with completion_server(faults=(status,), fault_share=1.0) as server:
        with pytest.raises(BadInput, match=f"(HTTP|answered) {status}"):
            with_client(server.base_url, lambda client: client.sample(REQUEST, params()))
        assert len(server.bodies) == 1


def opened_with_probe(ids: list[int]) -> Callable[[str], Any]:
    async def run(url: str) -> None:
        client = VLLMClient(url)
        client.expect_tokens("a probe", ids)
        await client.open()
        await client.close()

    return lambda url: asyncio.run(run(url))


def test_a_server_with_another_tokenizer_is_refused(completion_server: Any) -> None:
    with completion_server(tokenize=lambda text: [1, 2, 9, 4, 5]) as server:
        opened_with_probe([1, 2, 9, 4, 5])(server.base_url)
        with pytest.raises(BadInput, match=r"5 tokens .from token 2 on .9, 4, 5.., policy 4 ..3, 4..: serve"):
            opened_with_probe([1, 2, 3, 4])(server.base_url)
        with pytest.raises(BadInput, match="has another tokenizer"):
            opened_with_probe([1, 2, 9, 4])(server.base_url)


def test_a_server_that_does_not_tokenise_is_trusted_and_that_is_said(
    completion_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with completion_server() as server:
        opened_with_probe([1, 2, 3])(server.base_url)
    assert "taken on trust" in caplog.text


TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?"}]
CHAT = SampleRequest("p", "prompt", [9, 6], TURNS)  # the test server makes one token of a turn: its length


def test_a_chat_sends_the_turns_and_returns_ids_and_log_probs(completion_server: Any) -> None:
    asked = params(return_logprobs=True, stop=["!"])
    with completion_server() as server:
        samples = with_client(server.base_url, lambda client: client.sample(CHAT, asked), endpoint="chat")
    texts_and_ids = [completion_server.samples([9, 6], k) for k in range(2)]
    assert [(sample.text, sample.token_ids) for sample in samples] == texts_and_ids
    assert samples[0].logprobs == [-token / 8 for token in samples[0].token_ids]
    body = server.bodies[0]
    assert (body["messages"], body["logprobs"], body["top_logprobs"], body["stop"]) == (TURNS, True, 0, ["!"])


def test_a_chat_template_that_writes_other_tokens_than_the_prompt_is_refused(completion_server: Any) -> None:
    other = SampleRequest("p", "prompt", [9, 7], TURNS)
    with completion_server() as server, pytest.raises(BadInput, match="writes 'p' in other tokens than the prompt has"):
        with_client(server.base_url, lambda client: client.sample(other, params()), endpoint="chat")


def test_a_state_has_no_turns_to_chat_with(completion_server: Any) -> None:
    with completion_server() as server, pytest.raises(BadInput, match="has no chat turns: ask for it"):
        with_client(server.base_url, lambda client: client.sample(REQUEST, params()), endpoint="chat")
    with pytest.raises(BadInput, match=r"client.endpoint must be completions or chat, got 'talk'"):
        VLLMClient("http://127.0.0.1:9", endpoint="talk")


def test_answers_with_too_few_log_probs_are_tried_again(completion_server: Any) -> None:
    """A cut answer can be whole JSON: every token must have its log-prob."""
    answer = {"choices": [{"index": 0, "text": "x", "token_ids": [1, 2], "finish_reason": "stop",
                           "logprobs": {"token_logprobs": [-0.5]}}]}  # fmt: skip
    with pytest.raises(Transient, match="1 log-probs of 2 tokens"):
        parse_samples("completions", answer, REQUEST, params(n=1, return_logprobs=True))


def test_the_engines_counts_are_those_since_the_start(completion_server: Any) -> None:
    async def use(client: VLLMClient) -> VLLMClient:
        await client.sample(REQUEST, params())
        await client.read_counters()
        return client

    with completion_server() as server:
        with_client(server.base_url, use)
        client = with_client(server.base_url, use)
    tokens = sum(len(completion_server.samples([5, 6, 7], k)[1]) for k in range(2))
    assert client.counted == EngineCounters(3, tokens, 3, 1)
    assert client.cache_hit_rate == pytest.approx(1 / 3)


def test_the_counters_of_a_page_are_summed_over_engines() -> None:
    page = """# HELP vllm:prefix_cache_queries_total Prefix cache queries.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="policy"} 1.5e+03
vllm:prefix_cache_queries_total{engine="1",model_name="policy"} 500.0
vllm:prefix_cache_hits_total{engine="0",model_name="policy"} 300.0
vllm:prefix_cache_hits_created{engine="0",model_name="policy"} 1.7e+09
vllm:external_prefix_cache_hits_total{engine="0"} 7.0
vllm:generation_tokens_total{engine="0",model_name="policy"} 42.0
"""
    assert parse_counters(page) == EngineCounters(0, 42, 2000, 300)
    assert parse_counters("python_gc_objects_collected_total 3.0\n") is None
    assert EngineCounters().hit_rate == 0.0


def test_requests_with_less_room_than_asked_are_counted(completion_server: Any) -> None:
    async def use(client: VLLMClient) -> int:
        await client.sample(REQUEST, params(max_tokens=50))
        await client.sample(REQUEST, params(max_tokens=17))
        return client.num_shortened

    with completion_server(max_model_len=20) as server:
        assert with_client(server.base_url, use) == 1


@pytest.mark.server
def test_the_real_server_tokenises_as_the_policy_counts_its_tokens_and_gives_signs_of_life(
    real_server: Any, tokenizer: Any
) -> None:
    ids = list(tokenizer(PROBE_TEXT, add_special_tokens=False).input_ids)[:130]

    async def ask(probe: list[int]) -> tuple[VLLMClient, int]:
        client = VLLMClient(real_server.base_url)
        client.expect_tokens(PROBE_TEXT, probe)
        await client.open()
        asked = params(max_tokens=20, return_logprobs=True)
        groups = [await client.sample(SampleRequest(f"p{k}", "", ids), asked) for k in range(2)]
        assert await client.is_working()
        await client.close()
        assert all(len(sample.logprobs or []) == len(sample.token_ids) for group in groups for sample in group)
        return client, sum(len(sample.token_ids) for group in groups for sample in group)

    client, generated = asyncio.run(ask(list(tokenizer(PROBE_TEXT, add_special_tokens=False).input_ids)))
    assert client.counted is not None
    assert generated <= client.counted.generated_tokens <= generated + 1, "and one for the sign of life"
    assert client.counted.prompt_tokens >= 2 * len(ids)
    assert client.counted.cache_hits > 0
    assert 0 < (client.cache_hit_rate or 0) < 1
    with pytest.raises(BadInput, match="has another tokenizer than policy"):
        asyncio.run(ask([1, 2, 3]))
