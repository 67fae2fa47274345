"""A running vLLM server over HTTP: `/v1/completions` with token ids in and out, retries in one place.

What a request can meet: 429, 5xx, broken connections and garbled bodies are tried again with full-jitter
back-off; other 4xx are final for the row; a server that stays away for `patience_seconds` ends the run.
"""

import asyncio
import json
import random
from typing import Any

import aiohttp

from sampling.client import Refused, Sample, SampleRequest, SamplingParams, ServerGone

_RETRY = {408, 409, 425, 429}


class _Transient(RuntimeError):
    """Worth another try."""


class VLLMClient:
    """Args: `base_url` such as `http://127.0.0.1:8000`; times in seconds; `model` null takes the served one."""

    def __init__(
        self,
        base_url: str | None = None,
        model: str | None = None,
        request_seconds: float = 300.0,
        patience_seconds: float = 30.0,
        max_attempts: int = 12,
        seed: int = 0,
    ):
        self.base_url = base_url
        self.model = model
        self.request_seconds = request_seconds
        self.patience_seconds = patience_seconds
        self.max_attempts = max_attempts
        self.seed = seed
        self.max_model_length: int | None = None
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Ask the server what it serves. Raises ServerGone where nobody answers."""
        if not self.base_url:
            raise ServerGone("no server to ask: set client.base_url=http://HOST:PORT, or a server to start")
        timeout = aiohttp.ClientTimeout(total=self.request_seconds, connect=5.0)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        try:
            served = (await self.get_json("/v1/models"))["data"]
            names = [row["id"] for row in served]
            if not names:
                raise ValueError("no model is served")
        except (aiohttp.ClientError, TimeoutError, OSError, KeyError, TypeError, ValueError) as error:
            await self.close()
            raise ServerGone(f"{self.base_url} does not answer ({error}): is the vLLM server running?") from None
        self.model = self.model or names[0]
        if self.model not in names:
            await self.close()
            raise ServerGone(f"{self.base_url} serves {', '.join(names)}, not '{self.model}'")
        self.max_model_length = served[names.index(self.model)].get("max_model_len")

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The open session."""
        if self._session is None:
            raise RuntimeError("VLLMClient.open() has not been called")
        return self._session

    async def get_json(self, path: str) -> Any:
        """GET a JSON document."""
        async with self.session.get(f"{self.base_url}{path}") as response:
            response.raise_for_status()
            return await response.json()

    async def post_json(self, path: str, body: dict[str, Any]) -> Any:
        """POST once, without retries; for the server's own controls."""
        async with self.session.post(f"{self.base_url}{path}", json=body) as response:
            text = await response.text()
            if response.status != 200:
                raise ServerGone(f"{self.base_url}{path} answered {response.status}: {text[:300]}")
            return json.loads(text) if text.strip() else None

    def body(self, request: SampleRequest, params: SamplingParams) -> dict[str, Any]:
        """The JSON of one request; raises Refused where the prompt leaves no room for an answer."""
        max_tokens = params.max_tokens
        if self.max_model_length is not None:
            max_tokens = min(max_tokens, self.max_model_length - len(request.prompt_ids))
            if max_tokens < 1:
                length = len(request.prompt_ids)
                raise Refused(f"prompt of {length} tokens leaves no room in a window of {self.max_model_length}")
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": request.prompt_ids,
            "n": params.n,
            "max_tokens": max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "return_token_ids": True,
        }
        if params.stop:
            body["stop"] = params.stop
        if params.has_logprobs:
            body["logprobs"] = 0
        if params.is_seeded:
            body["seed"] = request.seed(self.seed)
        return body

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        """`params.n` samples; tries again what is worth it."""
        body = self.body(request, params)
        reason = ""
        for attempt in range(self.max_attempts):
            try:
                return self._samples(await self._post(body), params)
            except (aiohttp.ClientConnectionError, TimeoutError, OSError) as error:
                await self._wait_for_server(error)
                reason = repr(error)
            except (_Transient, aiohttp.ClientError) as error:
                reason = str(error)
            await asyncio.sleep(random.uniform(0, min(8.0, 0.25 * 2**attempt)))
        raise ServerGone(f"{self.base_url}: {self.max_attempts} attempts failed, the last with: {reason}")

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        async with self.session.post(f"{self.base_url}/v1/completions", json=body) as response:
            raw = await response.read()
            if response.status in _RETRY or response.status >= 500:
                raise _Transient(f"HTTP {response.status}: {raw[:200].decode(errors='replace')}")
            if response.status != 200:
                raise Refused(f"HTTP {response.status}: {raw[:300].decode(errors='replace')}")
        try:
            answer: dict[str, Any] = json.loads(raw)
        except ValueError:
            raise _Transient("the answer is not JSON") from None
        return answer

    def _samples(self, answer: dict[str, Any], params: SamplingParams) -> list[Sample]:
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            samples = [
                Sample(
                    choice["text"],
                    list(choice["token_ids"]),
                    choice["finish_reason"],
                    list(choice["logprobs"]["token_logprobs"]) if params.has_logprobs else None,
                )
                for choice in choices
            ]
        except (KeyError, TypeError) as error:
            raise _Transient(f"the answer lacks {error}") from None
        if len(samples) != params.n or any(s.finish_reason not in ("stop", "length") for s in samples):
            reasons = [sample.finish_reason for sample in samples]
            raise _Transient(f"{len(samples)} samples of {params.n}, finished {reasons}")
        return samples

    async def _wait_for_server(self, error: BaseException) -> None:
        """Wait until the server answers again; raises ServerGone after `patience_seconds`."""
        deadline = asyncio.get_running_loop().time() + self.patience_seconds
        while True:
            try:
                await asyncio.wait_for(self.get_json("/v1/models"), 5.0)
                return
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
                if asyncio.get_running_loop().time() > deadline:
                    raise ServerGone(f"{self.base_url} has not answered for {self.patience_seconds:g} s ({error!r})"
                                     ) from None  # fmt: skip
                await asyncio.sleep(0.5)
