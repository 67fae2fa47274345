"""Tokens that end a response beside the end token: by id or text, asked of every engine, read as an end token is."""

import asyncio
from typing import Any

import pytest

from espalier.data.records import BadInput
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.sampling.client import Sample, SampleRequest, SamplingParams
from espalier.sampling.completion_api import parse_samples, write_request
from espalier.sampling.openai_client import OpenAIChatClient
from espalier.sampling.requests import make_trajectory
from espalier.sampling.stop_tokens import with_stop_tokens


def params(*stop_tokens: Any) -> SamplingParams:
    return SamplingParams(1, 1.0, 16, return_logprobs=True, stop_tokens=list(stop_tokens))


def test_a_token_is_named_by_its_text_or_its_id(tokenizer: Any) -> None:
    (newline,) = tokenizer("\n").input_ids
    found = with_stop_tokens(params("\n", 7, tokenizer.convert_ids_to_tokens(9)), tokenizer)
    assert found.stop_token_ids == [newline, 7, 9]
    assert with_stop_tokens(params(), tokenizer) == params()
    with pytest.raises(BadInput, match=r"'zzyzx' is \d tokens of the policy's tokenizer, not one: name an id"):
        with_stop_tokens(params("zzyzx"), tokenizer)
    with pytest.raises(BadInput, match="100000 is no id of a tokenizer of 320 tokens"):
        with_stop_tokens(params(100_000), tokenizer)
    with pytest.raises(ValueError, match="'\\.' must be an id here"):
        _ = params(".").stop_token_ids


def test_a_server_is_asked_for_them_and_a_chat_api_refuses_them() -> None:
    request = SampleRequest("p", "1", [5])
    body = write_request("completions", request, params(7, 9), room=None, seed=None)
    assert body["stop_token_ids"] == [7, 9]
    assert "stop_token_ids" not in write_request("completions", request, params(), room=None, seed=None)
    with pytest.raises(BadInput, match="a chat API has no ids of tokens"):
        asyncio.run(OpenAIChatClient("m", "http://127.0.0.1:1").sample(request, params(7)))


def test_a_response_ends_with_the_first_stop_token_which_is_trained_on_and_no_part_of_its_text(
    tokenizer: Any, task: WordArithmetic
) -> None:
    """As vLLM answers: the token is among the ids, `stop_reason` is its id, the text ends before it."""
    problem = next(iter(task.problems("train")))
    ids = [*tokenizer("#### 7").input_ids, tokenizer("\n").input_ids[0]]
    request = SampleRequest("rl-0/p", "Q\n", list(tokenizer("Q\n").input_ids))
    choice = {"index": 0, "text": "#### 7", "token_ids": ids, "finish_reason": "stop", "stop_reason": ids[-1],
              "logprobs": {"token_logprobs": [-1.0] * len(ids)}}  # fmt: skip
    (sample,) = parse_samples("completions", {"choices": [choice]}, request, params(ids[-1]))
    assert sample == Sample("#### 7", ids, "stop", [-1.0] * len(ids))
    trajectory = make_trajectory(task, tokenizer, problem, request, 0, sample)
    assert (trajectory.response_ids, trajectory.response, trajectory.finish_reason) == (ids, "#### 7", "stop")
    assert (trajectory.answer, trajectory.step_ends[-1]) == ("7", len(ids))
