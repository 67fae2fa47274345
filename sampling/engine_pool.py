"""Several vLLM engines behind one client, each in a process of its own: which gets what, and what becomes of it when
one of them is gone. Where the processes are is the affair of `sampling.data_parallel_engines` (this machine) and
`sampling.ray_engines` (the nodes of a cluster).

An engine's scheduling is one thread's work and its model another's: one engine on several cores leaves most of them
waiting in turn, several engines of few threads do not. Requests and samples go over a socket, a pickle each way a
request, with nothing decoded or sent before a sample is whole.

Requests of one problem go to one engine, whose prefix cache then serves them all; a new problem goes to the engine that
owes the fewest samples. Weights, stamps and proofs go to every engine.

An engine that dies, fails or hangs is lost, which a line of the log says, and its problems go to the others under the
same ids and seeds; another one is started in its place, `max_replaced` times in a run. A request whose engine died
under it is asked of another twice at most: one that kills engines does not kill them all. The run ends when no engine
is left and none is being started.

Engines that share their devices with a learner (`sleeps`) let go of their memory when they are put to sleep, and take
it again for the next delivery. One that is lost meanwhile is started anew only then: its device is the learner's.

Where they follow a policy that changes, an engine has no request before it has the weights of now: one that was started
in another's place waits for the next delivery. Where none is left that has them the run ends, unless they are on their
way (`pause` to `resume`).

Engines of a model with a head at every token (`scores_tokens`, set before `open`) give logits of whole rows instead of
samples (`sampling.engine_scorer`).
"""

import asyncio
import logging
import zlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from espalier.data.records import BadInput
from espalier.data.steps import TokenRow
from espalier.data.timeline import BACK, LOST
from espalier.sampling.child_engine import EngineConnection, Silent
from espalier.sampling.child_process import CannotStart
from espalier.sampling.client import CACHE, WEIGHTS, HasEngines, Sample, SampleRequest, SamplingParams, ServerGone
from espalier.sampling.engine_arguments import check_one_engine, spelled
from espalier.sampling.engine_work import EngineWork, WorkSpan
from espalier.sampling.pooled_engine import PooledEngine

log = logging.getLogger("sample")

_MAX_MOVES = 2
_GLANCE_SECONDS = 0.05
_ROOM_SECONDS = 1.0


def engine_name(number: int, num_engines: int) -> str:
    """Return what lines call an engine."""
    return f"engine {number} of {num_engines}"


@dataclass(eq=False)
class EnginePool(HasEngines):
    """Args: `model` folder; `num_engines` processes, each with its `options` (vLLM's engine arguments) and a cache of
    `kv_cache_gib`. `log` gets the engine's number before its ending. Times in seconds: to load the model, to answer a
    question about an engine; how long an engine may owe samples before it is asked for a sign of life
    (`silence_seconds`), and has for it (`probe_seconds`). `max_replaced`: how many lost engines are started anew.
    """

    program = "espalier.sampling.engine_process"
    model: str = ""
    log: str = ""
    num_engines: int = 2
    max_model_len: int = 512
    dtype: str = "bfloat16"
    kv_cache_gib: int = 1
    seed: int = 0
    start_seconds: float = 300.0
    control_seconds: float = 600.0
    silence_seconds: float = 180.0
    probe_seconds: float = 30.0
    max_replaced: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_engines < 1:
            raise BadInput(f"client.num_engines must be at least 1, got {self.num_engines}")
        self.options = {name: value for name, value in spelled(self.options or {}).items() if value is not None}
        check_one_engine(self.options)
        self.dtype = str(self.options.get("dtype", self.dtype))
        self.max_model_length = int(self.options.get("max_model_len", self.max_model_len))
        self.follows_policy = False
        self.scores_tokens = False
        self.sleeps = False
        self.num_shortened = 0
        self.num_moved = self.num_lost_samples = self.num_lost_tokens = 0
        self.num_started = [1] * self.num_engines  # processes of each engine so far
        self._engines: list[Any] = []
        self._lost: list[EngineConnection] = []
        self._homes: dict[str, EngineConnection] = {}
        self._watching: list[asyncio.Task[None]] = []
        self._ending: list[asyncio.Task[Any]] = []
        self._replacing: dict[int, asyncio.Task[None]] = {}  # by the number of the engine, started anew
        self._starting: set[int] = set()  # of these, those that have room
        self._held: set[int] = set()  # those that are started when the learner is done with their device
        self._may_start = asyncio.Event()
        self._may_start.set()
        self._paused: set[int] = set()
        # Of the delivery at hand: whether the first engine that was lost in it is replaced; None: none was. Those that
        # fail because of it are one loss with it.
        self._broken: bool | None = None
        self._num_replaced = 0
        self._work = [EngineWork(engine_name(number, self.num_engines)) for number in range(self.num_engines)]

    @abstractmethod
    def make_engine(self, number: int) -> EngineConnection:
        """Return engine `number`, which is not started yet."""

    @abstractmethod
    def environment(self, number: int) -> dict[str, str]:
        """Return the environment variables of one engine's process."""

    def settings(self, number: int) -> dict[str, Any]:
        """Of one engine's `OneProcessEngine`. Its random numbers are its own: a prompt may go to any engine."""
        sleeps = {"enable_sleep_mode": True} if self.sleeps else {}
        return {
            "model": self.model,
            "max_model_len": self.max_model_length,
            "dtype": self.dtype,
            "seed": self.seed,
            "scores_tokens": self.scores_tokens,
            "options": {"seed": self.seed + number, **self.options, **sleeps},
        }

    async def open(self) -> None:
        """Start all at once; return when every one has loaded the model. Raises CannotStart; none stays behind then."""
        log.info("starting %d vLLM engine%s for %s", self.num_engines, "s" * (self.num_engines > 1), self.model)
        self._engines = [self.make_engine(number) for number in range(self.num_engines)]
        starting = [
            asyncio.create_task(engine.start(self.environment(number), self.start_seconds))
            for number, engine in enumerate(self._engines)
        ]
        try:
            await asyncio.gather(*starting)
        except BaseException as error:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await self.close()
            if isinstance(error, ServerGone):
                raise CannotStart(str(error)) from None
            raise
        times = (self.silence_seconds, self.probe_seconds)
        self._watching = [asyncio.create_task(engine.watch(*times)) for engine in self._engines]

    async def close(self) -> None:
        """End them all."""
        engines, self._engines = self._engines, []
        self._lost.clear()
        self._homes.clear()
        for task in (*self._watching, *self._replacing.values()):
            task.cancel()
        await asyncio.gather(*self._watching, *self._replacing.values(), return_exceptions=True)
        self._replacing.clear()
        self._starting.clear()
        self._held.clear()
        self._may_start.set()
        await asyncio.gather(*self._ending, return_exceptions=True)
        self._watching, self._ending = [], []
        await asyncio.gather(*(engine.close() for engine in engines))

    def lane_of(self, request: SampleRequest) -> int:
        """Return one of as many lanes as there are engines: requests of a problem are in one, and several problems are
        always in flight at once. Which engine takes them is decided when they are asked."""
        return zlib.crc32((request.problem_id or request.id).encode(errors="surrogatepass")) % self.num_engines

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        """Return `params.n` samples of one prompt; of another engine where one is gone. Raises Refused, ServerGone."""
        self.num_shortened += 0 < self.max_model_length - len(request.prompt_ids) < params.max_tokens
        what = f"request '{request.id}'"
        found: list[Sample] = await self._ask_one(what, request.problem_id, params.n, "sample", request, params)
        return found

    async def token_logits(self, rows: Sequence[TokenRow]) -> list[list[list[float]]]:
        """Return `OfflineClient.token_logits` of every row, all by the engine that owes the fewest; of another engine
        where one is gone. Raises Refused, ServerGone."""
        what = f"{len(rows)} rows from {rows[0].name} on"
        found: list[list[list[float]]] = await self._ask_one(what, "", len(rows), "logits_of_rows", rows)
        return found

    async def _ask_one(self, what: str, problem_id: str, num_owed: int, name: str, *arguments: Any) -> Any:
        """Return what that method of one engine returns, of another engine where one is gone."""
        num_lost = 0
        while True:
            engine = await self._engine_of(problem_id)
            work = self._work_of(engine)
            samples: list[Sample] | None = None
            engine.num_owed += num_owed
            work.begin()
            try:
                found = await engine.call(name, *arguments)
                samples = found if name == "sample" else None
                return found
            except ServerGone as error:
                num_lost += 1
                if engine not in self._lost:
                    raise
                if name == "sample":
                    self._count_lost(work, num_owed, engine.drawn.get(arguments[0].id, 0))
                if num_lost > _MAX_MOVES:
                    raise ServerGone(
                        f"{num_lost} engines were gone while they had {what}, which is asked of no other: {error}"
                    ) from None
                self.num_moved += 1
            finally:
                engine.num_owed -= num_owed
                work.end(samples)

    def _work_of(self, engine: EngineConnection) -> EngineWork:
        work = self._work[self._engines.index(engine)]
        work.node = engine.host
        return work

    def _count_lost(self, work: EngineWork, num_samples: int, num_tokens: int) -> None:
        """Count a request that its engine was lost under, and the tokens that are known to be drawn for it."""
        self.num_lost_samples += num_samples
        self.num_lost_tokens += num_tokens
        work.lose(num_samples, num_tokens)

    def take_work(self) -> list[WorkSpan]:
        """Return what the engines did since the last call."""
        return [span for work in self._work for span in work.take()]

    def own_tasks(self) -> set[asyncio.Task[Any]]:
        """Return what watches, ends and replaces engines."""
        return {*self._watching, *self._ending, *self._replacing.values()}

    async def is_working(self) -> bool:
        """Say whether any engine says within `probe_seconds` that it samples, or one is being started."""
        if self._starting:
            return True
        asked = [engine.is_working(self.probe_seconds) for engine in self._engines]
        return any(await asyncio.gather(*asked))

    async def _engine_of(self, problem_id: str) -> EngineConnection:
        self._check_open()
        while not (able := [engine for engine in self._engines if self._is_able(engine)]):
            if not (self._paused if self.follows_policy else self._starting):
                serves = " that has the policy's weights" if self.follows_policy else ""
                why = f": {self._lost[-1].gone}" if self._lost else ""
                raise ServerGone(f"no engine is left of {self.num_engines}{serves}{why}")
            await asyncio.sleep(_GLANCE_SECONDS)
        home = self._homes.get(problem_id)
        if home is None or home not in able:
            home = min(able, key=lambda engine: engine.num_owed)
        if problem_id:
            self._homes[problem_id] = home
        return home

    def _is_able(self, engine: EngineConnection) -> bool:
        return not engine.gone and (engine.has_weights or not self.follows_policy)

    def _lose(self, engine: EngineConnection) -> None:
        """Say who takes over, end what is left of it, and start another one in its place."""
        if engine not in self._engines:
            return  # being closed
        self._lost.append(engine)
        self._work_of(engine).mark(LOST)
        is_further = bool(self._paused) and self._broken is not None
        is_replaced = bool(self._broken) if is_further else self._num_replaced < self.max_replaced
        if self._paused and not is_further:
            self._broken = is_replaced
        num_living = sum(not other.gone for other in self._engines)
        kept = engine.log.with_suffix(f".lost-{self._num_replaced}.log") if is_replaced else engine.log
        if num_living or is_replaced:
            why = engine.gone.split("\n")[0]
            then = ", and another one is started" if is_replaced else ""
            log.warning("%s (%s): its problems go to the other %d%s", why, kept, num_living, then)
        if not is_replaced:
            self._ending.append(asyncio.create_task(asyncio.to_thread(engine.stop)))
            return
        self._num_replaced += not is_further
        number = self._engines.index(engine)
        self._starting.add(number)
        self._replacing[number] = asyncio.create_task(self._replace(number, kept))

    async def has_room(self, number: int) -> bool:
        """Say whether engine `number` could be started anew now."""
        return True

    async def _replace(self, number: int, kept: Path) -> None:
        """Start engine `number` anew, as soon as there is room for it; where it does not start it stays lost."""
        engine = self._engines[number]
        closing = asyncio.create_task(engine.close())
        self._ending.append(closing)  # it is ended to the end, also where the pool is closed meanwhile
        another: EngineConnection | None = None
        try:
            await asyncio.shield(closing)
            if engine.log.is_file():
                engine.log.replace(kept)
            await self._wait_for_room(number)
            await self._wait_for_device(number)
            another = self.make_engine(number)
            await another.start(self.environment(number), self.start_seconds)
        except BaseException as error:
            if another is not None:
                self._ending.append(asyncio.create_task(another.close()))
            if not isinstance(error, Exception):
                raise
            log.warning("%s was not replaced: %s", engine.name, str(error).split("\n")[0])
            return
        finally:
            self._starting.discard(number)
            self._held.discard(number)
            del self._replacing[number]
        log.info("%s is there in place of the lost one", another.name)
        self._engines[number] = another
        self._work_of(another).mark(BACK)
        self.num_started[number] += 1
        self._watching.append(asyncio.create_task(another.watch(self.silence_seconds, self.probe_seconds)))

    async def _wait_for_room(self, number: int) -> None:
        if await self.has_room(number):
            return
        self._starting.discard(number)  # nobody waits for what may never be there
        name = engine_name(number, self.num_engines)
        log.warning("there is no room for another %s: it is started when there is", name)
        while not await self.has_room(number):
            await asyncio.sleep(_ROOM_SECONDS)
        self._starting.add(number)

    async def _wait_for_device(self, number: int) -> None:
        if self._may_start.is_set():
            return
        self._starting.discard(number)
        self._held.add(number)
        await self._may_start.wait()
        self._held.discard(number)
        self._starting.add(number)

    def _check_open(self) -> None:
        if not self._engines:
            raise RuntimeError("open() has not been called")

    # --- for a policy that changes ----------------------------------------------------------------------------------

    def engine(self, number: int) -> PooledEngine:
        """Return engine `number`, as one that takes new weights once the client is open."""
        return PooledEngine(self, number, engine_name(number, self.num_engines))

    def host_of(self, number: int) -> str:
        """Return where engine `number` runs, as this machine reaches it."""
        self._check_open()
        return str(self._engines[number].host)

    async def ask(self, number: int, name: str, *arguments: Any) -> Any:
        """Return what that method of engine `number` returns. Raises ServerGone."""
        self._check_open()
        engine = self._engines[number]
        if name == "receive_weights":
            self._homes.clear()  # their caches are emptied next
            engine.is_taking = True  # it says nothing meanwhile
        if name == "pause":
            if number in self._paused:  # another delivery, behind one that broke
                self._paused.clear()
                self._broken = None
            self._paused.add(number)
        try:
            found = await engine.ask(name, *arguments, seconds=self.control_seconds)
        except Silent as error:
            engine.give_up(str(error))
            raise
        finally:
            engine.is_taking = False
        if name == "resume":
            engine.has_weights = True
            self._paused.clear()  # of those that are gone meanwhile too
            self._broken = None
        return found

    def process_of(self, number: int) -> int | None:
        """Return which process engine `number` is by now, None where it is gone."""
        is_gone = bool(self._engines and self._engines[number].gone)
        return None if is_gone else self.num_started[number]

    def is_coming(self, number: int) -> bool:
        """Say whether engine `number` is being started anew, or is when those that sleep are woken."""
        return number in self._starting or number in self._held

    async def sleep(self, number: int) -> None:
        """Have engine `number` let go of its memory, where engines do that; one that is being started comes first, one
        that is lost is started no sooner than engines are woken. Raises ServerGone where it lives and does not."""
        if not self.sleeps:
            return
        self._may_start.clear()
        while number in self._starting:  # it takes its device's memory
            await asyncio.sleep(_GLANCE_SECONDS)
        engine = self._engines[number]
        if engine.gone or engine.asleep:
            return
        try:
            await self.ask(number, "sleep")
            engine.asleep = {WEIGHTS, CACHE}
        except ServerGone:
            if not engine.gone:  # else another one comes in its place, or the next delivery says that none is left
                raise

    async def wake(self, number: int, part: str) -> None:
        """Have engine `number` take the memory of that part again, where it sleeps; from now on those that were lost
        meanwhile are started. Raises ServerGone."""
        self._check_open()
        self._may_start.set()
        engine = self._engines[number]
        if part in engine.asleep and not engine.gone:
            await self.ask(number, "wake", part)
            engine.asleep.discard(part)
