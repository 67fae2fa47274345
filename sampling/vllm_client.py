"""Running vLLM servers over HTTP: token ids in and out, or chat turns in; retries in one place.

What a request can meet: 429, 5xx, broken connections and garbled bodies are tried again with full-jitter
back-off, not before the moment that Retry-After names; other 4xx are final for the row, and so are failures that
stay while the server answers others; a server that stays away for `patience_seconds` is gone.

With several servers a problem always goes to the same one, so that its prefix cache serves all states of the
problem: each has a rank for every problem, a hash of its address and the problem's id (rendezvous hashing), and the
first that lives is asked. A server that is gone or frozen is left out for the rest of the run, which a log line says;
its problems move to the next of their ranks and no others do. The run ends when no server is left. Where `needs_all`
is set (they follow a policy that changes) it ends when one is gone.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import random
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from espalier.data.records import BadInput
from espalier.data.timeline import LOST
from espalier.sampling.client import NotAnswered, Refused, Sample, SampleRequest, SamplingParams, ServerGone
from espalier.sampling.completion_api import PATHS, Transient, parse_samples, write_request
from espalier.sampling.connection import Connection
from espalier.sampling.engine_counters import EngineCounters
from espalier.sampling.engine_work import EngineWork, WorkSpan
from espalier.sampling.request_batching import Gathering

log = logging.getLogger("sample")

_LONGEST_WAIT = 60.0
_MAX_GIVEN_UP = 16
_FEWEST_REQUESTS = 16  # in flight, whatever shares them


class _Server:
    """A server of several: its connection, its share of the prompts in flight, and why it was left out."""

    def __init__(self, connection: Connection, concurrency: int, prompts_per_request: int):
        self.connection = connection
        self.gathering = Gathering(connection.ask, prompts_per_request)
        self.room = asyncio.Semaphore(concurrency) if concurrency else contextlib.nullcontext()
        self.work = EngineWork(connection.url, urlsplit(connection.url).hostname or "")
        self.num_waiting = 0
        self.last_sign = 0.0
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()


class VLLMClient:
    """Args: `base_url` such as `http://127.0.0.1:8000`, or a list of them; times in seconds; `model` null takes the
    served one. `endpoint` is completions (ids in and out) or chat (the prompt's turns in, ids out; the server's chat
    template must write the very ids of the prompt). `in_flight_each` bounds the prompts at one server, 0 does not.
    Prompts that are asked for at once share an HTTP request, at most `prompts_per_request` and a sixteenth of
    `in_flight_each` (an answer waits for the slowest of its prompts); not with seeds or chats.
    `silence_seconds`: how long a server may owe answers before it is asked for a sign of life, which it has
    `probe_seconds` to give; without one it is gone. `key_variable` names the environment variable of the servers'
    API key, if they want one.
    """

    def __init__(
        self,
        base_url: str | Sequence[str] | None = None,
        model: str | None = None,
        endpoint: str = "completions",
        in_flight_each: int = 0,
        prompts_per_request: int = 8,
        request_seconds: float = 600.0,
        patience_seconds: float = 60.0,
        silence_seconds: float = 60.0,
        probe_seconds: float = 30.0,
        max_attempts: int = 12,
        key_variable: str = "VLLM_API_KEY",
        seed: int = 0,
    ):
        if endpoint not in PATHS:
            raise BadInput(f"client.endpoint must be completions or chat, got '{endpoint}'")
        self.base_url = base_url
        self.model = model
        self.endpoint = endpoint
        self.in_flight_each = in_flight_each
        most = in_flight_each // _FEWEST_REQUESTS if in_flight_each else prompts_per_request
        self.prompts_per_request = max(1, min(prompts_per_request, most))
        self.request_seconds = request_seconds
        self.patience_seconds = patience_seconds
        self.silence_seconds = silence_seconds
        self.probe_seconds = probe_seconds
        self.max_attempts = max_attempts
        self.key_variable = key_variable
        self.seed = seed
        self.needs_all = False  # whether a server that is gone ends the run though others live
        self.max_model_length: int | None = None
        self.num_shortened = 0
        self._num_given_up = 0
        self._probe: tuple[str, list[int]] | None = None
        self._policy = ""
        self._session: aiohttp.ClientSession | None = None
        self._servers: list[_Server] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.counted: EngineCounters | None = None
        self._counters_before: dict[str, EngineCounters] = {}

    @property
    def urls(self) -> list[str]:
        """The servers' addresses, in the order given."""
        given = [self.base_url] if isinstance(self.base_url, str) else list(self.base_url or [])
        return [url.rstrip("/") for url in given if url]

    def expect_tokens(self, text: str, ids: list[int]) -> None:
        """Have `open` compare what the servers' tokenizer makes of `text`, without special tokens, with `ids`."""
        self._probe = (text, ids)

    def expect_policy(self, policy: str) -> None:
        """Have `open` take the name that this model has at the servers, unless `model` says one, and refuse another."""
        self._policy = policy

    async def open(self) -> None:
        """Ask every server what it serves. Raises ServerGone where none answers, BadInput on a wrong model, key or
        tokenizer; one of several that does not answer is left out."""
        if not self.urls:
            raise ServerGone("no server to ask: set client.base_url=http://HOST:PORT, or a server to start")
        timeout = aiohttp.ClientTimeout(total=self.request_seconds, connect=5.0)
        key = os.environ.get(self.key_variable)
        # uvicorn drops a connection that was idle for 5 s: let go of it first, not while it is closed under a request
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0)
        headers = {"Authorization": f"Bearer {key}"} if key else None
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers)
        try:
            for url in self.urls:
                connection = Connection(url, self._session, self.patience_seconds, self.key_variable)
                self._servers.append(_Server(connection, self.in_flight_each, self.prompts_per_request))
            for server in self._servers:
                await self._open_one(server)
        except BaseException:
            await self.close()
            raise
        lengths = [server.connection.max_model_length for server in self._living()]
        self.max_model_length = min((length for length in lengths if length is not None), default=None)
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._follow_counters())]

    async def _open_one(self, server: _Server) -> None:
        connection = server.connection
        try:
            await connection.open(self.model, self._policy)
            if self._probe is not None:
                await connection.check_tokens(*self._probe)
        except ServerGone as error:
            self._leave_out(server, error)
            return
        self.model = self.model or connection.model
        before = await connection.counters()
        if before is not None:
            self._counters_before[connection.url] = before

    async def close(self) -> None:
        """Close the connections; the engines' counts are read once more."""
        if self._tasks:
            await self.read_counters()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for server in self._servers:
            await server.gathering.close()
            await server.connection.close()
            server.gone.cancel()
        self._servers, self._tasks = [], []
        if self._session is not None:
            await self._session.close()
            self._session = None

    def connection(self, number: int) -> Connection:
        """Return the connection to server `number` (as `urls` counts them), for its own controls."""
        if not self._servers:
            raise RuntimeError("VLLMClient.open() has not been called")
        return self._servers[number].connection

    # --- which server -------------------------------------------------------------------------------------------

    def _ranked(self, problem_id: str) -> list[int]:
        """Return the servers' numbers in the order in which this problem goes to them: a hash of address and
        problem."""

        def weight(number: int) -> bytes:
            return hashlib.sha256(f"{self.urls[number]}\n{problem_id}".encode(errors="surrogatepass")).digest()

        return sorted(range(len(self.urls)), key=weight)

    def lane_of(self, request: SampleRequest) -> int:
        """Return the number of the server that the request goes to while all live."""
        return self._ranked(request.problem_id or request.id)[0] if len(self.urls) > 1 else 0

    def _server_of(self, request: SampleRequest) -> _Server:
        for server in self._servers if self.needs_all else []:
            if server.gone.done():
                raise ServerGone(server.gone.result())
        for number in self._ranked(request.problem_id or request.id) if len(self._servers) > 1 else [0]:
            if not self._servers[number].gone.done():
                return self._servers[number]
        raise ServerGone(f"no server is left of {len(self._servers)}: {self._servers[-1].gone.result()}")

    def _living(self) -> list[_Server]:
        return [server for server in self._servers if not server.gone.done()]

    def _leave_out(self, server: _Server, error: ServerGone) -> None:
        """No more requests for this server; raises the error where it was the last, or none may be missing."""
        if server.gone.done() and not self.needs_all:
            return
        if not server.gone.done():
            server.gone.set_result(str(error))
            server.work.mark(LOST)
        left = self._living()
        if not left or self.needs_all:
            raise error
        log.warning("%s: left out, its problems go to the other %d", error, len(left))

    async def _watch(self) -> None:
        """Leave out a server that owes answers and gives no sign of life."""
        while True:
            await asyncio.sleep(min(1.0, self.silence_seconds / 4))
            now = asyncio.get_running_loop().time()
            for server in self._living():
                if server.num_waiting and now - server.last_sign > self.silence_seconds:
                    if await server.connection.is_working(self.probe_seconds):
                        server.last_sign = asyncio.get_running_loop().time()
                        continue
                    with contextlib.suppress(ServerGone):  # those who wait for it learn it by `gone`
                        self._leave_out(server, ServerGone(
                            f"{server.connection.url} gave no answer for {self.silence_seconds:g} s, nor one token for "
                            f"a sign of life in {self.probe_seconds:g} s"))  # fmt: skip

    def take_work(self) -> list[WorkSpan]:
        """Return what the servers did since the last call."""
        return [span for server in self._servers for span in server.work.take()]

    async def is_working(self) -> bool:
        """Say whether any server gives a sign of life within `probe_seconds`."""
        asked = [server.connection.is_working(self.probe_seconds) for server in self._living()]
        return any(await asyncio.gather(*asked))

    # --- requests -----------------------------------------------------------------------------------------------

    def body(self, request: SampleRequest, params: SamplingParams) -> dict[str, Any]:
        """Return the JSON of one request; `max_tokens` shrinks to the room there is (counted in `num_shortened`).
        Raises Refused where the prompt leaves no room for an answer."""
        room = None if self.max_model_length is None else self.max_model_length - len(request.prompt_ids)
        if room is not None and room < 1:
            length = len(request.prompt_ids)
            raise Refused(f"prompt of {length} tokens leaves no room in a window of {self.max_model_length}")
        self.num_shortened += room is not None and room < params.max_tokens
        seed = request.seed(self.seed) if params.is_seeded else None
        return {"model": self.model, **write_request(self.endpoint, request, params, room, seed)}

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        """Return `params.n` samples; tries again what is worth it, at another server where one is gone."""
        _ = self.connection(0)
        body = self.body(request, params)
        while True:
            server = self._server_of(request)
            try:
                async with server.room:
                    if not server.num_waiting:
                        server.last_sign = asyncio.get_running_loop().time()
                    server.num_waiting += 1
                    server.work.begin()
                    samples: list[Sample] | None = None
                    try:
                        samples = await self._unless_gone(server, self._sample_at(server, body, request, params))
                        return samples
                    finally:
                        server.num_waiting -= 1
                        server.work.end(samples)
            except ServerGone as error:
                self._leave_out(server, error)

    async def _unless_gone(self, server: _Server, asked: Any) -> list[Sample]:
        """Return what `asked` returns; raises ServerGone as soon as the server is left out (one that hangs never
        answers)."""
        asking = asyncio.ensure_future(asked)
        try:
            waited: list[asyncio.Future[Any]] = [asking, server.gone]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
            raise ServerGone(server.gone.result())
        finally:
            asking.cancel()

    async def _sample_at(
        self, server: _Server, body: dict[str, Any], request: SampleRequest, params: SamplingParams
    ) -> list[Sample]:
        connection, num_before = server.connection, server.connection.num_answers
        reason = ""
        for attempt in range(self.max_attempts):
            try:
                answer = await server.gathering.ask(PATHS[self.endpoint], body, is_alone=attempt > 0)
                samples = parse_samples(self.endpoint, answer, request, params)
            except Transient as error:
                reason = str(error)
                if error.is_broken:
                    await connection.wait_until_back(reason)
                await asyncio.sleep(_pause(attempt, error.seconds))
            else:
                connection.num_answers += 1
                server.last_sign = asyncio.get_running_loop().time()
                return samples
        failed = f"{self.max_attempts} attempts failed, the last with: {reason}"
        self._num_given_up += 1
        if not connection.num_answers and self._num_given_up > _MAX_GIVEN_UP:
            raise ServerGone(f"{connection.url} answered none of this run's requests: {failed}")
        # a request that fails at a server that answers others is the row's failure, not the server's
        if connection.num_answers > num_before or await connection.is_working(self.probe_seconds / 3, True):
            raise NotAnswered(failed)
        raise ServerGone(f"{connection.url}: {failed}")

    # --- the engines' own counts --------------------------------------------------------------------------------

    async def _follow_counters(self) -> None:
        while self._counters_before:
            await asyncio.sleep(5.0)
            await self.read_counters()

    async def read_counters(self) -> None:
        """Set `counted` to what the servers' engines counted since `open`; as it was where none shows its counters."""
        total: EngineCounters | None = None
        for server in self._living():
            before = self._counters_before.get(server.connection.url)
            now = await server.connection.counters() if before is not None else None
            if before is not None and now is not None:
                total = (total or EngineCounters()) + (now - before)
        self.counted = total or self.counted

    @property
    def cache_hit_rate(self) -> float | None:
        """The share of prompt tokens served by the prefix cache since `open`, as last read; None where unknown."""
        return self.counted.hit_rate if self.counted is not None and self.counted.cache_queries else None


def _pause(attempt: int, asked: float | None) -> float:
    """Return seconds until the next try: full jitter under a doubling bound, and not before the seconds that the server
    asked for (None: none), of which a minute counts at most."""
    own = random.uniform(0, min(8.0, 0.25 * 2**attempt))
    return own if asked is None else min(asked, _LONGEST_WAIT) + random.uniform(0, min(1.0, 0.1 * asked) + 0.05)
