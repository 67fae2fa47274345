"""Requests and answers of vLLM's two sampling endpoints as JSON: `/v1/completions` with token ids in and out, and
`/v1/chat/completions` with turns in and token ids out."""

from typing import Any

from espalier.data.records import BadInput
from espalier.sampling.client import Sample, SampleRequest, SamplingParams

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}

# What the model's own generation_config.json would fill in where a request is silent, said to be off.
_OFF = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


class Transient(RuntimeError):
    """Worth another try, after `seconds` at the earliest where the server said so. `is_broken`: there was no answer."""

    def __init__(self, reason: str, seconds: float | None = None, is_broken: bool = False):
        super().__init__(reason)
        self.seconds = seconds
        self.is_broken = is_broken


def write_request(
    endpoint: str, request: SampleRequest, params: SamplingParams, room: int | None, seed: int | None
) -> dict[str, Any]:
    """Return the body without its model; at most `room` new tokens. Raises BadInput on a chat without turns."""
    body: dict[str, Any]
    if endpoint == "completions":
        body = {"prompt": request.prompt_ids}
    elif request.messages:
        body = {"messages": request.messages}
    else:
        raise BadInput(f"request '{request.id}' has no chat turns: ask for it with client.endpoint=completions")
    body |= {
        "n": params.n,
        "max_tokens": params.max_tokens if room is None else min(params.max_tokens, room),
        "temperature": params.temperature,
        "top_p": params.top_p,
        **_OFF,
        "return_token_ids": True,
    }
    if params.stop:
        body["stop"] = params.stop
    if params.stop_tokens:
        body["stop_token_ids"] = params.stop_token_ids
    if params.top_logprobs and endpoint == "completions":
        body |= {"logprobs": params.top_logprobs, "return_tokens_as_token_ids": True}
    elif params.top_logprobs:
        raise BadInput("the likeliest tokens by id are read from client.endpoint=completions")
    elif params.return_logprobs:
        body |= {"logprobs": 0} if endpoint == "completions" else {"logprobs": True, "top_logprobs": 0}
    if seed is not None:
        body["seed"] = seed
    return body


def parse_samples(
    endpoint: str, answer: dict[str, Any], request: SampleRequest, params: SamplingParams
) -> list[Sample]:
    """Return the samples in an answer, in order.

    Raises Transient where they are not all there and whole, BadInput where a chat template wrote another prompt
    than the request's.
    """
    try:
        if endpoint == "chat" and answer["prompt_token_ids"] != request.prompt_ids:
            raise BadInput(f"the server's chat template writes '{request.id}' in other tokens than the prompt has: "
                           "choose a prompt with is_chat: true, or client.endpoint=completions")  # fmt: skip
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        samples = [_sample(endpoint, choice, params) for choice in choices]
    except (KeyError, TypeError) as error:
        raise Transient(f"the answer lacks {error}") from None
    if len(samples) != params.n or any(s.finish_reason not in ("stop", "length") for s in samples):
        reasons = [sample.finish_reason for sample in samples]
        raise Transient(f"{len(samples)} samples of {params.n}, finished {reasons}")
    return samples


def _sample(endpoint: str, choice: dict[str, Any], params: SamplingParams) -> Sample:
    text = choice["text"] if endpoint == "completions" else choice["message"]["content"] or ""
    ids = list(choice["token_ids"])
    logprobs: list[float] | None = None
    if params.return_logprobs and endpoint == "completions":
        logprobs = list(choice["logprobs"]["token_logprobs"])
    elif params.return_logprobs:
        logprobs = [float(row["logprob"]) for row in choice["logprobs"]["content"]]
    if logprobs is not None and len(logprobs) != len(ids):
        raise Transient(f"{len(logprobs)} log-probs of {len(ids)} tokens")
    top: tuple[dict[int, float], ...] = ()
    if params.top_logprobs:
        top = tuple(_by_id(row) for row in choice["logprobs"]["top_logprobs"])
        if len(top) != len(ids):
            raise Transient(f"the likeliest tokens of {len(top)} places for {len(ids)} tokens")
    reason = choice.get("stop_reason")  # vLLM's: the stop string, or the id of an end token beside the main one
    stop = reason if isinstance(reason, str) else ""
    return Sample(text, ids, choice["finish_reason"], logprobs, stop, top_logprobs=top)


def _by_id(row: dict[str, float]) -> dict[int, float]:
    """Return log-probs by token id, of a place whose tokens are spelled `token_id:5`."""
    try:
        return {int(name.removeprefix("token_id:")): float(value) for name, value in row.items()}
    except (AttributeError, ValueError) as error:
        raise Transient(f"the likeliest tokens of a place cannot be read ({error})") from None
