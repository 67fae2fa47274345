"""The canary: fixed responses whose log-probs, by trainer and engine, say with which weights the engine computes.

The responses are the first policy's, the same for a whole run. What of a difference is rounding, `rl.probes.rounding`
says.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from espalier.data.batches.packing import pad_rows
from espalier.models.logprobs import logit_scores
from espalier.rl.probes.rounding import FLOOR

_MAX_SCORES = 2**22  # positions x vocabulary whose distributions are kept from one version to the next: 16 MiB
MAX_LOGITS = 2**27  # positions x vocabulary of one pass: with what is read off them 2.5 GiB in float32
ENOUGH_TOKENS = 128  # of responses, to prove a delivery on and to compute copies of first (`delivery.start_proof`)
_FEWEST_TOKENS = 5  # that must say of an engine that it computes as the version before


@dataclass(frozen=True)
class Canary:
    """A fixed prompt and response, `ids` together; the response begins at token `start`."""

    ids: list[int]
    start: int


def few_canaries(canaries: Sequence[Canary], num_rollouts: int) -> list[Canary]:
    """Return the first of them, so many that they cost little beside an iteration of `num_rollouts`: an eighth as many,
    but two at least, with `ENOUGH_TOKENS` of responses."""
    kept: list[Canary] = []
    for canary in canaries:
        num_tokens = sum(len(one.ids) - one.start for one in kept)
        if len(kept) >= max(2, num_rollouts // 8) and num_tokens >= ENOUGH_TOKENS:
            break
        kept.append(canary)
    return kept


class Scores(NamedTuple):
    """Of all canaries' response tokens: log-probs and entropies [R], and whole log-distributions [P, V] at as many of
    their positions, evenly spread, as make `_MAX_SCORES` numbers."""

    logprobs: torch.Tensor
    entropies: torch.Tensor
    distributions: torch.Tensor


@dataclass(frozen=True)
class Unproven:
    """A version and what the trainer computes of the canaries under it: log-probs and entropies [R], the log-probs when
    every layer is rounded to the engine's dtype, and those of the version before (None: unknown)."""

    version: int
    logprobs: torch.Tensor
    entropies: torch.Tensor
    rounded: torch.Tensor
    before: torch.Tensor | None

    @property
    def rounding(self) -> float:
        """As `canary_gap`: what rounding alone makes."""
        return canary_gap(self.rounded, self.logprobs, self.entropies)


@torch.no_grad()
def canary_scores(
    logits: Callable[..., torch.Tensor], device: torch.device, canaries: Sequence[Canary], vocabulary: int
) -> Scores:
    """Return what is read off the `logits` [B, T, V] of calls with `input_ids` and `attention_mask` [B, T] on that
    device, as many canaries at a time as a large vocabulary allows."""
    ids, attention_mask, response_mask = pad_rows([c.ids for c in canaries], [c.start for c in canaries], 0)
    mask = response_mask[:, 1:]
    step = -(-int(mask.sum()) * vocabulary // _MAX_SCORES) or 1
    number, seen = max(1, MAX_LOGITS // (ids.shape[1] * vocabulary)), 0
    parts = []
    for start in range(0, len(ids), number):
        some = slice(start, start + number)
        own, own_mask = ids[some].to(device), mask[some]
        scored = logits(input_ids=own, attention_mask=attention_mask[some].to(device))
        at = own_mask.to(device)
        chosen = scored[:, :-1][at]
        del scored
        found = logit_scores(chosen, own[:, 1:][at])
        distributions = torch.log_softmax(chosen[-seen % step :: step].float(), dim=-1)
        parts.append((found.logprobs.cpu(), found.entropies.cpu(), distributions.cpu()))
        seen += len(chosen)
    return Scores(*(torch.cat(values) for values in zip(*parts, strict=True)))


def vocabulary_of(model: Any) -> int:
    """Return the number of tokens a model gives logits of."""
    return int(model.config.get_text_config().vocab_size)


def canary_gap(engine: torch.Tensor, trainer: torch.Tensor, entropies: torch.Tensor) -> float:
    """Return the mean over tokens of |engine's - trainer's log-prob|, weighted by entropy; all arguments [R]."""
    weights = entropies + 1e-6
    return float(((engine - trainer).abs() * weights).sum() / weights.sum())


def step_kl(before: torch.Tensor, after: torch.Tensor) -> float:
    """Return the mean over positions of KL(before || after) in nats, of log-distributions [P, V]; a token that both
    exclude adds nothing."""
    if not len(before):
        return 0.0
    terms = before.double().exp() * (before.double() - after.double())
    return float(terms.masked_fill(before == -torch.inf, 0.0).sum(-1).mean())


def way_to(found: torch.Tensor, truth: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """Return how much of the way from the truth [R] to `other` [R] the log-probs found [R] lie, by least squares (0:
    nothing, 1: all), and its standard error where what else sets them apart has no direction."""
    way, apart = (other - truth).double(), (found - truth).double()
    length = way.square().sum()
    return float(apart @ way / length), float((apart.square().mean() / length).sqrt())


def serves_old(engine: torch.Tensor, sent: Unproven) -> bool:
    """Say whether an engine's log-probs [R] say that it computes with the version before and not with the one that was
    sent: it is farther from the new one than rounding explains, less than half as far from the old one, and so it is at
    nine of ten tokens that moved by more than rounding, `_FEWEST_TOKENS` at least: one unlikely token alone can be as
    far off by chance. Between versions that lie no farther apart than rounding only a receipt can tell."""
    if sent.before is None:
        return False

    def size(values: torch.Tensor) -> torch.Tensor:
        return values.double().square().mean(-1).sqrt()

    to_new, to_old, rounding = engine - sent.logprobs, engine - sent.before, size(sent.rounded - sent.logprobs)
    far, near = size(to_new), size(to_old)
    if not bool(((far > 2 * rounding) & (far > FLOOR) & (near < far / 2)).any()):
        return False
    moved = (sent.before - sent.logprobs).abs() > 2 * max(float(rounding), FLOOR)
    num_moved, num_old = int(moved.sum()), int((moved & (to_old.abs() < to_new.abs())).sum())
    return num_old >= max(_FEWEST_TOKENS, 0.9 * num_moved)


def representatives(names: Iterable[str], num_groups: int = 3) -> dict[str, list[str]]:
    """Return name → those it stands for, itself among them: parameters whose names differ in numbers alone (the same
    place in other layers, or other experts), in their order in at most `num_groups` groups, the middle one for each."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    found = {}
    for kind in kinds.values():
        number = min(num_groups, len(kind))
        cuts = [len(kind) * k // number for k in range(number + 1)]
        for group in (kind[start:end] for start, end in pairwise(cuts)):
            found[group[len(group) // 2]] = group
    return found


def noisy(value: torch.Tensor, scale: float, seed: int, index: int) -> torch.Tensor:
    """Return a parameter [...], the one of that index, with normal noise of `scale` times its own size."""
    size = float(value.float().square().mean().sqrt()) or 0.01  # first: it takes as much memory for a moment
    generator = torch.Generator(value.device).manual_seed(seed * 100_003 + index)
    noise = torch.randn(value.shape, generator=generator, device=value.device).to(value)
    return noise.mul_(scale * size).add_(value)
