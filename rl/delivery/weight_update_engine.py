"""Running engines that take new weights: vLLM's server over HTTP, and vLLM without a server."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp

from espalier.rl.delivery.receipts import StaleWeights
from espalier.rl.probes.checks import CACHE, crashed
from espalier.sampling.client import LOOPBACK, ServerGone, TakesWeights
from espalier.sampling.connection import Connection
from espalier.sampling.vllm_client import VLLMClient
from espalier.sampling.weight_chain import Invitation

R = TypeVar("R")
_MAX_ATTEMPTS = 3
_DYING_SECONDS = 2.0
_PROMPT_SIZES = (34, 66, 130, 258, 514)  # the usual blocks, and two tokens


class CacheProbe(ABC):
    """Finds out how long a prompt must be for the prefix cache to keep a block of it, and asks for such."""

    def __init__(self) -> None:
        self._num_asked: int | None = None  # tokens of the shortest prompt that the prefix cache keeps a block of

    async def cached_tokens(self, ids: list[int]) -> int | None:
        """Return one token after `ids`, repeated to the length of a block at least, whatever a block is here."""
        if self._num_asked is None:
            self._num_asked = await self._find_size(ids)
        return await self._cached_of(ids, self._num_asked)

    async def _find_size(self, ids: list[int]) -> int:
        """Return the first of `_PROMPT_SIZES` of which a block is cached when it is asked again; the window where none
        is."""
        window = max(len(ids), self._window - 2)
        for size in _PROMPT_SIZES:
            if size < window:
                await self._cached_of(ids, size)
                if await self._cached_of(ids, size):
                    return size
        return window

    async def _cached_of(self, ids: list[int], size: int) -> int | None:
        return await self._cached((ids * (size // max(1, len(ids)) + 1))[:size])

    @property
    @abstractmethod
    def _window(self) -> int:
        """The longest sequence that the engine takes, in tokens."""

    @abstractmethod
    async def _cached(self, prompt: list[int]) -> int | None:
        """Return how many of the prompt's tokens came from the prefix cache; None where the engine does not say."""


class VLLMEngine(CacheProbe):
    """A vLLM server started with has_controls=true: server `number` of the client's, which must be open when it is
    asked. `check_server` raises where its process has ended. No other one is started in its place."""

    process = 0
    is_coming = False

    def __init__(self, client: VLLMClient, check_server: Callable[[], None] = lambda: None, number: int = 0):
        super().__init__()
        self.client = client
        self.check_server = check_server
        self.number = number

    @property
    def name(self) -> str:
        """Its address."""
        return self.client.urls[self.number]

    @property
    def host(self) -> str:
        """Of its address."""
        return urlsplit(self.name).hostname or LOOPBACK

    async def worker_ranks(self) -> list[str]:
        """POST /collective_rpc worker_rank. Raises ServerGone, StaleWeights where the server has no such method."""
        return await self._on_workers("worker_rank", str)

    async def join_weights(self, invitation: Invitation, first_rank: int) -> None:
        """POST /collective_rpc join_weights. Raises ServerGone."""
        await self._on_workers("join_weights", dict, invitation=invitation.as_dict(), first_rank=first_rank)

    async def load(self, key: str, number: int) -> list[dict[str, str]] | None:
        """POST /collective_rpc receive_weights, then /reset_prefix_cache. Raises ServerGone, StaleWeights."""
        receipts = await self.receive(key, number)
        await self.reset_cache()
        return receipts

    async def receive(self, key: str, number: int) -> list[dict[str, str]]:
        """Have each worker read that delivery; return their receipts. Raises StaleWeights on an answer that is none."""
        return await self._on_workers("receive_weights", dict, key=key, number=number)

    async def _on_workers(self, method: str, kind: type[R], **arguments: Any) -> list[R]:
        """Return what the method of each worker returns. Raises StaleWeights where that is not of this kind."""
        answer = await self._post("/collective_rpc", {"method": method, "kwargs": arguments})
        found = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(found, list) or not found or not all(isinstance(one, kind) for one in found):
            raise StaleWeights(f"{self.name} took a delivery and gave no receipt: it was not started with "
                               "--worker-extension-cls espalier.sampling.weight_receipt.ReceivesWeights")  # fmt: skip
        return found

    async def reset_cache(self) -> None:
        """Empty the prefix cache; refused while a request is running.

        Raises StaleWeights where the server does not say that it did.
        """
        answer = await self._post("/reset_prefix_cache", {})
        if not answer or not answer.get("success"):
            raise StaleWeights(f"{self.name} did not empty its prefix cache: it answered {answer}", CACHE)

    async def stamp(self, version: str) -> None:
        """POST /update_weight_version."""
        await self._post("/update_weight_version", {"new_version": version})

    async def served_version(self) -> str:
        """GET /weight_info; "default" on a server that was never stamped."""
        found = await self._ask("/weight_info", lambda path: self._connection.get_json(path))
        return str(found.get("weight_version")) if isinstance(found, dict) else ""

    @property
    def _connection(self) -> Connection:
        return self.client.connection(self.number)

    @property
    def _window(self) -> int:
        return self.client.max_model_length or 0

    async def _cached(self, prompt: list[int]) -> int | None:
        body = {"model": self.client.model, "prompt": prompt, "max_tokens": 1}
        details = (await self._post("/v1/completions", body))["usage"].get("prompt_tokens_details")
        return None if details is None else int(details["cached_tokens"] or 0)

    async def prompt_logprobs(self, ids: list[int]) -> list[float]:
        """Make one request with `prompt_logprobs`, which bypasses the prefix cache."""
        if self._window:
            ids = ids[: self._window - 1]
        body = {"model": self.client.model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
        rows = (await self._post("/v1/completions", body))["choices"][0]["prompt_logprobs"]
        return [float(row[str(token)]["logprob"]) for token, row in zip(ids[1:], rows[1:], strict=True)]

    async def keep_random_state(self) -> None:
        """POST /collective_rpc keep_random_state."""
        await self._post("/collective_rpc", {"method": "keep_random_state"})

    async def put_random_state_back(self) -> None:
        """POST /collective_rpc put_random_state_back."""
        await self._post("/collective_rpc", {"method": "put_random_state_back"})

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        return await self._ask(path, lambda path: self._connection.post_once(path, body))

    async def _ask(self, path: str, call: Callable[[str], Awaitable[Any]]) -> Any:
        """Tried again, which is harmless here (a delivery that came is answered by its receipt): a connection idle
        during the update is closed by now."""
        gone: ServerGone | None = None
        has_answered = False
        for _ in range(_MAX_ATTEMPTS):
            try:
                return await call(path)
            except aiohttp.ClientResponseError as error:  # an answer, and none of success
                gone, has_answered = ServerGone(f"{self.name}{path} answered {error.status}"), True
                break
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                gone = ServerGone(f"{self.name}{path} does not answer ({error!r})")
            except ValueError:
                gone, has_answered = ServerGone(f"{self.name}{path} answered what is no JSON"), True
                break
            except ServerGone as error:
                gone, has_answered = error, True
                break
        assert gone is not None
        await asyncio.sleep(_DYING_SECONDS)  # a server whose engine died answers 500 first, and ends then
        raise crashed(gone, self.check_server, has_answered)


class OwnEngine(CacheProbe):
    """vLLM without a server, through its client (which must be open). It takes weights in the middle of its requests:
    they wait, compute what they had anew by the new weights, and say which version drew which of their tokens."""

    def __init__(self, client: TakesWeights):
        super().__init__()
        self.client = client

    @property
    def name(self) -> str:
        """As its client calls it."""
        return self.client.name

    @property
    def process(self) -> int | None:
        """As its client says."""
        return self.client.process

    @property
    def is_coming(self) -> bool:
        """As its client says."""
        return self.client.is_coming

    @property
    def host(self) -> str:
        """As its client says."""
        return self.client.host

    async def worker_ranks(self) -> list[str]:
        """Of the engine's workers. Raises ServerGone."""
        return await self._or_crash(self.client.worker_ranks())

    async def join_weights(self, invitation: Invitation, first_rank: int) -> None:
        """Have the engine's workers join. Raises ServerGone."""
        await self._or_crash(self.client.join_weights(invitation.as_dict(), first_rank))

    async def load(self, key: str, number: int) -> list[dict[str, str]] | None:
        """Return the receipts, after the prefix cache was emptied. Raises ServerGone, StaleWeights."""
        receipts = await self._or_crash(self.client.receive_weights(key, number))
        if not await self._or_crash(self.client.reset_cache()):
            raise StaleWeights(f"{self.name} did not empty its prefix cache", CACHE)
        return receipts

    async def pause(self) -> None:
        """Draw no token until `resume`. Raises ServerGone."""
        await self._or_crash(self.client.pause())

    async def resume(self) -> None:
        """Go on. Raises ServerGone."""
        await self._or_crash(self.client.resume())

    async def sleep(self) -> None:
        """As its client does. Raises ServerGone."""
        await self._or_crash(self.client.sleep())

    async def wake(self, part: str) -> None:
        """As its client does. Raises ServerGone."""
        await self._or_crash(self.client.wake(part))

    async def stamp(self, version: str) -> None:
        """The engine's own weight version."""
        await self._or_crash(self.client.stamp(version))

    async def served_version(self) -> str:
        """ "default" on an engine that was never stamped."""
        return await self._or_crash(self.client.served_version())

    @property
    def _window(self) -> int:
        return self.client.max_model_length

    async def _cached(self, prompt: list[int]) -> int | None:
        return await self._or_crash(self.client.cached_tokens(prompt))

    async def prompt_logprobs(self, ids: list[int]) -> list[float]:
        """Make one request with `prompt_logprobs`, which bypasses the prefix cache."""
        return await self._or_crash(self.client.prompt_logprobs(ids[: self._window - 1]))

    async def keep_random_state(self) -> None:
        """Of the engine's worker. Raises ServerGone."""
        await self._or_crash(self.client.keep_random_state())

    async def put_random_state_back(self) -> None:
        """Of the engine's worker. Raises ServerGone."""
        await self._or_crash(self.client.put_random_state_back())

    async def _or_crash(self, asked: Awaitable[R]) -> R:
        try:
            return await asked
        except ServerGone as error:
            raise crashed(error, lambda: None) from error.__cause__
