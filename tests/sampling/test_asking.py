"""What a reward asks while it scores: engines, servers and chat APIs behind one function, deadlines and refusals."""

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.data.asked_texts import AskedText
from espalier.data.records import BadInput
from espalier.models.load import load_policy, load_tokenizer
from espalier.sampling.asking import Asking, LateAnswer, check_logprobs, check_served
from espalier.sampling.client import Refused, Sample, SampleRequest, SamplingParams, ServerGone
from espalier.sampling.data_parallel_engines import DataParallelEngines
from espalier.sampling.vllm_client import VLLMClient

PARAMS = SamplingParams(2, 0.7, 16)


class Client:
    """Answers by the text that is asked, `seconds` late."""

    def __init__(self, answer: Callable[[str], str], seconds: float = 0.0):
        self.answer, self.seconds = answer, seconds
        self.requests: list[SampleRequest] = []
        self.num_now = self.most_at_once = self.num_open = 0

    async def open(self) -> None:
        self.num_open += 1

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        self.requests.append(request)
        self.num_now += 1
        self.most_at_once = max(self.num_now, self.most_at_once)
        try:
            await asyncio.sleep(self.seconds)
            text = self.answer(request.prompt)
        finally:
            self.num_now -= 1
        top = ({5: math.log(0.5), 6: math.log(0.25)},) if params.top_logprobs and params.max_tokens == 1 else ()
        return [Sample(text, [5], "stop" if k == 0 else "length", top_logprobs=top) for k in range(params.n)]

    async def close(self) -> None:
        self.num_open -= 1


def asked(*texts: str) -> list[AskedText]:
    return [AskedText(f"id-{text}", text) for text in texts]


def test_answers_come_in_order_and_a_refused_one_is_none_and_counted() -> None:
    def answer(text: str) -> str:
        if text == "long":
            raise Refused("too long")
        return text.upper()

    client = Client(answer)
    asking = Asking(client, PARAMS, "", concurrency=2)
    asking.open("M", "", [])
    asking.open("M", "", [])
    found = asking.texts(asked("a", "long", "b"))
    assert [row and [(one.text, one.is_whole) for one in row] for row in found] == [
        [("A", True), ("A", False)], None, [("B", True), ("B", False)],
    ]  # fmt: skip
    assert (asking.num_refused, client.most_at_once, client.num_open) == (1, 2, 1)
    assert client.requests[0].messages == [{"role": "user", "content": "a"}]  # without ids it is a chat
    asking.close()
    assert client.num_open == 0


def test_the_likeliest_tokens_are_asked_for_one_token_under_ids_of_their_content() -> None:
    client = Client(lambda text: "x")
    asking = Asking(client, PARAMS, "")
    asking.open("M", "", [])
    first, second, third = asking.next_logprobs([[1, 2], [3], [1, 2]])
    assert first == second == third == {5: math.log(0.5), 6: math.log(0.25)}
    ids = {tuple(request.prompt_ids): request.id for request in client.requests}
    assert len(set(ids.values())) == 2
    asking.close()


def test_a_late_answer_ends_the_run_and_takes_the_others_back() -> None:
    client = Client(lambda text: "x", seconds=30.0)
    asking = Asking(client, PARAMS, "", deadline_seconds=0.1)
    asking.open("M", "", [])
    with pytest.raises(LateAnswer, match=r"was not answered in 0\.1 s") as error:
        asking.texts(asked("a", "b"))
    assert error.value.exit_code == 3
    assert client.num_now == 0
    asking.close()


def test_numbers_that_are_no_log_probs_are_refused() -> None:
    check_logprobs({1: math.log(0.9), 2: math.log(0.1)})
    with pytest.raises(BadInput, match="logprobs_mode=raw_logprobs"):
        check_logprobs({1: 3.5, 2: -1.0})
    with pytest.raises(BadInput, match="logprobs_mode"):
        check_logprobs({1: math.nan})


def test_a_server_with_another_models_folder_is_refused_and_a_name_is_taken_on_trust(tmp_path: Path) -> None:
    policy, verifier = tmp_path / "policy", tmp_path / "verifier"
    policy.mkdir()
    verifier.mkdir()
    check_served(str(verifier), f"{policy}/../verifier")
    check_served("my-verifier", str(verifier))
    with pytest.raises(BadInput, match=r"has .*policy, not .*verifier: start one with that model"):
        check_served(str(policy), str(verifier))


def test_settings_that_cannot_be_are_one_line() -> None:
    for settings in ({"concurrency": 0}, {"deadline_seconds": 0.0}):
        with pytest.raises(BadInput, match="concurrency 1 or more and deadline_seconds above 0"):
            Asking(Client(str), PARAMS, "", **settings)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="has no address"):
        Asking(VLLMClient(), PARAMS, "")
    with pytest.raises(BadInput, match="endpoint=completions"):
        Asking(VLLMClient("http://h:1", endpoint="chat"), PARAMS, "")
    with pytest.raises(BadInput, match="load what the reward names"):
        Asking(DataParallelEngines("other"), PARAMS, "").open("verifier", "", [])
    for client in (VLLMClient("http://h:1"), DataParallelEngines("judge")):
        with pytest.raises(BadInput, match="a judge is asked in chat turns"):  # they would get a prompt of no tokens
            Asking(client, PARAMS, "").open("", "", [])


class Stood(DataParallelEngines):
    program = "tests.support.engine_stand_in"


def test_engines_load_the_model_of_the_reward_and_go_on_when_one_is_lost(tmp_path: Path) -> None:
    client = Stood("", num_engines=2, max_replaced=0, options={"answer": "checked"})
    asking = Asking(client, PARAMS, str(tmp_path / "v.log"))
    asking.open("verifier", "", [])
    try:
        rows = [AskedText(name, name, [1]) for name in ("die at 0", *(f"good/{k}" for k in range(8)))]
        assert [row and row[0].text for row in asking.texts(rows)] == ["checked"] * 9
        with pytest.raises(ServerGone):
            asking.texts([AskedText("die", "die", [1])])
    finally:
        asking.close()
    assert client.model == "verifier"
    assert list(tmp_path.glob("v*.log"))  # their log is the reward's


def check_likeliest(asking: Asking, folder: Path, gap: float) -> None:
    """Hold the 20 likeliest tokens behind some rows against whole logits, and draw a text."""
    network, rows = load_policy(str(folder)).float(), [[7, 8, 9], [7, 8, 9, 10, 11], list(range(5, 40))]
    tokenizer = load_tokenizer(str(folder))
    asking.open(str(folder), "2+2", list(tokenizer("2+2", add_special_tokens=False).input_ids))
    try:
        for ids, likeliest in zip(rows, asking.next_logprobs(rows), strict=True):
            with torch.no_grad():
                logprobs = network(input_ids=torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)
            assert likeliest is not None
            assert len(likeliest) in (20, 21)
            for token, value in likeliest.items():
                assert value == pytest.approx(float(logprobs[token]), abs=gap)
            assert min(sorted(likeliest.values())[-20:]) >= float(logprobs.topk(21).values[-1]) - gap
        (written,) = asking.texts([AskedText("a", "2+2", rows[0])])
        assert written is not None
        assert len(written) == 2
        assert asking.texts([AskedText("long", "", [5] * 600)]) == [None]  # beyond the window
    finally:
        asking.close()


@pytest.mark.slow
@pytest.mark.server
def test_a_real_engine_says_which_tokens_are_the_likeliest(tiny_policy: Path, tmp_path: Path) -> None:
    client = DataParallelEngines("", num_engines=1, max_model_len=256, dtype="float32", kv_cache_gib=1,
                                 options={"enforce_eager": True, "max_num_seqs": 8})  # fmt: skip
    check_likeliest(Asking(client, PARAMS, str(tmp_path / "v.log")), tiny_policy, 1e-3)


@pytest.mark.server
def test_a_real_server_says_which_tokens_are_the_likeliest(real_server: Any, tiny_policy: Path) -> None:
    check_likeliest(Asking(VLLMClient(real_server.base_url), PARAMS, ""), tiny_policy, 0.05)
