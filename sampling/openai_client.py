"""Chat APIs through the openai package, behind the same protocol. The key comes from the environment only.

The package's own retries are off: attempts are counted here, in one place. What an attempt can meet:

- 429, 408, 409, 5xx, broken connections, late, garbled or short answers: tried again, after the time that the answer
  asks for (Retry-After; all requests wait), else with full-jitter back-off;
- 429 for a quota that is used up, a refused key, an unknown model: the run ends, no attempt more;
- other 4xx, an answer that a content filter ended, or one that is empty at `max_tokens`: final for the row.

No attempt leaves unless its worst case fits the caps on tokens and money (`sampling.budget`). Whatever the API says in
an error is reported without the key, which some services echo. A chat API returns text, not token ids;
`Sample.token_ids` stays empty and `prompt_ids` are not sent.
"""

import asyncio
import logging
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openai

from espalier.data.records import BadInput
from espalier.sampling.api_keys import check_key_variable
from espalier.sampling.budget import Budget, Charge, Prices
from espalier.sampling.client import Refused, Sample, SampleRequest, SamplingParams, ServerGone
from espalier.sampling.rate_limit import RateLimit, empty_for, retry_after

log = logging.getLogger("sample")

_RETRY = {408, 409, 425, 429}
_GATEWAY = {408, 502, 504}  # somebody in between gave up: the model may have answered
_LENGTH_KEYS = ("max_tokens", "max_completion_tokens")


class NoKey(BadInput):
    """The environment variable that should hold the API key is not set, or the API refuses the key."""


class _Transient(RuntimeError):
    """Worth another try, after `wait` seconds where the API says how long."""

    def __init__(self, reason: str, wait: float | None = None):
        super().__init__(reason)
        self.wait = wait


class OpenAIChatClient:
    """Args: `key_variable` names the environment variable that holds the key. `budget` is the output whose budget
    (`X.budget.jsonl`) is kept, "" for none on disk. Caps over all runs of one output: `max_total_tokens` (prompt and
    answers, as the API bills them) and `max_cost`, null for none, with the prices of 1,000,000 tokens in the same
    money (`cached_price` null: cached prompt tokens cost the full price). `max_wait_seconds`: an API that asks for a
    longer pause ends the run. `length_key`: "max_completion_tokens" for models that take no "max_tokens"."""

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        key_variable: str = "OPENAI_API_KEY",
        system: str = "",
        request_seconds: float = 120.0,
        max_attempts: int = 12,
        max_wait_seconds: float = 120.0,
        length_key: str = "max_tokens",
        budget: str = "",
        max_total_tokens: int | None = 10_000_000,
        max_cost: float | None = None,
        prompt_price: float = 0.0,
        cached_price: float | None = None,
        completion_price: float = 0.0,
        seed: int = 0,
    ):
        check_key_variable(key_variable)
        if length_key not in _LENGTH_KEYS:
            raise BadInput(f"client.length_key must be {' or '.join(_LENGTH_KEYS)}, got '{length_key}'")
        if max_cost is not None and not prompt_price + completion_price > 0:
            raise BadInput("client.max_cost needs client.prompt_price and client.completion_price (for 1,000,000 "
                           "tokens): without prices nothing would ever reach it")  # fmt: skip
        self.model = model
        self.base_url = base_url
        self.key_variable = key_variable
        self.system = system
        self.request_seconds = request_seconds
        self.max_attempts = max_attempts
        self.max_wait_seconds = max_wait_seconds
        self.length_key = length_key
        self.seed = seed
        self.prices = Prices(prompt_price, completion_price, cached_price)
        path = str(Path(budget).with_suffix(".budget.jsonl")) if budget else ""
        self.budget = Budget(path, {"model": model, "system": system}, max_total_tokens, max_cost)
        self._limit = RateLimit()
        self._key = ""
        self._client: Any = None

    async def open(self) -> None:
        """Raises NoKey where the key is not in the environment, BadInput where the budget is another model's."""
        self._key = os.environ.get(self.key_variable, "").strip()
        if not self._key:
            raise NoKey(
                f"the environment variable {self.key_variable} is not set: export it (never put it in a config)"
            )
        if not self._key.isascii() or not self._key.isprintable():
            raise NoKey(f"the environment variable {self.key_variable} holds characters that no API key has")
        self.budget.begin()
        if self.budget.num_attempts:
            log.info("spent so far: %s", self.budget.describe())
        self._client = openai.AsyncOpenAI(
            api_key=self._key, base_url=self.base_url, timeout=self.request_seconds, max_retries=0
        )

    async def close(self) -> None:
        """Close the connections and the budget."""
        if self._client is not None:
            await self._client.close()
            self._client = None
            self.budget.close()
            log.info("spent: %s; cap: %s", self.budget.describe(), self.budget.caps())

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        """Return `params.n` answers to one message. Raises Refused, NoKey, ServerGone, BudgetSpent, BadInput where ids
        of tokens are to end them."""
        if params.stop_tokens:
            raise BadInput("params.stop_tokens: a chat API has no ids of tokens: name strings to stop at (params.stop)")
        messages = request.messages or [{"role": "user", "content": request.prompt}]
        if self.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        reason = ""
        for attempt in range(self.max_attempts):
            try:
                return await self._attempt(request, messages, params)
            except _Transient as error:
                reason = str(error)
                if error.wait is None:
                    await asyncio.sleep(random.uniform(0, min(30.0, 0.5 * 2**attempt)))
                elif error.wait > self.max_wait_seconds:
                    raise ServerGone(
                        f"{self.model}: {reason}: the API asks to wait {error.wait:.0f} s, client.max_wait_seconds is "
                        f"{self.max_wait_seconds:g}: run the same command then to go on"
                    ) from None
                else:
                    self._limit.hold(error.wait)
        raise ServerGone(f"{self.model}: {self.max_attempts} attempts failed, the last with: {reason}: what was "
                         "written is kept, run the same command to go on")  # fmt: skip

    async def _attempt(
        self, request: SampleRequest, messages: list[dict[str, str]], params: SamplingParams
    ) -> list[Sample]:
        """Ask once, within the budget."""
        worst = self.prices.worst_case(messages, params.n, params.max_tokens)
        await self._limit.wait()
        number = await self.budget.reserve(request.id, worst)
        charge: Charge | None = Charge()
        try:
            await self._limit.wait()  # the budget may have made it wait, and the limit is another one since
            charge = None  # what a broken or cancelled attempt comes to, nobody knows
            answer = await self._ask(request, messages, params)
            charge = self._charge(answer.usage, request.id, worst)
        except _NeverLeft as error:
            charge = Charge()
            raise _Transient(self._hide(str(error))) from None
        except openai.APIStatusError as error:
            if error.status_code not in _GATEWAY:  # an API bills answers, not errors
                charge = Charge()
            raise self._explain(error) from None
        except openai.APIConnectionError as error:
            raise _Transient(f"{type(error).__name__}: {self._hide(str(error.__cause__ or error))}") from None
        except (openai.OpenAIError, ValueError, TypeError, AttributeError) as error:
            raise _Transient(f"the answer cannot be read ({type(error).__name__})") from None
        finally:
            self.budget.settle(number, charge)
        return self._samples(answer, params)

    async def _ask(self, request: SampleRequest, messages: list[dict[str, str]], params: SamplingParams) -> Any:
        try:
            raw = await self._client.chat.completions.with_raw_response.create(
                model=self.model,
                messages=messages,
                n=params.n,
                temperature=params.temperature,
                top_p=params.top_p,
                stop=params.stop or None,
                seed=request.seed(self.seed) if params.is_seeded else openai.NOT_GIVEN,
                **{self.length_key: params.max_tokens},
            )
        except openai.APIConnectionError as error:
            if type(error.__cause__).__name__ in ("ConnectError", "ConnectTimeout", "PoolTimeout"):
                raise _NeverLeft(f"no connection ({error.__cause__})") from None
            raise
        answer = raw.parse()
        used = answer.usage.total_tokens if answer.usage else 0
        self._limit.hold(min(empty_for(raw.headers, used), self.max_wait_seconds))
        return answer

    def _charge(self, usage: Any, request_id: str, worst: Charge) -> Charge | None:
        """Return what the answer's own count says; None where it has none."""
        if usage is None:
            return None
        cached = getattr(usage.prompt_tokens_details, "cached_tokens", None) or 0
        charge = self.prices.charge(usage.prompt_tokens, usage.completion_tokens, min(cached, usage.prompt_tokens))
        if charge.tokens > worst.tokens:
            log.warning("request '%s' was billed %d tokens, more than its worst case of %d: the caps can be passed by "
                        "as much", request_id, charge.tokens, worst.tokens)  # fmt: skip
        return charge

    def _samples(self, answer: Any, params: SamplingParams) -> list[Sample]:
        choices = sorted(answer.choices or [], key=lambda choice: choice.index)
        reasons = [choice.finish_reason for choice in choices]
        if "content_filter" in reasons:
            raise Refused("the API's content filter ended the answer")
        if len(choices) != params.n or any(reason not in ("stop", "length") for reason in reasons):
            raise _Transient(f"{len(choices)} answers of {params.n}, finished {reasons}")
        samples = [Sample(choice.message.content or "", [], choice.finish_reason) for choice in choices]
        if any(not sample.text and sample.finish_reason == "length" for sample in samples):
            raise Refused(f"no text within params.max_tokens={params.max_tokens}: all of it went into reasoning that "
                          "the API does not return: raise it")  # fmt: skip
        return samples

    def _explain(self, error: openai.APIStatusError) -> Exception:
        """Return the error to raise for an answer with a status other than 200."""
        status = error.status_code
        body: Mapping[str, Any] = error.body if isinstance(error.body, Mapping) else {}
        said = self._hide(str(body.get("message") or error.message))[:300]
        if status in (401, 403):  # such answers tend to quote the key, or parts of it: nothing of them is shown
            return NoKey(f"{self.model}: HTTP {status}: the API refuses the key in {self.key_variable}: check the key "
                         "and what it may use")  # fmt: skip
        if status == 404:
            return BadInput(f"HTTP 404: check client.model='{self.model}' and client.base_url: {said}")
        if "insufficient_quota" in (error.code, error.type):
            return ServerGone(f"{self.model}: the account's quota is used up ({said}): what was written is kept")
        if status in _RETRY or status >= 500:
            return _Transient(f"HTTP {status}: {said}", retry_after(error.response.headers))
        return Refused(f"HTTP {status}: {said}")

    def _hide(self, text: str) -> str:
        """Return text from outside without the key."""
        return text.replace(self._key, "[key]") if self._key else text


class _NeverLeft(RuntimeError):
    """No connection came about: nothing was asked and nothing is billed."""
