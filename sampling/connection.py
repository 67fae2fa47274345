"""One vLLM server over HTTP: what an answer's status means, whether the engine still works, waiting until it is back.

`/health` and `/v1/models` answer 200 while the engine behind them is frozen; what counts as life here is an answer,
a token count that grows, or one token sampled for us.
"""

import asyncio
import json
import logging
from typing import Any

import aiohttp

from espalier.data.records import BadInput
from espalier.sampling.client import Refused, ServerGone
from espalier.sampling.completion_api import Transient
from espalier.sampling.engine_counters import EngineCounters, parse_counters
from espalier.sampling.input_checks import choose_served, is_same_model
from espalier.sampling.rate_limit import retry_after

log = logging.getLogger("sample")

RETRIED = {408, 409, 425, 429}
_BROKEN = (aiohttp.ClientConnectionError, TimeoutError, OSError)
_GLANCE_SECONDS = 5.0
OPEN_SECONDS = 20.0


class Connection:
    """Args: `url` without a path; `key_variable` names the environment variable that a key would come from."""

    def __init__(self, url: str, session: aiohttp.ClientSession, patience_seconds: float, key_variable: str):
        self.url = url.rstrip("/")
        self.session = session
        self.patience_seconds = patience_seconds
        self.key_variable = key_variable
        self.model = ""
        self.max_model_length: int | None = None
        self.num_answers = 0
        self._recovery: asyncio.Task[None] | None = None

    async def open(self, model: str | None, policy: str = "") -> None:
        """Ask what is served, and take `model` of it, or the `policy`, or the first. Raises ServerGone where nobody
        answers, BadInput on another model than these or a key refused."""
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                served = (await self.get_json("/v1/models"))["data"]
            models: dict[str, str] = {row["id"]: str(row.get("root") or row["id"]) for row in served}
            if not models:
                raise ValueError("no model is served")
        except aiohttp.ClientResponseError as error:
            if error.status in (401, 403):
                raise self._key_refused(error.status) from None
            raise ServerGone(f"{self.url} does not answer (HTTP {error.status}): is the vLLM server running?") from None
        except (aiohttp.ClientError, TimeoutError, OSError, KeyError, TypeError, ValueError) as error:
            raise ServerGone(f"{self.url} does not answer ({error!r}): is the vLLM server running?") from None
        if model and model not in models:
            raise BadInput(f"{self.url} serves {', '.join(models)}, not '{model}': set client.model=null or one "
                           "of these")  # fmt: skip
        if model and policy and is_same_model(models[model], policy) is False:
            raise BadInput(f"{self.url} serves {models[model]} as '{model}', policy is {policy}: set policy= to what "
                           "is asked")  # fmt: skip
        self.model = model or (choose_served(models, policy, self.url) if policy else next(iter(models)))
        self.max_model_length = next(row for row in served if row["id"] == self.model).get("max_model_len")

    async def check_tokens(self, text: str, ids: list[int]) -> None:
        """Compare what the server's tokenizer makes of `text`, without special tokens, with the policy's `ids`; a line
        says where the server does not tell. Raises BadInput where they differ."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                found = (await self.post_once("/tokenize", body))["tokens"]
        except (ServerGone, aiohttp.ClientError, TimeoutError, OSError, KeyError, TypeError, ValueError):
            log.warning("%s does not say how it tokenises: that it has the policy's tokenizer is taken on trust",
                        self.url)  # fmt: skip
            return
        if found != ids:
            first = next((k for k, (a, b) in enumerate(zip(found, ids, strict=False)) if a != b), 0)
            raise BadInput(
                f"{self.url} has another tokenizer than policy: of one text it makes {len(found)} tokens "
                f"(from token {first} on {found[first : first + 4]}), policy {len(ids)} ({ids[first : first + 4]}): "
                "serve the policy, or set policy= to what is served"
            )

    async def close(self) -> None:
        """End what still waits for the server."""
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.gather(self._recovery, return_exceptions=True)

    def _key_refused(self, status: int) -> BadInput:
        has_key = "Authorization" in self.session.headers
        remedy = "the key in it is refused" if has_key else "it is not set: export it (never put it in a config)"
        return BadInput(f"{self.url} wants an API key (HTTP {status}), read from {self.key_variable}: {remedy}")

    async def get_json(self, path: str) -> Any:
        """GET a JSON document."""
        async with self.session.get(f"{self.url}{path}") as response:
            response.raise_for_status()
            return await response.json()

    async def post_once(self, path: str, body: dict[str, Any]) -> Any:
        """POST without retries. Raises ServerGone on any answer but 200."""
        async with self.session.post(f"{self.url}{path}", json=body) as response:
            text = await response.text()
            if response.status != 200:
                raise ServerGone(f"{self.url}{path} answered {response.status}: {text[:300]}")
            return json.loads(text) if text.strip() else None

    async def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST a sampling request, once.

        Raises Transient on what may work the next time, Refused on a request that never will, BadInput on what no
        request of this run will get past (the key, the model).
        """
        try:
            async with self.session.post(f"{self.url}{path}", json=body) as response:
                raw, status, headers = await response.read(), response.status, response.headers
        except _BROKEN as error:
            raise Transient(repr(error), is_broken=True) from None
        except aiohttp.ClientError as error:
            raise Transient(str(error)) from None
        shown = raw[:300].decode(errors="replace")
        if status in RETRIED or status >= 500:
            raise Transient(f"HTTP {status}: {shown}", retry_after(headers))
        if status in (401, 403):
            raise self._key_refused(status)
        if status == 404:
            raise BadInput(f"{self.url}{path} answered 404: {shown}: is it a vLLM server that serves '{self.model}'?")
        if status != 200:
            raise Refused(f"HTTP {status}: {shown}")
        try:
            answer: dict[str, Any] = json.loads(raw)
        except ValueError:
            raise Transient("the answer is not JSON") from None
        return answer

    async def counters(self) -> EngineCounters | None:
        """Return the engine's counters, None where the server shows none (or does not answer)."""
        timeout = aiohttp.ClientTimeout(total=_GLANCE_SECONDS)
        try:
            async with self.session.get(f"{self.url}/metrics", timeout=timeout) as response:
                return parse_counters(await response.text()) if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None

    async def is_working(self, seconds: float, has_to_answer: bool = False) -> bool:
        """Say whether, within `seconds`, the engine samples one token for us or (unless `has_to_answer`) its count of
        generated tokens grows: a busy one may let our question wait."""
        deadline = asyncio.get_running_loop().time() + seconds
        before = None if has_to_answer else await self.counters()
        probe = asyncio.create_task(self._sample_one_token())
        try:
            while True:
                left = deadline - asyncio.get_running_loop().time()
                await asyncio.wait({probe}, timeout=max(0.0, min(1.0, left)))
                if probe.done() and probe.result():
                    return True
                now = await self.counters() if before is not None else None
                if before is not None and now is not None and now.generated_tokens > before.generated_tokens:
                    return True
                if left <= 0:
                    return False
                if probe.done():
                    await asyncio.sleep(min(0.5, left))
                    probe = asyncio.create_task(self._sample_one_token())
        finally:
            probe.cancel()
            await asyncio.gather(probe, return_exceptions=True)

    async def _sample_one_token(self) -> bool:
        """True also for an answer that only puts us off (429)."""
        body = {"model": self.model, "prompt": [0] * 16, "n": 1, "max_tokens": 1, "temperature": 0.0}
        try:
            async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
                raw = await response.read()
                return response.status < 500 and (response.status != 200 or bool(json.loads(raw)["choices"]))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError):
            return False

    async def wait_until_back(self, reason: str) -> None:
        """Return when the server answers; one question at a time for all who wait.

        Raises ServerGone after `patience_seconds`.
        """
        if self._recovery is None or self._recovery.done():
            self._recovery = asyncio.create_task(self._recover(reason))
            self._recovery.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._recovery)

    async def _recover(self, reason: str) -> None:
        deadline = asyncio.get_running_loop().time() + self.patience_seconds
        while True:
            try:
                async with asyncio.timeout(_GLANCE_SECONDS):
                    await self.get_json("/v1/models")
                return
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
                if asyncio.get_running_loop().time() > deadline:
                    raise ServerGone(
                        f"{self.url} has not answered for {self.patience_seconds:g} s ({reason})"
                    ) from None
                await asyncio.sleep(0.5)
