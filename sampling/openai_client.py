"""Chat APIs through the openai package, behind the same protocol. The key comes from the environment only.

The package's own retries are off: attempts are counted here, in one place. A chat API returns text, not
token ids; `Sample.token_ids` stays empty and `prompt_ids` are not sent.
"""

import asyncio
import os
import random
from typing import Any

import openai

from sampling.client import Refused, Sample, SampleRequest, SamplingParams, ServerGone


class NoKey(ValueError):
    """The environment variable that should hold the API key is not set."""

    exit_code = 2


class BudgetSpent(RuntimeError):
    """The cap on tokens is reached: what was written is kept; raise the cap to go on."""

    exit_code = 1


class OpenAIChatClient:
    """Args: `key_variable` names the environment variable that holds the key; `max_total_tokens` caps what
    the run may use (prompt and answer tokens as the API bills them)."""

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        key_variable: str = "OPENAI_API_KEY",
        system: str = "",
        request_seconds: float = 120.0,
        max_attempts: int = 8,
        max_total_tokens: int = 10_000_000,
        seed: int = 0,
    ):
        self.model = model
        self.base_url = base_url
        self.key_variable = key_variable
        self.system = system
        self.request_seconds = request_seconds
        self.max_attempts = max_attempts
        self.max_total_tokens = max_total_tokens
        self.seed = seed
        self.total_tokens = 0
        self._client: Any = None

    async def open(self) -> None:
        """Raises NoKey where the key is not in the environment."""
        key = os.environ.get(self.key_variable)
        if not key:
            raise NoKey(
                f"the environment variable {self.key_variable} is not set: export it (never put it in a config)"
            )
        self._client = openai.AsyncOpenAI(
            api_key=key, base_url=self.base_url, timeout=self.request_seconds, max_retries=0
        )

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.close()

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        """`params.n` answers to one message."""
        if self.total_tokens >= self.max_total_tokens:
            raise BudgetSpent(
                f"{self.total_tokens} tokens used, the cap is client.max_total_tokens={self.max_total_tokens}"
            )
        reason = ""
        for attempt in range(self.max_attempts):
            wait = random.uniform(0, min(30.0, 0.5 * 2**attempt))
            try:
                return await self._ask(request, params)
            except openai.RateLimitError as error:
                after = error.response.headers.get("retry-after", "")
                wait = min(120.0, float(after)) if after.replace(".", "", 1).isdigit() else wait
                reason = "rate limit"
            except (openai.APIConnectionError, openai.InternalServerError) as error:
                reason = type(error).__name__
            except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
                raise ServerGone(
                    f"{self.model}: HTTP {error.status_code}: check the key, the model and base_url"
                ) from None
            except openai.APIStatusError as error:
                raise Refused(f"HTTP {error.status_code}: {error.message[:300]}") from None
            await asyncio.sleep(wait)
        raise ServerGone(f"{self.model}: {self.max_attempts} attempts failed, the last with: {reason}")

    async def _ask(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        messages = request.messages or [{"role": "user", "content": request.prompt}]
        if self.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        answer = await self._client.chat.completions.create(
            model=self.model,
            messages=messages,
            n=params.n,
            temperature=params.temperature,
            top_p=params.top_p,
            max_tokens=params.max_tokens,
            stop=params.stop or None,
            seed=request.seed(self.seed) if params.is_seeded else openai.NOT_GIVEN,
        )
        self.total_tokens += answer.usage.total_tokens if answer.usage else 0
        return [Sample(choice.message.content or "", [], choice.finish_reason) for choice in answer.choices]
