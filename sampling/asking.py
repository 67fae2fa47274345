"""Language models that a reward asks while it scores: engines of its own, a server that runs, or a chat API.

The events have a loop and a thread of their own, so that a reward, which is called in threads while rollouts go on, is
an ordinary function. At most `concurrency` requests are under way; each has `deadline_seconds` from when it leaves,
with all that its client tries again.

What can go wrong is never a score: a client that is gone (`ServerGone`: no engine is left, a server stays away), a
request that is late, and a budget that is spent end the run, which its checkpoint takes up. A request that the model
refuses for good is answered with None, and counted.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from espalier.data.asked_texts import AskedText, WrittenText
from espalier.data.process_data.published import content_key
from espalier.data.records import BadInput
from espalier.runtime.background_loop import BackgroundLoop
from espalier.sampling.client import (
    Client,
    HasEngines,
    NextTokenParams,
    Refused,
    Sample,
    SampleRequest,
    SamplingParams,
    ServerGone,
)
from espalier.sampling.vllm_client import VLLMClient

log = logging.getLogger("rl")
A = TypeVar("A")
R = TypeVar("R")
_ROUNDING = 1e-3


class LateAnswer(ServerGone):
    """A request was not answered in the time that it has."""


class Asking:
    """Args: `client`, not opened, with engines of its own (their log is `log` where it names none), of a server that
    runs, or of a chat API; `params` of what is written. Raises BadInput on a server without an address, a concurrency
    below 1 and a deadline of 0."""

    def __init__(
        self, client: Client, params: SamplingParams, log: str, concurrency: int = 64, deadline_seconds: float = 600.0
    ):
        if concurrency < 1 or not deadline_seconds > 0:
            raise BadInput("what a reward asks needs concurrency 1 or more and deadline_seconds above 0, got "
                           f"{concurrency} and {deadline_seconds:g}")  # fmt: skip
        if isinstance(client, VLLMClient) and not client.urls:
            raise BadInput("the reward asks a server and has no address: set its client.base_url=http://HOST:PORT, or "
                           "its client to data_parallel_engines")  # fmt: skip
        if isinstance(client, VLLMClient) and client.endpoint != "completions":
            raise BadInput("the reward asks a server by token ids: leave its client.endpoint=completions")
        self.client, self.params = client, params
        self.concurrency, self.deadline_seconds = concurrency, deadline_seconds
        self.num_refused = 0
        self._log = log
        self._loop = BackgroundLoop()
        self._is_open = False

    @property
    def num_texts(self) -> int:
        """How many texts are written for each."""
        return self.params.n

    @property
    def most_asked(self) -> int | None:
        """The most tokens that can be asked: an engine's window less `params.max_tokens`; None where none is known."""
        window = getattr(self.client, "max_model_length", None)
        return window - self.params.max_tokens if window else None

    def open(self, model: str, text: str, ids: list[int]) -> None:
        """Start the client's engines with this model, or compare a server's tokenizer with its tokens of `text` (no
        special ones); once.

        Raises BadInput where engines are to load two models, the tokenizer is another one, the server has another
        model's folder, or no model is named and the client sends token ids; ServerGone.
        """
        if self._is_open:
            return
        if not model and isinstance(self.client, HasEngines | VLLMClient):
            raise BadInput("a judge is asked in chat turns, and the reward's client sends token ids: leave it "
                           "its client=openai_chat (a vLLM server has that API at http://HOST:PORT/v1)")  # fmt: skip
        if isinstance(self.client, HasEngines):
            if self.client.model not in ("", model):
                raise BadInput(f"client.model={self.client.model}: the engines load what the reward names, {model}: "
                               "leave it out")  # fmt: skip
            self.client.model, self.client.log = model, self.client.log or self._log
        elif isinstance(self.client, VLLMClient):
            self.client.expect_tokens(text, ids)
        self._loop.run(self.client.open())
        self._is_open = True
        if isinstance(self.client, VLLMClient):
            check_served(str(self.client.model), model)

    def texts(self, asked: Sequence[AskedText]) -> list[list[WrittenText] | None]:
        """Return what was written for each, `params.n` texts. Raises ServerGone, BudgetSpent, and what clients raise
        about settings."""

        async def one(request: AskedText) -> list[WrittenText]:
            samples = await self._sample(request.id, request.text, request.ids, self.params)
            return [WrittenText(sample.text, sample.finish_reason == "stop") for sample in samples]

        return self._loop.run(self._ask_all(asked, one))

    def next_logprobs(self, rows: Sequence[list[int]]) -> list[dict[int, float] | None]:
        """Return the log-probs of the 20 likeliest tokens behind each row, and of the one that was drawn, at
        temperature 1. Raises as `texts`, and BadInput on a client that gives none."""
        params = NextTokenParams()

        async def one(ids: list[int]) -> dict[int, float]:
            (sample,) = await self._sample(f"next/{content_key(ids)}", "", ids, params)
            if len(sample.top_logprobs) != 1:
                raise BadInput("this client says nothing of the likeliest tokens: set the reward's votes=hard")
            check_logprobs(sample.top_logprobs[0])
            return sample.top_logprobs[0]

        return self._loop.run(self._ask_all(rows, one))

    async def _sample(self, name: str, text: str, ids: list[int], params: SamplingParams) -> list[Sample]:
        chat = [] if ids else [{"role": "user", "content": text}]
        return await self.client.sample(SampleRequest(name, text, ids, chat), params)

    async def _ask_all(self, asked: Sequence[A], one: Callable[[A], Awaitable[R]]) -> list[R | None]:
        room = asyncio.Semaphore(self.concurrency)

        async def within(request: A) -> R | None:
            async with room:
                try:
                    async with asyncio.timeout(self.deadline_seconds):
                        return await one(request)
                except TimeoutError:
                    late = f"what the reward asks was not answered in {self.deadline_seconds:g} s"
                    raise LateAnswer(f"{late}: raise its deadline_seconds, or ask for less") from None
                except Refused as error:
                    self.num_refused += 1
                    log.warning("what the reward asks is refused (%d so far): %s", self.num_refused, error)
                    return None

        tasks = [asyncio.create_task(within(request)) for request in asked]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """Close the client: engines of its own end."""
        try:
            if self._is_open:
                self._is_open = False
                self._loop.run(self.client.close())
        finally:
            self._loop.close()


def check_served(served: str, model: str) -> None:
    """Say which model a server has; raise BadInput where that is the folder of another one than is to be asked: the
    policy's server, say, whose tokenizer may be the same. A name that is no folder here is taken on trust."""
    if Path(served).is_dir() and Path(served).resolve() != Path(model).resolve():
        raise BadInput(f"the server that the reward asks has {served}, not {model}: start one with that model, or name "
                       "its address")  # fmt: skip
    log.info("the reward asks a server for %s", served)


def check_logprobs(likeliest: dict[int, float]) -> None:
    """Raise BadInput where the numbers of some tokens at one place are no log-probs: an engine that was started with
    another `logprobs_mode` gives logits in their place."""
    mass = sum(math.exp(min(value, 1.0)) for value in likeliest.values())
    if not mass <= 1 + _ROUNDING:
        raise BadInput(f"the probabilities of {len(likeliest)} tokens at one place sum to {mass:.4g}: start the engine "
                       "that the reward asks with logprobs_mode=raw_logprobs")  # fmt: skip
