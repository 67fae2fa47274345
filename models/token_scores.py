"""Log-prob and entropy of tokens from hidden states and an output head, in chunks: without logits for the whole batch.

Logits never stand for more than `MAX_SCORES` (tokens x vocabulary, or `LEAST_TOKENS` of them) at a time: beyond that,
chunks of tokens are computed, forgotten, and computed again in the backward pass (Chen et al. 2016), so that memory
does not grow with the tokens. Their softmax stands nowhere: a pass reads a chunk once, in float32, a GPU by a fused
kernel, a CPU in parts that its caches hold. `temperature` divides the logits, as in sampling.
"""

import logging
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, pad

from espalier.models.shapes import ROWS, missing

MAX_SCORES = {"cpu": 2**22, "cuda": 2**28}  # tokens x vocabulary at a time: in float32 16 MiB, 1 GiB
# Tokens of a chunk however large the vocabulary (151,936: 148 MiB). Each chunk reads the head and adds to all of its
# gradient, and what fits in one is not computed twice: 112 tokens on a CPU take 7.1 s, 27 of them at a time, 4.4 s with
# 110, 2.9 s in one chunk.
LEAST_TOKENS = 256
# Numbers of a chunk that are read at a time: 512 KiB in float32; 128 MiB on GPUs that cannot fuse.
PART = {"cpu": 2**17, "cuda": 2**25}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenScores:
    """About tokens [R], in float32: log-prob, entropy of the distribution it was drawn from, and whether it was the
    likeliest (0 or 1). Only log-probs and entropies have a graph."""

    logprobs: torch.Tensor
    entropies: torch.Tensor
    is_likeliest: torch.Tensor


class _ChunkedScores(torch.autograd.Function):
    """hidden [R, H], weight [V, H], bias [V] or None, targets [R] → [3, R], see `TokenScores`.

    With z the logits divided by the temperature and p = softmax(z): d log p(target) / dz = onehot - p, and
    d entropy / dz = -p (log p + entropy).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        max_scores: int,
    ) -> torch.Tensor:
        size = max(1, max_scores // weight.shape[0])
        is_kept = hidden.shape[0] <= size  # one chunk: its logits stay for the backward pass
        found = torch.empty(5, hidden.shape[0], dtype=torch.float32, device=hidden.device)
        kept = None
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, hidden.shape[0], size):
                rows = slice(start, start + size)
                logits = linear(hidden[rows], weight, bias)
                found[:, rows] = _read(logits, targets[rows], temperature)
                kept = logits if is_kept else None
                del logits  # before the next chunk's: two at once would be half of the peak
        ctx.save_for_backward(hidden, weight, bias, targets, found, kept)
        ctx.temperature, ctx.size = temperature, size
        ctx.set_materialize_grads(False)
        return found[:3].clone()  # what is saved is no output: its graph would hold itself

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, found, kept = ctx.saved_tensors
        gradient = gradients[0]
        if gradient is None:
            return (None,) * 6
        for_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and ctx.needs_input_grad[2] else None
        has_entropies = bool(gradient[1].any())
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, hidden.shape[0], ctx.size):
                rows = slice(start, start + ctx.size)
                logits = linear(hidden[rows], weight, bias) if kept is None else kept
                more = (gradient[1, rows], found[1, rows]) if has_entropies else ()
                given = (found[3, rows], found[4, rows], gradient[0, rows], *more)
                grads = _differentiate(logits, targets[rows], ctx.temperature, given, is_lent=kept is None)
                del logits
                if for_hidden is not None:
                    for_hidden[rows] = grads @ weight
                if for_weight is not None:
                    _add_product(for_weight, grads, hidden[rows])
                if for_bias is not None:
                    for_bias += grads.sum(0)
                del grads
        weights = (for_weight, for_bias)
        return (for_hidden, *(None if one is None else one.to(weight.dtype) for one in weights), None, None, None)


def _read(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return what `_read_rows` does of logits [R, V]."""
    if logits.is_cuda and _can_fuse():
        return _by_one_kernel(_read_rows)(logits, targets, temperature)
    return torch.cat([_read_rows(logits[part], targets[part], temperature) for part in _parts(logits)], dim=1)


def _read_rows(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the three scores, the highest logit, and the logarithm of the sum of exponentials of what lies below it,
    divided by the temperature [5, R], in float32."""
    places, raw = targets.unsqueeze(1), logits.float()
    highest = raw.amax(-1, keepdim=True)
    at_targets = raw.gather(1, places)
    below, chosen = raw - highest, at_targets - highest  # exactly 0 at the highest, however a kernel divides
    if temperature != 1:
        below, chosen = below.div_(temperature), chosen / temperature
    shares = below.exp()
    total = shares.sum(-1)
    logs = total.log()
    entropies = logs - shares.mul_(below).sum(-1) / total
    is_likeliest = (at_targets >= highest).squeeze(1).float()
    return torch.stack((chosen.squeeze(1) - logs, entropies, is_likeliest, highest.squeeze(1), logs))


def _differentiate(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, given: tuple[torch.Tensor, ...], is_lent: bool
) -> torch.Tensor:
    """Return the gradient [R, V] of logits, which it may be written over where they are lent; `given` [R]: see
    `_off_target`."""
    places = targets.unsqueeze(1)
    at_targets = _off_target(logits.gather(1, places), temperature, *given) + given[2].unsqueeze(1) / temperature
    if logits.is_cuda and _can_fuse():
        into = _by_one_kernel(_rounded)(logits, temperature, *given)
    else:
        into = logits if is_lent else torch.empty_like(logits)
        for part in _parts(logits):
            into[part] = _off_target(logits[part], temperature, *(value[part] for value in given))
    return into.scatter_(1, places, at_targets.to(logits.dtype))


def _off_target(
    logits: torch.Tensor,
    temperature: float,
    highest: torch.Tensor,
    sums: torch.Tensor,
    of_logprobs: torch.Tensor,
    of_entropies: torch.Tensor | None = None,
    entropies: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the gradient of logits [R, N] that are no targets, in float32, from what was read of whole rows and from
    the gradients of what they gave [R]."""
    logs = logits.float() - highest.unsqueeze(1)
    if temperature != 1:
        logs.div_(temperature)
    logs.sub_(sums.unsqueeze(1))
    factors = -of_logprobs.unsqueeze(1) / temperature
    if of_entropies is not None and entropies is not None:
        factors = factors - of_entropies.unsqueeze(1) / temperature * (logs + entropies.unsqueeze(1))
    return logs.exp_().mul_(factors)


def _rounded(logits: torch.Tensor, *given: Any) -> torch.Tensor:
    return _off_target(logits, *given).to(logits.dtype)


def _parts(logits: torch.Tensor) -> Iterator[slice]:
    """Yield rows that are read at a time: on a CPU those that its caches hold."""
    size = max(1, PART["cuda" if logits.is_cuda else "cpu"] // logits.shape[1])
    for start in range(0, len(logits), size):
        yield slice(start, start + size)


@cache
def _can_fuse() -> bool:
    """Say whether the GPU's kernels can be compiled here; warns where not: each operation then reads all logits."""
    own = os.environ.get("CC")
    has_compiler = any(map(shutil.which, [own] if own else ["clang", "gcc"]))
    has_headers = Path(sysconfig.get_path("include"), "Python.h").is_file()
    if find_spec("triton") and has_compiler and has_headers and torch.cuda.get_device_capability() >= (7, 0):
        return True
    log.warning("log-probs are computed by many kernels in place of one, which takes twice the time: one needs triton, "
                "gcc or clang, Python's headers, and a GPU of compute capability 7.0 or later")  # fmt: skip
    return False


@cache
def _by_one_kernel(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    compiled: Any = torch.compile(function)
    config: Any = torch._dynamo.config

    def run(*given: Any) -> torch.Tensor:
        with config.patch(recompile_limit=64):  # beyond its 8 nothing is fused, without a word; a thread has its own
            found: torch.Tensor = compiled(*given)
        return found

    return run


def _add_product(total: torch.Tensor, grads: torch.Tensor, hidden: torch.Tensor) -> None:
    """total [V, H] += gradsᵀ hidden, summed over chunks in float32 without a second [V, H]."""
    if grads.dtype == total.dtype:
        total.addmm_(grads.t(), hidden)
        return
    size = 8192
    for start in range(0, total.shape[0], size):
        rows = slice(start, start + size)
        total[rows] += grads[:, rows].t() @ hidden


def most_scores(device: str, vocabulary: int) -> int:
    """Return how many numbers, tokens x `vocabulary`, stand at a time on a kind of device."""
    return max(MAX_SCORES.get(device, MAX_SCORES["cpu"]), LEAST_TOKENS * vocabulary)


def chunked_scores(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    max_scores: int = 0,
) -> TokenScores:
    """Return scores of `targets` [R] from hidden states [R, H] and a head [V, H], in autocast's precision where it is
    on.

    At most `max_scores` (0: `most_scores`) logits, tokens x vocabulary, stand at a time.
    """
    device = hidden.device.type
    kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    limit = max_scores or most_scores(device, weight.shape[0])
    bias = None if bias is None else bias.to(kind)
    hidden, size = hidden.to(kind), len(targets)
    more = missing(size, ROWS, hidden)
    hidden, targets = pad(hidden, (0, 0, 0, more)), pad(targets, (0, more))
    scores = _ChunkedScores.apply(hidden, weight.to(kind), bias, targets, temperature, limit)[:, :size]
    return TokenScores(scores[0], scores[1], scores[2].detach())
