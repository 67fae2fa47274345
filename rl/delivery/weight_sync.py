"""Make the sampler serve the new policy, and prove that it does.

Before it, the **step** is looked at: a policy that ran away is refused while the engine still serves the one before.

Of several engines (`rl.delivery.following_engines`) every one has to pass every proof below; one that does not ends the
run under its name (a server's address). One whose process is gone has none to pass. Receipts and stamps come first:
an engine has to show its stamp before and after an iteration's rollouts: one that was restarted, or that another
program delivers to, is not taken for this one. The proofs below are of engines that are awake, so that what sleep has
cost them is noticed.

Two more proofs of every delivery are asked for beside the first rollouts from it (`prove`), and before anything is
evaluated or saved: they cost the engine little and would keep it waiting. A prompt asked after the last rollouts must
not be **cached** after the delivery. And the **canary**: log-probs of fixed responses by the trainer and by the engine
must agree. The gap is a mean over tokens weighted by the trainer's entropy, because a token the policy is sure of
agrees under any weights. How large it may be is measured for every version (`rl.probes.rounding`): the responses are
the first policy's, and as they become unlikely, rounding alone makes 0.007 to 0.07 of them in one clean run. What it
says depends on the receipt: an engine that read every tensor as it was sent is never said to lack them. It may compute
with old ones all the same (`serves_old`), or simply otherwise than the trainer.

At the start of a run `rl.delivery.start_proof` proves more: a canary alone needs many iterations to see one stale
parameter among fresh ones.
"""

import asyncio
import logging
import sys
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import TypeVar

import torch

from espalier.rl.delivery.following_engines import FollowingEngines
from espalier.rl.delivery.live_engine import LiveEngine, StampedEngine
from espalier.rl.delivery.policy_weights import PolicyWeights, weights_of
from espalier.rl.delivery.receipts import StaleWeights
from espalier.rl.delivery.start_proof import Answer, read_answer, scratch_copy
from espalier.rl.probes.canary import (
    ENOUGH_TOKENS,
    Canary,
    Unproven,
    canary_gap,
    serves_old,
    step_kl,
)
from espalier.rl.probes.checks import CACHE, KL, UNKNOWN, UNUSED, VERSION, WEIGHTS, Fault, ProbeFailed
from espalier.rl.probes.rounding import FACTOR, FLOOR, rounds_nothing
from espalier.sampling.weight_buckets import Streamed

log = logging.getLogger(__name__)

_MAX_ATTEMPTS = 6
"""Perturbations that a proof at the start may take: of some forty ways one may look walked by the rounding of a bf16
engine, and seldom is again by the next. What is stale stays so in all of them."""

R = TypeVar("R")


class WeightSync(FollowingEngines):
    """Deliveries to one engine or several. `canaries` are set once an engine has sampled them.
    `max_logprob_gap`: how far an engine may be from the trainer on them, in nats per token (0: `FACTOR` times what
    rounding makes of each version, or of the median one of the last five). `max_step`: KL of one version from the one
    before, in nats per token of the canaries (0: any). `dtype`: what the engines compute in, where that is known: they
    are sent no more digits than they keep. `stops`: whether a disagreement that is no matter of delivery ends the run;
    else it is warned of. `device`: of the weights (`FollowingEngines`)."""

    def __init__(
        self,
        engines: LiveEngine | Sequence[LiveEngine],
        max_logprob_gap: float = 0.0,
        precision: str = "bf16",
        max_step: float = 0.0,
        dtype: torch.dtype | None = None,
        stops: bool = True,
        device: torch.device | None = None,
    ):
        super().__init__(engines, dtype, device)
        self.max_logprob_gap = max_logprob_gap
        self.precision = precision
        self.max_step = max_step
        self.stops = stops
        self.canaries: list[Canary] = []
        self._roundings: deque[float] = deque(maxlen=5)  # of the last versions: one alone may be small by chance
        self._before: tuple[torch.Tensor, torch.Tensor] | None = None  # log-probs, distributions
        self._next: Unproven | None = None  # looked at, not delivered
        self._unproven: Unproven | None = None
        self._is_cache_unknown = False

    @property
    def computes_in(self) -> torch.dtype:
        """The engine's dtype; the coarsest of the usual ones where it is unknown."""
        return self.dtype or torch.bfloat16

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
        silent = [engine.name for engine, count in counts if count is None]
        if silent and not self._is_cache_unknown:
            self._is_cache_unknown = True
            log.warning("%s does not say what it had cached, so that a cache which keeps old states behind a delivery "
                        "would not be seen: start it with --enable-prompt-tokens-details", silent[0])  # fmt: skip
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

    async def ask_marker(self) -> None:
        """Have every engine cache a prompt that must not be cached any more after the next delivery."""
        await self._cached()

    def look(self, policy: PolicyWeights | torch.nn.Module, version: int) -> dict[str, float]:
        """Return how far the policy's weights (a model's own), which are delivered next, moved since the last version;
        keep what they are proven by. Raises ProbeFailed on a step that is too large."""
        weights = weights_of(policy)
        logprobs, entropies, distributions = weights.scores(self.canaries, self.precision)
        before, self._before = self._before, (logprobs, distributions)
        moved = self._check_step(before[1], distributions, version) if before else {}
        in_engine = logprobs
        if not rounds_nothing(self.computes_in, self.precision):
            in_engine = self._rounded_logprobs(weights)
        self._next = Unproven(version, logprobs, entropies, in_engine, before[0] if before else None)
        self._roundings.append(self._next.rounding)
        return moved

    def _rounded_logprobs(self, weights: PolicyWeights) -> torch.Tensor:
        """As the engine would compute them, [R]."""
        return weights.scores(self.canaries, "fp32", self.computes_in).logprobs

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
        """Prove that parameters of every kind reach every engine (`rl.delivery.start_proof`); they are left with
        noise.

        Raises StaleWeights naming the parameter that stays behind, or where log-probs depend on no weight, and
        ProbeFailed where the engine read every tensor and only computes otherwise. Costs one delivery and, on the
        trainer, a forward pass of some canaries per representative and try of noise. Perturbing may lead where bf16 is
        too coarse to tell copies apart (an untrained model): others are tried then, on all canaries; one that passes is
        a proof.
        """
        weights = weights_of(policy)
        for attempt in range(_MAX_ATTEMPTS):
            tokens = ENOUGH_TOKENS if attempt == 0 else sys.maxsize
            scratch = scratch_copy(weights, self.canaries, self.computes_in, seed + attempt, tokens)
            before = dict(await self.canary_logprobs())
            await self.deliver(scratch.weights)
            limit = self.max_logprob_gap or FACTOR * max(FLOOR, scratch.rounding)
            answers = [Answer(engine.name, found, before.get(engine)) for engine, found in await self.canary_logprobs()]
            readings = [read_answer(answer, scratch, limit) for answer in answers]
            del scratch  # with the passes that it keeps, before the next one is made
            wrong = [reading for reading in readings if not reading.is_fresh]
            if not wrong:
                worst = max(readings, key=lambda reading: reading.error)
                log.info("delivery reaches all %d weights: the engine's log-probs are %s", len(weights.kinds), worst)
                return {"error": worst.error, "nearest_stale": worst.distance, "moved": worst.moved}
            log.info("perturbation %d of at most %d proves nothing: %s", attempt + 1, _MAX_ATTEMPTS, wrong[0])
        worst = next((reading for reading in wrong if reading.is_stale), wrong[0])
        if self.is_received and not worst.is_stale:
            fault = Fault(UNKNOWN, f"with all weights perturbed the log-probs of {worst.name} are {worst}")
            if self.stops:
                raise ProbeFailed(fault)
            log.warning("%s", fault)
            return {"error": worst.error, "nearest_stale": worst.distance, "moved": worst.moved}
        kind = UNUSED if self.is_received else WEIGHTS
        raise StaleWeights(f"delivery does not reach the whole engine ({worst.name}): with all weights perturbed its "
                           f"log-probs are {worst}", kind)  # fmt: skip
