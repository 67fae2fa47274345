"""Several vLLM engines behind one client, each in a process of its own: which gets what, and what becomes of it when
one of them is gone. Where the processes are is the affair of `sampling.data_parallel_engines` (this machine) and
`sampling.ray_engines` (the nodes of a cluster).

An engine's scheduling is one thread's work and its model another's: one engine on several cores leaves most of them
waiting in turn, several engines of few threads do not. Requests and samples go over a socket, a pickle each way a
request, with nothing decoded or sent before a sample is whole.

Requests of one problem go to one engine, whose prefix cache then serves them all; a new problem goes to the engine that
owes the fewest samples. Weights, stamps and proofs go to every engine.

Problems of an engine that is lost go to the others under the same ids and seeds, and another one is started in its
place (`sampling.kept_engines`). A request whose engine died under it is asked of another twice at most: one that kills
engines does not kill them all. The run ends when no engine is left and none is being started.

Where they follow a policy that changes, an engine has no request before it has the weights of now: one that was started
in another's place waits for the next delivery. Where none is left that has them the run ends, unless they are on their
way (`pause` to `resume`).

Engines of a model with a head at every token (`scores_tokens`, set before `open`) give logits of whole rows instead of
samples (`sampling.engine_scorer`).
"""

import asyncio
import logging
import zlib
from collections.abc import Sequence
from typing import Any

from espalier.data.steps import TokenRow
from espalier.sampling.child_engine import EngineConnection, Silent
from espalier.sampling.client import CACHE, WEIGHTS, Sample, SampleRequest, SamplingParams, ServerGone
from espalier.sampling.engine_work import EngineWork, WorkSpan
from espalier.sampling.kept_engines import KeptEngines, engine_name
from espalier.sampling.pooled_engine import PooledEngine

log = logging.getLogger("sample")

_MAX_MOVES = 2
_GLANCE_SECONDS = 0.05


class EnginePool(KeptEngines):
    """Engines that are one client together: samples and scores of any of them, weights for all."""

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

    def _count_lost(self, work: EngineWork, num_samples: int, num_tokens: int) -> None:
        """Count a request that its engine was lost under, and the tokens that are known to be drawn for it."""
        self.num_lost_samples += num_samples
        self.num_lost_tokens += num_tokens
        work.lose(num_samples, num_tokens)

    def take_work(self) -> list[WorkSpan]:
        """Return what the engines did since the last call."""
        return [span for work in self._work for span in work.take()]

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

    # --- for a policy that changes ----------------------------------------------------------------------------------

    def engine(self, number: int) -> PooledEngine:
        """Return engine `number`, as one that takes new weights once the client is open."""
        return PooledEngine(self, number, engine_name(number, self.num_engines))

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
