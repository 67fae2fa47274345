"""The proof at the start of a run that deliveries reach the whole engine.

The policy is delivered with noise on every parameter. The engine must then compute as this perturbed copy does, and not
as the copies that keep one parameter as it was: one of every kind in each third of the layers (`representatives`),
so that the proof of a deep network costs no more forward passes than that of a shallow one; that the others arrive the
receipts say. In a wide, deep network one parameter of one layer moves a log-prob by less than rounding does, and noise
large enough to move it by more makes chaos of the rest. So many tokens are asked together how much of the way to each
copy the engine's log-probs lie (`way_to`): rounding goes in all directions, a stale parameter in one. Truth and copies
are computed in float32, else their own rounding would lie on every way.

A copy is a forward pass, and there are some forty; no weights are held for it (`delivery.policy_weights`). They are
computed of the first canaries where these show every representative, else of all; how far the engine may be from the
truth is read on all tokens either way.

What the tokens cannot say: a tensor that stands for no other and is stale, or a small part of one, moves the
log-probs by less than rounding there, and is accepted; so is what is stale for later canaries alone and moves them by
no more than rounding may.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch

from espalier.models.precision import FP32
from espalier.rl.delivery.policy_weights import PolicyWeights
from espalier.rl.delivery.receipts import StaleWeights
from espalier.rl.probes.canary import ENOUGH_TOKENS, Canary, representatives, way_to
from espalier.rl.probes.rounding import FLOOR, rounds_nothing

log = logging.getLogger(__name__)

_PART = 0.2  # of the way to a stale parameter's log-probs, from where on an engine may lie there
_UNSURE = 0.1  # standard error of that part, from where on it says nothing
_SURE = 5.0  # standard errors
_MARGIN = 3.0  # times its error the engine must have moved by the delivery
_APART = 50.0  # roundings of a token (root mean square) that a stale parameter must be away, over all tokens
_MAX_TRIES = 8
_MOST_GROWTH = 16.0  # of a parameter's noise from one try to the next


@dataclass(frozen=True)
class Scratch:
    """Perturbed weights; log-probs [R] of all canaries without noise (`start`), with it (`truth`), and with it when
    every layer is rounded as the engine rounds. `stale`: parameter → log-probs [F], F at most R, of `canaries`, the
    first ones, with noise on all parameters but this one; of those that were looked at."""

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
            self.stale[name] = self.weights.without_noise(name).scores(self.canaries, FP32).logprobs
        stale = self.stale[name]
        truth, rounded = self.truth[: len(stale)], self.rounded[: len(stale)]
        length = float((stale - truth).square().sum().sqrt())
        rounding = float((rounded - truth).square().mean().sqrt())
        return max(length / (_APART * max(FLOOR, rounding)), 1e-9)

    def read_on(self, canaries: Sequence[Canary], start: torch.Tensor, dtype: torch.dtype) -> "Scratch":
        """Return it with what is known of all canaries, of which its own are the first."""
        truth, rounded = _truth(self.weights, canaries, dtype)
        return replace(self, start=start, truth=truth, rounded=rounded)


@dataclass(frozen=True)
class Answer:
    """An engine's log-probs [R] of the canaries after the delivery, and before it (None: it was started since)."""

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
    found, truth = answer.found, scratch.truth
    befores = [scratch.start]
    if answer.before is not None and bool(torch.isfinite(answer.before).all()):
        befores.append(answer.before)
    ways = [way_to(found, truth, before) for before in befores]
    apart = {}
    for name, other in scratch.stale.items():
        first = slice(len(other))
        ways.append(way_to(found[first], truth[first], other))
        apart[name] = float((found[first] - other).square().sum())
    nearest = min(apart, key=apart.__getitem__)
    stale = scratch.stale[nearest]
    first = slice(len(stale))
    return Reading(
        answer.name,
        error=float((found - truth).abs().mean()),
        moved=min(float((found - other).abs().mean()) for other in befores),
        nearest=nearest,
        share=way_to(found[first], truth[first], stale)[0],
        distance=float((found[first] - stale).abs().mean()),
        doubt=max(_doubt(*way) for way in ways),
        lies_there=any(share >= _PART and share > _SURE * unsure for share, unsure in ways),
        limit=limit,
    )


def _doubt(share: float, unsure: float) -> float:
    return max(abs(share) / _PART, unsure / _UNSURE) if math.isfinite(share) else math.inf


def scratch_copy(
    weights: PolicyWeights, canaries: Sequence[Canary], dtype: torch.dtype, seed: int, tokens: int = ENOUGH_TOKENS
) -> Scratch:
    """Return perturbed weights in which, where that can be, every representative is distinguished from the rounding
    of an engine that computes in `dtype`: by the first canaries, as many as have at least so many response `tokens`,
    where more noise on what is hidden shows all of it, else by all canaries, anew. Raises StaleWeights where nothing
    can be proven."""
    has_response = any(len(canary.ids) > canary.start for canary in canaries)
    start = weights.scores(canaries, FP32).logprobs if has_response else None
    if start is None or not bool(torch.isfinite(start).all()):
        what = "the canaries have no response" if start is None else "the policy's log-probs of them are no numbers"
        raise StaleWeights(f"no delivery can be proven by fixed responses: {what}")
    lengths = list(accumulate(len(canary.ids) - canary.start for canary in canaries))
    few = next((at for at, length in enumerate(lengths, 1) if length >= tokens), len(canaries))
    if few < len(canaries):
        noise = _NoiseSearch(weights, canaries[:few], dtype, seed, start[: lengths[few - 1]])
        if (found := noise.that_shows_all()) is not None:
            return found.read_on(canaries, start, dtype)
    return _NoiseSearch(weights, canaries, dtype, seed, start).that_shows_most()


class _NoiseSearch:
    """The search for noise that shows every representative to these canaries, whose log-probs without noise are `start`
    [R]. What is hidden gets more noise from try to try, as much as it lacks, twice as much at least."""

    def __init__(
        self,
        weights: PolicyWeights,
        canaries: Sequence[Canary],
        dtype: torch.dtype,
        seed: int,
        start: torch.Tensor,
    ):
        names = [name for name, (_, kind) in weights.kinds.items() if kind.is_floating_point]
        self.weights, self.canaries, self.dtype, self.seed, self.start = weights, canaries, dtype, seed, start
        self.scales = dict.fromkeys(names, 0.4)
        self.groups = list(representatives(names))
        self.best, self.fewest = dict(self.scales), len(self.groups)  # of all tries, the first with fewest hidden

    def that_shows_all(self) -> Scratch | None:
        """Return the copy of the first try that does; None from the first one on that shows no more than one before, or
        where the tries run out."""
        hidden: list[str] = []
        for _ in range(_MAX_TRIES):
            tried, hidden, is_better = self._try(hidden)
            if not hidden:
                return tried
            if not is_better:
                return None
            del tried  # with the passes that it keeps, before the next copy is made
        return None

    def that_shows_most(self) -> Scratch:
        """Return the copy of the try with the fewest hidden, without these. Raises StaleWeights where all are."""
        hidden: list[str] = []
        for _ in range(_MAX_TRIES):
            tried, hidden, _ = self._try(hidden)
            if not hidden:
                return tried
            del tried  # with the passes that it keeps, before the next copy is made
        tried = self._perturbed(self.best)
        hidden = [name for name in self.groups if not tried.seen(name) >= 1]
        if len(hidden) == len(self.groups):
            raise StaleWeights("no delivery can be proven: the log-probs of the canaries depend on no weight")
        log.warning("no delivery can be proven of %s: log-probs hardly depend on them", ", ".join(hidden))
        for name in hidden:
            del tried.stale[name]
        return tried

    def _try(self, hidden: Sequence[str]) -> tuple[Scratch, list[str], bool]:
        """Return a copy, what it hides, and whether that is less than in any try before; set the noise of the next one.
        What was `hidden` is looked at first, and the rest where this try may still be the best."""
        tried = self._perturbed(self.scales)
        seen = {name: tried.seen(name) for name in hidden}
        if sum(not value >= 1 for value in seen.values()) < self.fewest:
            seen |= {name: tried.seen(name) for name in self.groups if name not in seen}
        found = [name for name in seen if not seen[name] >= 1]
        is_better = len(found) < self.fewest
        if is_better:
            self.best, self.fewest = dict(self.scales), len(found)
        more = {name: min(_MOST_GROWTH, max(2.0, 1.2 / seen[name])) for name in found}
        self.scales = {name: scale * more.get(name, 1.0) for name, scale in self.scales.items()}
        return tried, found, is_better

    def _perturbed(self, scales: dict[str, float]) -> Scratch:
        copy = self.weights.perturbed(scales, self.seed)
        return Scratch(copy, self.canaries, self.start, *_truth(copy, self.canaries, self.dtype))


def _truth(copy: PolicyWeights, canaries: Sequence[Canary], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a copy's log-probs [R] of the canaries, and those when every layer is rounded to `dtype`."""
    truth = copy.scores(canaries, FP32).logprobs
    return truth, truth if rounds_nothing(dtype, FP32) else copy.scores(canaries, FP32, dtype).logprobs
