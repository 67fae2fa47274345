"""Make the sampler serve the new policy, and prove that it does.

Before it, the **step** is looked at: a policy that ran away is refused while the engine still serves the one before.

Delivery: all weights as a stream to every worker of every engine at once (`sampling.weight_stream`), then prefix caches
are emptied. Every name is sent, `lm_head.weight` of a tied head too: without it vLLM (0.32, CPU) goes on with its own
stale copy and says nothing. Of several engines every one has to pass every proof below; one that does not ends the run
under its name (a server's address). One whose process is gone has none to pass: deliveries go to those that are there,
and to one that was started in its place from the next one on.

The engine answers with a **receipt**, a digest of every tensor it read: all, one, or an older file is noticed at once,
however small the step was, if it changes what the engine keeps. The engine is then **stamped** with the policy's
version, and has to show that stamp before and after an iteration's rollouts: one that was restarted, or that another
program delivers to, is not taken for this one.

Engines that share their devices with the learner **sleep** between the last request of an iteration and the delivery
(`sleep`): their weights are lost, and their caches. They take the memory of the weights again before the stream, that
of the cache behind it. The proofs below are of engines that are awake, so that what sleep has cost them is noticed.

Two more proofs of every delivery are asked for beside the first rollouts from it (`prove`), and before anything is
evaluated or saved: they cost the engine little and would keep it waiting. A prompt asked after the last rollouts must
not be **cached** after the delivery. And the **canary**: log-probs of fixed responses by the trainer and by the engine
must agree. The gap is a mean over tokens weighted by the trainer's entropy, because a token the policy is sure of
agrees under any weights. How large it may be is measured for every version (`rl.probes.rounding`): the responses are
the first policy's, and as they become unlikely, rounding alone makes 0.007 to 0.07 of them in one clean run. What it
says depends on the receipt: an engine that read every tensor as it was sent is never said to lack them. It may compute
with old ones all the same (`serves_old`), or simply otherwise than the trainer.

At start-up `prove_delivery`: every parameter is perturbed on a scratch copy, the copy is delivered, and the
engine must agree with the copy and with none of the copies that keep one parameter as it was: one of every kind in each
third of the layers (`representatives`), so that the proof of a deep network costs no more forward passes than that of a
shallow one; that the others arrive the receipts say. A canary alone needs many iterations to see one stale parameter
among fresh ones.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar

import torch

from espalier.rl.delivery.policy_weights import PolicyWeights, weights_of
from espalier.rl.delivery.weight_group import Serving, WeightGroup, each, join_engines
from espalier.rl.delivery.weight_update_engine import (
    DrawingEngine,
    LiveEngine,
    PausingEngine,
    SleepingEngine,
    StaleWeights,
    StampedEngine,
    check_receipt,
)
from espalier.rl.probes.canary import (
    Canary,
    Unproven,
    canary_gap,
    representatives,
    serves_old,
    step_kl,
)
from espalier.rl.probes.checks import CACHE, KL, UNKNOWN, UNUSED, VERSION, WEIGHTS, Fault, ProbeFailed
from espalier.rl.probes.rounding import FACTOR, FLOOR
from espalier.sampling.client import CACHE as CACHE_MEMORY
from espalier.sampling.client import WEIGHTS as WEIGHTS_MEMORY
from espalier.sampling.client import ServerGone
from espalier.sampling.weight_stream import Streamed

log = logging.getLogger(__name__)

_MARGIN = 3.0  # a stale parameter must lie this many times farther from the engine than the truth
_SHOWN = 0.3  # nats per token, mean: ten times the bf16 noise of a perturbed tiny model, or
_SHOWN_ROUNDINGS = 2 * _MARGIN  # times what rounding makes of this one, whichever is more
_MAX_ATTEMPTS = 3
_MAX_ROUNDS = 8  # doublings of a perturbation that does not show
_GLANCE_SECONDS = 0.1

R = TypeVar("R")


class WeightSync:
    """Deliveries to one engine or several. `canaries` are set once an engine has sampled them.
    `max_logprob_gap`: how far an engine may be from the trainer on them, in nats per token (0: `FACTOR` times what
    rounding makes of each version, or of the median one of the last five). `max_step`: KL of one version from the one
    before, in nats per token of the canaries (0: any). `dtype`: what the engines compute in, where that is known: they
    are sent no more digits than they keep. `stops`: whether a disagreement that is no matter of delivery ends the run;
    else it is warned of."""

    def __init__(
        self,
        engines: LiveEngine | Sequence[LiveEngine],
        max_logprob_gap: float = 0.0,
        precision: str = "bf16",
        max_step: float = 0.0,
        dtype: torch.dtype | None = None,
        stops: bool = True,
    ):
        self.engines = list(engines) if isinstance(engines, Sequence) else [engines]
        self.max_logprob_gap = max_logprob_gap
        self.precision = precision
        self.max_step = max_step
        self.dtype = dtype
        self.stops = stops
        self.is_received = False  # what was sent last, by receipts of it
        self.wake_seconds = 0.0  # in which engines were woken, in all
        self.canaries: list[Canary] = []
        self._sent: deque[dict[str, str]] = deque(maxlen=4)  # digests of the last deliveries
        self._group: WeightGroup | None = None  # once there was a first delivery
        self._roundings: deque[float] = deque(maxlen=5)  # of the last versions: one alone may be small by chance
        self._before: tuple[torch.Tensor, torch.Tensor] | None = None  # log-probs, distributions
        self._next: Unproven | None = None  # looked at, not delivered
        self._unproven: Unproven | None = None

    @property
    def computes_in(self) -> torch.dtype:
        """The engine's dtype; the coarsest of the usual ones where it is unknown."""
        return self.dtype or torch.bfloat16

    async def deliver(self, weights: Mapping[str, torch.Tensor] | Streamed, stamp: str = "") -> None:
        """Send the weights to every engine that is there (one that sleeps is woken), compare every receipt, and stamp
        the engines; those that can draw no token meanwhile. Where an engine is gone under it, the others (and, where
        none is left, those that are being started in their place) get the whole delivery again, once. Raises
        StaleWeights, ServerGone."""
        await self._wake(WEIGHTS_MEMORY)
        before = await self._present()
        try:
            await self._deliver(before, weights, stamp)
        except ServerGone as error:
            self.close()
            if all(one.is_there for one in before):
                raise
            log.warning("a delivery of weights is made again: %s", str(error).split("\n")[0])
            await self._deliver(await self._present(), weights, stamp)

    async def _deliver(
        self, engines: list[Serving], weights: Mapping[str, torch.Tensor] | Streamed, stamp: str
    ) -> None:
        await each(one.engine.pause() for one in engines if isinstance(one.engine, PausingEngine))
        if self._group is None or self._group.members != engines:
            self.close()
            self._group = await join_engines(engines)
        sent, *receipts = await self._group.send(weights, self.dtype)
        for one, of_workers in zip(engines, receipts, strict=True):
            if of_workers is not None and not of_workers:
                raise StaleWeights(f"{one.engine.name} took a delivery and gave no receipt")
            for receipt in of_workers or []:
                check_receipt(sent, receipt, self._sent, one.engine.name)
        self.is_received = all(receipts)
        self._sent.append(sent)
        await self._wake(CACHE_MEMORY)
        if stamp:
            await each(_to_it(one, lambda engine: engine.stamp(stamp)) for one in engines
                       if isinstance(one.engine, StampedEngine))  # fmt: skip
        # where a delivery failed they stay as they are: the run ends
        await each(_to_it(one, lambda engine: engine.resume()) for one in engines
                   if isinstance(one.engine, PausingEngine))  # fmt: skip

    async def sleep(self) -> None:
        """Have every engine that shares its device with the learner let go of its memory until the next delivery.
        Raises ServerGone."""
        await each(engine.sleep() for engine in self.engines if isinstance(engine, SleepingEngine))

    async def _wake(self, part: str) -> None:
        """Have every engine that sleeps take the memory of that part again; one that is gone under it is left out.
        Raises ServerGone."""
        began = time.monotonic()
        sleeping = [(one, one.process) for one in self.engines if isinstance(one, SleepingEngine)]
        found = await asyncio.gather(*(one.wake(part) for one, _ in sleeping), return_exceptions=True)
        self.wake_seconds += time.monotonic() - began
        for (engine, process), error in zip(sleeping, found, strict=True):
            is_lost = isinstance(error, ServerGone) and engine.process != process
            if isinstance(error, BaseException) and not is_lost:
                raise error

    async def _present(self) -> list[Serving]:
        """Return the engines that are there; where none is, wait for those that are being started. Raises
        ServerGone."""
        while not (found := [Serving(one, number) for one in self.engines if (number := one.process) is not None]):
            if not any(engine.is_coming for engine in self.engines):
                raise ServerGone("no engine is left that weights could be sent to")
            await asyncio.sleep(_GLANCE_SECONDS)
        return found

    @property
    def num_serving(self) -> int:
        """How many engines took the last delivery and are still there."""
        return len(self._serving())

    def _serving(self) -> list[Serving]:
        if self._group is None:  # nothing was delivered yet
            return [Serving(one, number) for one in self.engines if (number := one.process) is not None]
        return [one for one in self._group.members if one.is_there]

    def close(self) -> None:
        """Send no more."""
        if self._group is not None:
            self._group.stream.close()
            self._group = None

    async def _ask(
        self, call: Callable[[Any], Coroutine[Any, Any, R]], kind: Any = LiveEngine
    ) -> list[tuple[LiveEngine, R]]:
        """Return what each engine of that kind answers that serves the policy; one that is gone meanwhile answers
        nothing. Raises an engine's error, ServerGone where none is left."""
        engines = self._serving()
        asked = [one for one in engines if isinstance(one.engine, kind)]
        found = await asyncio.gather(*(call(one.engine) for one in asked), return_exceptions=True)
        answers: list[tuple[LiveEngine, R]] = []
        lost: BaseException = ServerGone("no engine is left that has the policy's weights")
        for one, answer in zip(asked, found, strict=True):
            if isinstance(answer, ServerGone) and not one.is_there:
                lost = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                answers.append((one.engine, answer))
        if not answers and (asked or not engines):
            raise lost
        return answers

    async def check_version(self, version: int) -> None:
        """Raise StaleWeights where an engine does not say that it serves this version (if it can say)."""
        for engine, found in await self._ask(lambda engine: engine.served_version(), StampedEngine):
            if found != str(version):
                raise StaleWeights(f"{engine.name} says that it serves version '{found}', not {version}", VERSION)

    async def _cached(self) -> dict[str, int]:
        """Of each engine that says it, how many tokens of the marker it had cached, by its name."""
        if not self.canaries:
            return {}
        marker = self.canaries[0].ids[::-1]  # what no rollout has in common with it
        counts = await self._ask(lambda engine: engine.cached_tokens(marker), StampedEngine)
        return {engine.name: count or 0 for engine, count in counts}

    def _check_step(self, before: torch.Tensor, after: torch.Tensor, version: int) -> dict[str, float]:
        """Return how far the policy moved on the canaries since the last version. Raises ProbeFailed."""
        moved = step_kl(before, after)
        if self.max_step > 0 and not moved <= self.max_step:
            distance = f"{moved:.3g} nats per token from the one before on fixed responses"
            limit = f"probes.max_step is {self.max_step:g}"
            raise ProbeFailed(Fault(KL, f"policy version {version} lies {distance} ({limit})"))
        return {"policy_moved": moved}

    async def canary_logprobs(self) -> list[tuple[LiveEngine, torch.Tensor]]:
        """Return [R], as the trainer's `PolicyWeights.scores`, of every engine."""
        engines = await self.logprobs_of([canary.ids for canary in self.canaries])
        starts = [canary.start for canary in self.canaries]
        return [
            (
                engine,
                torch.tensor([value for row, start in zip(rows, starts, strict=True) for value in row[start - 1 :]]),
            )
            for engine, rows in engines
        ]

    async def logprobs_of(self, rows: Sequence[list[int]]) -> list[tuple[LiveEngine, list[list[float]]]]:
        """Of every engine: the log-probs of every token but the first of each row."""

        async def by(engine: LiveEngine) -> list[list[float]]:
            return await each(engine.prompt_logprobs(row) for row in rows)

        return await self._ask(by)

    async def ask_marker(self) -> None:
        """Have every engine cache a prompt that must not be cached any more after the next delivery."""
        await self._cached()

    async def keep_random_state(self) -> None:
        """Have every engine remember what it draws by, where it has a random state of its own. Raises ServerGone."""
        await self._ask(lambda engine: engine.keep_random_state(), DrawingEngine)

    async def put_random_state_back(self) -> None:
        """Have every engine draw as if nothing had been asked since. Raises ServerGone."""
        await self._ask(lambda engine: engine.put_random_state_back(), DrawingEngine)

    def look(self, policy: PolicyWeights | torch.nn.Module, version: int) -> dict[str, float]:
        """Return how far the policy's weights (a model's own), which are delivered next, moved since the last version;
        keep what they are proven by. Raises ProbeFailed on a step that is too large."""
        weights = weights_of(policy)
        logprobs, entropies, distributions = weights.scores(self.canaries, self.precision)
        before, self._before = self._before, (logprobs, distributions)
        moved = self._check_step(before[1], distributions, version) if before else {}
        in_engine = self._rounded_logprobs(weights)
        self._next = Unproven(version, logprobs, entropies, in_engine, before[0] if before else None)
        self._roundings.append(self._next.rounding)
        return moved

    def _rounded_logprobs(self, weights: PolicyWeights) -> torch.Tensor:
        """As the engine would compute them, [R]."""
        return weights.scores(self.canaries, "fp32", self.computes_in).logprobs

    @property
    def takes_in_flight(self) -> bool:
        """Whether every engine takes weights in the middle of its requests; they need not run."""
        # by their classes: isinstance would ask engines that other ranks have never opened where they run
        return all(callable(getattr(type(one), "pause", None)) for one in self.engines)

    async def send(self, weights: Streamed) -> None:
        """Deliver the weights that were looked at last, and stamp every engine with their version. Raises
        StaleWeights, ServerGone."""
        assert self._next is not None
        await self.deliver(weights, str(self._next.version))
        self._unproven, self._next = self._next, None

    async def prove(self) -> dict[str, float]:
        """Return the canary's weighted and largest gap under the last delivery, at the engine where it is largest;
        nothing where that is proven. Raises StaleWeights."""
        sent, self._unproven = self._unproven, None
        if sent is None:
            return {}
        cached, engines = await asyncio.gather(self._cached(), self.canary_logprobs())
        for name, count in cached.items():
            if count:
                raise StaleWeights(f"a prompt asked before policy version {sent.version} came has {count} cached "
                                   f"tokens after it at {name}", CACHE)  # fmt: skip
        gaps = [canary_gap(found, sent.logprobs, sent.entropies) for _, found in engines]
        for (engine, found), gap in zip(engines, gaps, strict=True):
            fault = self._fault(engine.name, found, sent, gap)
            if fault is not None and (self.stops or fault.kind != UNKNOWN):
                raise ProbeFailed(fault) if fault.kind == UNKNOWN else StaleWeights(fault.evidence, fault.kind)
            if fault is not None:
                log.warning("%s", fault)
        largest = max(float((found - sent.logprobs).abs().max()) for _, found in engines)
        return {"canary_gap": max(gaps), "canary_gap_max": largest, "canary_rounding": sent.rounding}

    def _fault(self, name: str, engine: torch.Tensor, sent: Unproven, gap: float) -> Fault | None:
        """Return what the log-probs [R] of the canaries by the engine of that name say is wrong. Where receipts prove
        the delivery, it is not what is named."""
        version = f"policy version {sent.version}"
        distance = f"its log-probs of fixed responses under {version} are {gap:.3g} from the trainer's"
        if serves_old(engine, sent):
            kind = UNUSED if self.is_received else WEIGHTS
            return Fault(kind, f"{name} computes as the version before: {distance}, and nearer to those of that one")
        limit = self.max_logprob_gap or FACTOR * max(FLOOR, sent.rounding, median(self._roundings or [0.0]))
        if gap <= limit:  # which nothing is that is no number
            return None
        rounding = f"at most {limit:.2g} here, rounding makes {sent.rounding:.2g}"
        if not self.is_received:
            return Fault(WEIGHTS, f"{name} does not serve {version}: {distance} ({rounding})")
        return Fault(UNKNOWN, f"{name} read every tensor as it was sent, and {distance} ({rounding})")

    async def sync(self, policy: PolicyWeights | torch.nn.Module, version: int) -> dict[str, float]:
        """Return `look`, `send` after the marker was asked for, and `prove` at once."""
        weights = weights_of(policy)
        moved = self.look(weights, version)
        await self.ask_marker()
        await self.send(weights)
        return moved | await self.prove()

    async def prove_delivery(self, policy: PolicyWeights | torch.nn.Module, seed: int = 0) -> dict[str, float]:
        """Prove that every named parameter reaches every engine; they are left with a scratch copy.

        Raises StaleWeights naming the parameter that stays behind, or where log-probs depend on no weight, and
        ProbeFailed where the engine read every tensor and only computes otherwise. Costs one delivery and, on the
        trainer, a forward pass of the canaries per representative. Perturbing may lead where bf16 is too coarse to tell
        copies apart (an untrained model): another perturbation is tried then; one that passes is a proof.
        """
        weights = weights_of(policy)
        for attempt in range(_MAX_ATTEMPTS):
            scratch, stale = self._scratch_copy(weights, seed + attempt)
            before = dict(await self.canary_logprobs())
            await self.deliver(scratch)
            engines = await self.canary_logprobs()
            truth = scratch.scores(self.canaries, self.precision).logprobs
            found = torch.stack([logprobs for _, logprobs in engines])  # [E, R]
            errors = (found - truth).abs().mean(-1)
            error, worst = float(errors.max()), int(errors.nan_to_num(float("inf")).argmax())
            moves = [(logprobs - before[engine]).abs().mean() for engine, logprobs in engines if engine in before]
            moved = float(min(moves, default=math.inf))  # none where all were started anew
            distances = {name: float((found - logprobs).abs().mean(-1).min()) for name, logprobs in stale.items()}
            nearest = min(distances, key=distances.__getitem__)
            if _MARGIN * error < min(moved, distances[nearest]):
                log.info("delivery reaches all %d weights: the engine is %.3f nats from the truth, and "
                         "%.3f from a stale %s", len(scratch.kinds), error, distances[nearest], nearest)  # fmt: skip
                return {"error": error, "nearest_stale": distances[nearest], "moved": moved}
        measured = f"{error:.3f} from the trainer's, {distances[nearest]:.3f} from a stale {nearest}'s, and " \
                   f"{moved:.3f} from before (means over tokens)"  # fmt: skip
        name = engines[worst][0].name
        if self.is_received and error < min(moved, distances[nearest]):  # nothing stale explains it better
            raise ProbeFailed(Fault(UNKNOWN, f"with all weights perturbed the log-probs of {name} are {measured}"))
        kind = UNUSED if self.is_received else WEIGHTS
        raise StaleWeights(f"delivery does not reach the whole engine ({name}): with all weights perturbed its "
                           f"log-probs are {measured}", kind)  # fmt: skip

    def _scratch_copy(self, weights: PolicyWeights, seed: int) -> tuple[PolicyWeights, dict[str, torch.Tensor]]:
        """(perturbed weights, name of a representative → log-probs [R] with that one parameter as it was).

        A perturbation that moves the log-probs by less than shows behind rounding is doubled.
        """
        names = [name for name, (_, dtype) in weights.kinds.items() if dtype.is_floating_point]
        scales, groups = dict.fromkeys(names, 0.4), representatives(names)
        for _ in range(_MAX_ROUNDS):
            scratch = weights.perturbed(scales, seed)
            truth = scratch.scores(self.canaries, self.precision).logprobs
            stale = {
                name: scratch.without_noise(name).scores(self.canaries, self.precision).logprobs for name in groups
            }
            rounding = float((self._rounded_logprobs(scratch) - truth).abs().mean())
            shown = max(_SHOWN, _SHOWN_ROUNDINGS * rounding)
            small = [n for n in groups if (stale[n] - truth).abs().mean() < shown]
            if not small:
                return scratch, stale
            scales.update({name: 2 * scales[name] for name in small})
        if len(small) == len(groups):
            raise StaleWeights("no delivery can be proven: the log-probs of the canaries depend on no weight")
        log.warning("no delivery can be proven of %s: log-probs hardly depend on them", ", ".join(small))
        return scratch, {name: stale[name] for name in groups if name not in small}


async def _to_it(one: Serving, call: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
    """Make the call of the process that took the delivery, and of no other that was started in its place meanwhile.
    Raises ServerGone."""
    if not one.is_there:
        raise ServerGone(f"{one.engine.name} was lost behind its receipt")
    await call(one.engine)
