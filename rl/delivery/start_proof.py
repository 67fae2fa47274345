"""The proof at the start of a run that deliveries reach the whole engine.

Every parameter is perturbed on a scratch copy, which is delivered. The engine must then compute as the copy does, and
not as the copies that keep one parameter as it was: one of every kind in each third of the layers (`representatives`),
so that the proof of a deep network costs no more forward passes than that of a shallow one; that the others arrive the
receipts say. In a wide, deep network one parameter of one layer moves a log-prob by less than rounding does, and noise
large enough to move it by more makes chaos of the rest. So all tokens are asked together how much of the way to each
copy the engine's log-probs lie (`way_to`): rounding goes in all directions, a stale parameter in one. Truth and copies
are computed in float32, else their own rounding would lie on every way.

What the tokens cannot say: a tensor that stands for no other and is stale, or a small part of one, moves the
log-probs by less than rounding there, and is accepted.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from espalier.rl.delivery.policy_weights import PolicyWeights
from espalier.rl.delivery.receipts import StaleWeights
from espalier.rl.probes.canary import Canary, representatives, way_to
from espalier.rl.probes.rounding import FLOOR

log = logging.getLogger(__name__)

FEW_TOKENS = 128  # of responses, that are asked first: what is seen in them costs a quarter of eight canaries of 64
_PART = 0.2  # of the way to a stale parameter's log-probs, from where on an engine may lie there
_UNSURE = 0.1  # standard error of that part, from where on it says nothing
_SURE = 5.0  # standard errors
_MARGIN = 3.0  # times its error the engine must have moved by the delivery
_APART = 50.0  # roundings of a token (root mean square) that a stale parameter must be away, over all tokens
_MAX_TRIES = 8
_MOST_GROWTH = 16.0  # of a parameter's noise from one try to the next


@dataclass(frozen=True)
class Scratch:
    """Perturbed weights; log-probs [R] of the canaries that are asked without noise (`start`), with it (`truth`), and
    with it when every layer is rounded as the engine rounds. `stale`: with it on all but one parameter, by its name, of
    those that were looked at."""

    weights: PolicyWeights
    canaries: Sequence[Canary]
    start: torch.Tensor
    truth: torch.Tensor
    rounded: torch.Tensor
    stale: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def rounding(self) -> float:
        """The mean that rounding makes of a token."""
        return float((self.rounded - self.truth).abs().mean())

    def seen(self, name: str) -> float:
        """Return how far an engine in which this parameter is stale lies from the truth, in what is asked of it; from 1
        on it is distinguished from rounding. A forward pass, kept in `stale`."""
        if name not in self.stale:
            self.stale[name] = self.weights.without_noise(name).scores(self.canaries, "fp32").logprobs
        length = float((self.stale[name] - self.truth).square().sum().sqrt())
        rounding = float((self.rounded - self.truth).square().mean().sqrt())
        return max(length / (_APART * max(FLOOR, rounding)), 1e-9)


@dataclass(frozen=True)
class Answer:
    """An engine's log-probs of all canaries, of which the first [R] are read, after the delivery, and before it (None:
    it was started since)."""

    name: str
    found: torch.Tensor
    before: torch.Tensor | None


@dataclass(frozen=True)
class Reading:
    """What one engine's answer says. `error`, `moved` and `distance` (from the copy in which `nearest` is stale, of all
    the nearest one) are means over tokens, in nats; `share` is the part of the way to that copy at which the answer
    lies. `doubt`: from 1 on the answer may lie on some way, or says too little; `lies_there`: it does lie on one."""

    name: str
    error: float
    moved: float
    nearest: str
    share: float
    distance: float
    doubt: float
    lies_there: bool
    limit: float

    @property
    def is_fresh(self) -> bool:
        """Whether it computes with the perturbed weights; nothing is where an engine answers what is no number."""
        return self.doubt < 1 and self.error <= self.limit and _MARGIN * self.error < self.moved

    @property
    def is_stale(self) -> bool:
        """Whether something stale explains it, rather than another way to compute."""
        return self.share > 0.5 or self.lies_there or not _MARGIN * self.error < self.moved

    def __str__(self) -> str:
        return (f"{self.error:.3f} from the trainer's (at most {self.limit:.3f}), {self.distance:.3f} from a stale "
                f"{self.nearest}'s ({self.share:.0%} of the way there), and {self.moved:.3f} from before (means over "
                "tokens)")  # fmt: skip


def read_answer(answer: Answer, scratch: Scratch, limit: float) -> Reading:
    """Return what it says. `limit`: the largest mean error of an engine that computes with the right weights."""
    truth, befores = scratch.truth, [scratch.start]
    found = answer.found[: len(truth)]
    if answer.before is not None and bool(torch.isfinite(answer.before).all()):
        befores.append(answer.before[: len(truth)])
    ways = [way_to(found, truth, other) for other in (*scratch.stale.values(), *befores)]
    apart = {name: float((found - other).square().sum()) for name, other in scratch.stale.items()}
    nearest = min(apart, key=apart.__getitem__)
    stale = scratch.stale[nearest]
    return Reading(
        answer.name,
        error=float((found - truth).abs().mean()),
        moved=min(float((found - other).abs().mean()) for other in befores),
        nearest=nearest,
        share=way_to(found, truth, stale)[0],
        distance=float((found - stale).abs().mean()),
        doubt=max(_doubt(*way) for way in ways),
        lies_there=any(share >= _PART and share > _SURE * unsure for share, unsure in ways),
        limit=limit,
    )


def _doubt(share: float, unsure: float) -> float:
    return max(abs(share) / _PART, unsure / _UNSURE) if math.isfinite(share) else math.inf


def scratch_copy(
    weights: PolicyWeights, canaries: Sequence[Canary], dtype: torch.dtype, seed: int, tokens: int = FEW_TOKENS
) -> Scratch:
    """Return perturbed weights in which, where that can be, every representative is distinguished from the rounding
    of an engine that computes in `dtype`, by the first canaries, of about so many response tokens at first. Those that
    are not get more noise, as much as they lack, twice as much at least, and where that does not make them fewer twice
    as many canaries too; of all tries that with the fewest of them, the first, is returned. Raises StaleWeights where
    nothing can be proven."""
    start = weights.scores(canaries, "fp32").logprobs
    if not len(start) or not bool(torch.isfinite(start).all()):
        what = "the canaries have no response" if not len(start) else "the policy's log-probs of them are no numbers"
        raise StaleWeights(f"no delivery can be proven by fixed responses: {what}")
    names = [name for name, (_, kind) in weights.kinds.items() if kind.is_floating_point]
    scales, groups = dict.fromkeys(names, 0.4), representatives(names)
    lengths = list(accumulate(len(canary.ids) - canary.start for canary in canaries))
    number = next((at for at, length in enumerate(lengths, 1) if length >= tokens), len(canaries))

    def perturbed(scales: dict[str, float]) -> Scratch:
        return _perturbed(weights, canaries[:number], dtype, scales, seed, start)

    best, fewest, hidden = dict(scales), len(groups), list[str]()
    for _ in range(_MAX_TRIES):
        tried = perturbed(scales)
        seen = {name: tried.seen(name) for name in hidden}
        if sum(not value >= 1 for value in seen.values()) < fewest:  # else the others do not matter
            seen |= {name: tried.seen(name) for name in groups if name not in seen}
        hidden = [name for name in seen if not seen[name] >= 1]
        if not hidden:
            return tried
        del tried  # before the next copy is made
        if len(hidden) < fewest:
            best, fewest = dict(scales), len(hidden)
        else:  # more noise did not do it
            number = min(2 * number, len(canaries))
        scales.update({name: scales[name] * min(_MOST_GROWTH, max(2.0, 1.2 / seen[name])) for name in hidden})
    if fewest == len(groups):
        raise StaleWeights("no delivery can be proven: the log-probs of the canaries depend on no weight")
    tried = perturbed(best)
    hidden = [name for name in groups if not tried.seen(name) >= 1]
    if hidden:
        log.warning("no delivery can be proven of %s: log-probs hardly depend on them", ", ".join(hidden))
    for name in hidden:
        del tried.stale[name]
    return tried


def _perturbed(
    weights: PolicyWeights,
    canaries: Sequence[Canary],
    dtype: torch.dtype,
    scales: dict[str, float],
    seed: int,
    start: torch.Tensor,
) -> Scratch:
    scratch = weights.perturbed(scales, seed)
    truth = scratch.scores(canaries, "fp32").logprobs
    rounded = scratch.scores(canaries, "fp32", dtype).logprobs
    return Scratch(scratch, canaries, start[: len(truth)], truth, rounded)
