"""Several vLLM engines, each in a process of its own: started, watched, and started anew where one is lost.

An engine that dies, fails or hangs is lost, which a line of the log says; another one is started in its place,
`max_replaced` times in a run. Engines that share their devices with a learner (`sleeps`): one that is lost while they
sleep is started anew only when they are woken: its device is the learner's.
"""

import asyncio
import logging
from abc import abstractmethod
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from espalier.data.records import BadInput
from espalier.data.timeline import BACK, LOST
from espalier.sampling.child_engine import EngineConnection
from espalier.sampling.child_process import CannotStart
from espalier.sampling.client import HasEngines, ServerGone
from espalier.sampling.engine_arguments import check_one_engine, engine_dtype, spelled, window_of_engine
from espalier.sampling.engine_work import EngineWork

log = logging.getLogger("sample")

_MOST_ENGINES = 4096  # of a run; its engines' seeds are not those of a run with the next seed
_ROOM_SECONDS = 1.0


def engine_name(number: int, num_engines: int) -> str:
    """Return what lines call an engine."""
    return f"engine {number} of {num_engines}"


@dataclass(eq=False)
class KeptEngines(HasEngines):
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
    dtype: str = "auto"
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
        self.dtype = engine_dtype(self.dtype, self.options)
        self.max_model_length = window_of_engine(self.options, self.max_model_len)
        self.follows_policy = False
        self.scores_tokens = False
        self.sleeps = False
        self.num_shortened = 0
        self.num_moved = self.num_lost_samples = self.num_lost_tokens = 0
        self.num_started = [1] * self.num_engines  # processes of each engine so far
        self.absent: set[int] = set()
        """Numbers of engines that there is no room for when the others are started: they are as soon as there is."""
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
            "options": {"seed": (_MOST_ENGINES * self.seed + number) % 2**32, **self.options, **sleeps},
        }

    async def open(self) -> None:
        """Start all at once, on a GPU that several share one after the other: each takes what becomes of the GPU's free
        memory meanwhile for its own doing. Return when every one has loaded the model. Raises CannotStart; none stays
        behind then."""
        log.info("starting %d vLLM engine%s for %s", self.num_engines, "s" * (self.num_engines > 1), self.model)
        self._engines = [self.make_engine(number) for number in range(self.num_engines)]
        turns: dict[str, asyncio.Lock] = {}

        async def start(number: int, engine: EngineConnection) -> None:
            environment = self.environment(number)
            devices = environment.get("CUDA_VISIBLE_DEVICES", "")
            async with turns.setdefault(devices, asyncio.Lock()) if devices else nullcontext():
                await engine.start(environment, self.start_seconds)

        present = [(number, engine) for number, engine in enumerate(self._engines) if number not in self.absent]
        starting = [asyncio.create_task(start(number, engine)) for number, engine in present]
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
        self._watching = [asyncio.create_task(engine.watch(*times)) for _, engine in present]
        for number in self.absent:
            self._engines[number].gone = "there was no room for it"
            self._lost.append(self._engines[number])
            self._replacing[number] = asyncio.create_task(self._replace(number, self._engines[number].log))

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

    def _work_of(self, engine: EngineConnection) -> EngineWork:
        work = self._work[self._engines.index(engine)]
        work.node = engine.host
        return work

    def own_tasks(self) -> set[asyncio.Task[Any]]:
        """Return what watches, ends and replaces engines."""
        return {*self._watching, *self._ending, *self._replacing.values()}

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
            self._starting.add(number)
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

    def host_of(self, number: int) -> str:
        """Return where engine `number` runs, as this machine reaches it."""
        self._check_open()
        return str(self._engines[number].host)

    def process_of(self, number: int) -> int | None:
        """Return which process engine `number` is by now, None where it is gone."""
        is_gone = bool(self._engines and self._engines[number].gone)
        return None if is_gone else self.num_started[number]

    def is_coming(self, number: int) -> bool:
        """Say whether engine `number` is being started anew, or is when those that sleep are woken."""
        return number in self._starting or number in self._held
