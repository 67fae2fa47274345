"""Several vLLM engines on this machine without a server, each in a process of its own, behind one client.

An engine's scheduling is one thread's work and its model another's: one engine on several cores leaves most of them
waiting in turn, several engines of few threads do not. Requests and samples go over a socket pair, a pickle each way a
request, with nothing decoded or sent before a sample is whole.

Requests of one problem go to one engine, whose prefix cache then serves them all; a new problem goes to the engine that
owes the fewest samples. Weights, stamps and proofs go to every engine. One that dies ends the run.
"""

import asyncio
import itertools
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from espalier.data.records import BadInput
from espalier.sampling.child_process import ChildProcess, engine_environment, numbered
from espalier.sampling.client import Sample, SampleRequest, SamplingParams, ServerGone, one_line
from espalier.sampling.engine_arguments import check_one_device, spelled
from espalier.sampling.engine_process import CANCEL, receive, send
from espalier.sampling.placement import deal_gpus, share_of_cores

_DYING_SECONDS = 5.0


def engine_name(number: int, num_engines: int) -> str:
    """What lines call an engine."""
    return f"engine {number} of {num_engines}"


class _Engine(ChildProcess):
    """One of them. `num_owed`: samples that it was asked for and has not given."""

    def __init__(self, name: str, log: str, program: str, settings: dict[str, Any]):
        super().__init__(name, log)
        self.program = program
        self.settings = settings
        self.num_owed = 0
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._gone = ""

    async def start(self, environment: dict[str, str], seconds: float) -> None:
        """Start it and wait until it has loaded the model. Raises ServerGone."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", self.program, str(theirs.fileno())]  # not what lies around here
            try:
                self.begin(command, environment, [theirs.fileno()])
            except BaseException:
                ours.close()
                raise
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._reading = asyncio.create_task(self._read(reader))
        _, opened = self._expect()
        send(self._writer, self.settings)
        await self._within(seconds, opened, "was not loaded")

    async def call(self, name: str, *arguments: Any) -> Any:
        """What the method of its `OneProcessEngine` returns. Raises Refused as that does; ServerGone where it failed or
        died."""
        number, future = self._expect()
        assert self._writer is not None
        send(self._writer, (number, name, arguments))
        try:
            return await future
        except asyncio.CancelledError:
            if self._waiting.pop(number, None) is not None and not self._gone:
                send(self._writer, (number, CANCEL, ()))
            raise

    async def ask(self, name: str, *arguments: Any, seconds: float) -> Any:
        """`call` with a deadline, which raises ServerGone."""
        return await self._within(seconds, self.call(name, *arguments), f"did not answer {name}")

    async def close(self) -> None:
        """End the process."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
        self._tell(f"{self.name} was closed")
        await asyncio.to_thread(self.stop)

    def _expect(self) -> tuple[int, asyncio.Future[Any]]:
        """The number of the next message, and what its answer will be."""
        if self._gone:
            raise ServerGone(self._gone)
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        return number, self._waiting[number]

    async def _within(self, seconds: float, asked: Any, failed: str) -> Any:
        try:
            return await asyncio.wait_for(asked, seconds)
        except TimeoutError:
            raise ServerGone(f"{self.name} {failed} in {seconds:g} s\nthe end of {self.log}:\n{self.tail()}") from None

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hand on what it answers until it dies; then all who wait get the error."""
        while True:
            try:
                number, value, error = await receive(reader)
            except EOFError:
                break
            except Exception as wrong:  # no message of ours
                self._tell(f"{self.name} answered what cannot be read: {one_line(wrong)}")
                return
            future = self._waiting.pop(number, None)
            if future is None or future.done():
                continue
            if isinstance(error, ServerGone):
                future.set_exception(ServerGone(f"{self.name}: {error}"))
            elif error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)
        if self.process is not None:
            await asyncio.to_thread(self._wait)
        self._tell(self.death_message())

    def _wait(self) -> None:
        """Until its end is known."""
        assert self.process is not None
        try:
            self.process.wait(_DYING_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(_DYING_SECONDS)

    def _tell(self, gone: str) -> None:
        self._gone = gone
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ServerGone(gone))
        self._waiting.clear()


class DataParallelEngines:
    """Args: `model` folder; `num_engines` processes, each on one device: a GPU of the visible ones, or of `gpus` among
    them (`gpus_each` 0: all see all; `sampling.placement.deal_gpus`), else `num_threads` threads (0: an equal share of
    the cores) and a cache of `kv_cache_gib`; `options` are vLLM's engine arguments. `log` gets the engine's number
    before its ending. Times in seconds: to load the model, to answer a question about an engine, to give a sign of life
    while samples are owed.
    """

    program = "espalier.sampling.engine_process"

    def __init__(
        self,
        model: str = "",
        log: str = "",
        num_engines: int = 2,
        gpus_each: int | None = None,
        gpus: Sequence[int | str] = (),
        num_threads: int = 0,
        max_model_len: int = 512,
        dtype: str = "bfloat16",
        kv_cache_gib: int = 1,
        seed: int = 0,
        start_seconds: float = 300.0,
        control_seconds: float = 600.0,
        probe_seconds: float = 30.0,
        options: dict[str, Any] | None = None,
    ):
        if num_engines < 1:
            raise BadInput(f"client.num_engines must be at least 1, got {num_engines}")
        check_one_device(options or {})
        self.model = model
        self.log = log
        self.num_engines = num_engines
        self.devices = deal_gpus(num_engines, gpus_each, gpus, {}, "client")
        self.num_threads = num_threads
        self.kv_cache_gib = kv_cache_gib
        self.seed = seed
        self.start_seconds = start_seconds
        self.control_seconds = control_seconds
        self.probe_seconds = probe_seconds
        self.options = spelled(options or {})
        self.dtype = str(self.options.get("dtype", dtype))
        self.max_model_length = int(self.options.get("max_model_len", max_model_len))
        self._engines: list[_Engine] = []
        self._homes: dict[str, _Engine] = {}

    def settings(self, number: int) -> dict[str, Any]:
        """Of one engine's `OneProcessEngine`. Its random numbers are its own: a prompt may go to any engine."""
        return {
            "model": self.model,
            "max_model_len": self.max_model_length,
            "dtype": self.dtype,
            "seed": self.seed,
            "options": {"seed": self.seed + number, **self.options},
        }

    def environment(self, number: int) -> dict[str, str]:
        """Of one engine's process."""
        found = engine_environment(self.kv_cache_gib, self.devices[number])
        threads = self.num_threads or share_of_cores(self.num_engines)
        return found | {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

    async def open(self) -> None:
        """Start all at once; return when every one has loaded the model. Raises ServerGone; none stays behind then."""
        for number in range(self.num_engines):
            log = numbered(Path(self.log), number)
            name = engine_name(number, self.num_engines)
            self._engines.append(_Engine(name, str(log), self.program, self.settings(number)))
        starting = [
            asyncio.create_task(engine.start(self.environment(number), self.start_seconds))
            for number, engine in enumerate(self._engines)
        ]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await self.close()
            raise

    async def close(self) -> None:
        """End them all."""
        engines, self._engines, self._homes = self._engines, [], {}
        await asyncio.gather(*(engine.close() for engine in engines))

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        """`params.n` samples of one prompt. Raises Refused, ServerGone."""
        engine = self._engine_of(request.problem_id)
        engine.num_owed += params.n
        try:
            found: list[Sample] = await engine.call("sample", request, params)
            return found
        finally:
            engine.num_owed -= params.n

    async def is_working(self) -> bool:
        """Whether any engine says within `probe_seconds` that it samples."""
        asked = [engine.ask("is_working", seconds=self.probe_seconds) for engine in self._engines]
        return any(found is True for found in await asyncio.gather(*asked, return_exceptions=True))

    def _engine_of(self, problem_id: str) -> _Engine:
        if not self._engines:
            raise RuntimeError("DataParallelEngines.open() has not been called")
        home = self._homes.get(problem_id) or min(self._engines, key=lambda engine: engine.num_owed)
        if problem_id:
            self._homes[problem_id] = home
        return home

    # --- for a policy that changes ----------------------------------------------------------------------------------

    def engine(self, number: int) -> "LocalEngine":
        """Engine `number`, as one that takes new weights once the client is open."""
        return LocalEngine(self, number)

    async def ask(self, number: int, name: str, *arguments: Any) -> Any:
        """What that method of engine `number` returns. Raises ServerGone."""
        if not self._engines:
            raise RuntimeError("DataParallelEngines.open() has not been called")
        if name == "receive_weights":
            self._homes.clear()  # their caches are emptied next
        return await self._engines[number].ask(name, *arguments, seconds=self.control_seconds)


class LocalEngine:
    """One engine of several: a `sampling.client.TakesWeights`."""

    def __init__(self, client: DataParallelEngines, number: int):
        self.client = client
        self.number = number
        self.name = engine_name(number, client.num_engines)

    @property
    def max_model_length(self) -> int:
        """The longest sequence that it takes, in tokens."""
        return self.client.max_model_length

    async def receive_weights(self, folder: Path) -> list[dict[str, str]]:
        """Serve the weights in `folder`; the receipt of every worker. Raises ServerGone."""
        found: list[dict[str, str]] = await self.client.ask(self.number, "receive_weights", folder)
        return found

    async def reset_cache(self) -> bool:
        """Empty the prefix cache; whether it is."""
        return bool(await self.client.ask(self.number, "reset_cache"))

    async def stamp(self, version: str) -> None:
        """Remember the version of the weights."""
        await self.client.ask(self.number, "stamp", version)

    async def served_version(self) -> str:
        """The last stamp."""
        return str(await self.client.ask(self.number, "served_version"))

    async def cached_tokens(self, prompt: list[int]) -> int | None:
        """How many of the prompt's tokens came from the prefix cache; None where the engine does not say."""
        found: int | None = await self.client.ask(self.number, "cached_tokens", prompt)
        return found

    async def prompt_logprobs(self, ids: list[int]) -> list[float]:
        """The log-prob of every token but the first, without the prefix cache."""
        found: list[float] = await self.client.ask(self.number, "prompt_logprobs", ids)
        return found
