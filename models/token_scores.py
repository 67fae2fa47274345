"""Log-prob and entropy of tokens from hidden states and an output head, in chunks: without logits for the whole batch.

Logits never stand for more than `MAX_SCORES` (tokens x vocabulary, or `LEAST_TOKENS` of them) at a time: beyond that,
chunks of tokens are computed, forgotten, and computed again in the backward pass (Chen et al. 2016), so that memory
does not grow with the tokens. Their softmax stands nowhere: a pass reads a chunk once, in float32, a GPU by a fused
kernel, a CPU in parts that its caches hold. `temperature` divides the logits, as in sampling.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.functional import linear, pad

from espalier.models.shapes import ROWS, missing

MAX_SCORES = {"cpu": 2**22, "cuda": 2**28}  # tokens x vocabulary at a time: in float32 16 MiB, 1 GiB
# Tokens of a chunk however large the vocabulary (151,936: 148 MiB). Each chunk reads the head and adds to all of its
# gradient, and what fits in one is not computed twice: 112 tokens on a CPU take 7.1 s, 27 of them at a time, 4.4 s with
# 110, 2.9 s in one chunk.
LEAST_TOKENS = 256
PART = 2**17  # numbers of a chunk that a CPU reads at a time: 512 KiB


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
        found = torch.empty(4, hidden.shape[0], dtype=torch.float32, device=hidden.device)
        kept = None
        for start in range(0, hidden.shape[0], size):
            rows = slice(start, start + size)
            logits = linear(hidden[rows], weight, bias)
            found[:, rows] = _read(logits, targets[rows], temperature)
            kept = logits if is_kept else None
            del logits  # before the next chunk's: two at once would be half of the peak
        scores, sums = found[:3].clone(), found[3]
        ctx.save_for_backward(hidden, weight, bias, targets, scores[1], sums, kept)
        ctx.temperature, ctx.size = temperature, size
        ctx.set_materialize_grads(False)
        return scores

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, entropies, sums, kept = ctx.saved_tensors
        gradient = gradients[0]
        if gradient is None:
            return (None,) * 6
        for_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and ctx.needs_input_grad[2] else None
        has_entropies = bool(gradient[1].any())
        for start in range(0, hidden.shape[0], ctx.size):
            rows = slice(start, start + ctx.size)
            logits = linear(hidden[rows], weight, bias) if kept is None else kept
            into = logits if kept is None else torch.empty_like(kept)
            more = (gradient[1, rows], entropies[rows]) if has_entropies else ()
            grads = _differentiate(logits, into, targets[rows], ctx.temperature, sums[rows], gradient[0, rows], *more)
            del logits, into
            if for_hidden is not None:
                for_hidden[rows] = grads @ weight
            if for_weight is not None:
                _add_product(for_weight, grads, hidden[rows])
            if for_bias is not None:
                for_bias += grads.sum(0)
            del grads
        given = (for_weight, for_bias)
        weights = (None if value is None else value.to(weight.dtype) for value in given)
        return (for_hidden, *weights, None, None, None)


def _read(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the three scores and the logarithm of the summed exponentials [4, R] of logits [R, V], in float32."""
    if logits.is_cuda:
        return _by_one_kernel(_read_rows)(logits, targets, temperature)
    return torch.cat([_read_rows(logits[part], targets[part], temperature) for part in _parts(logits)], dim=1)


def _read_rows(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    divided = logits.float() / temperature if temperature != 1 else logits.float()
    highest = divided.amax(-1, keepdim=True)
    chosen = divided.gather(1, targets.unsqueeze(1)) - highest
    below = divided - highest
    shares = below.exp()
    total = shares.sum(-1)
    logs = total.log()
    entropies = logs - torch.linalg.vecdot(shares, below) / total
    chosen = chosen.squeeze(1)
    return torch.stack((chosen - logs, entropies, (chosen >= 0).float(), highest.squeeze(1) + logs))


def _differentiate(
    logits: torch.Tensor, into: torch.Tensor, targets: torch.Tensor, temperature: float, *given: torch.Tensor
) -> torch.Tensor:
    """Return the gradient [R, V] of logits, on a CPU `into` those or another tensor; `given` [R]: see `_off_target`."""
    places = targets.unsqueeze(1)
    at_targets = _off_target(logits.gather(1, places), temperature, *given) + given[1].unsqueeze(1) / temperature
    if logits.is_cuda:
        into = _by_one_kernel(_rounded)(logits, temperature, *given)
    else:
        for part in _parts(logits):
            into[part] = _off_target(logits[part], temperature, *(value[part] for value in given))
    return into.scatter_(1, places, at_targets.to(logits.dtype))


def _off_target(
    logits: torch.Tensor,
    temperature: float,
    sums: torch.Tensor,
    of_logprobs: torch.Tensor,
    of_entropies: torch.Tensor | None = None,
    entropies: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the gradient of logits [R, N] that are no targets, in float32, from what was read of whole rows and from
    the gradients of what they gave [R]."""
    divided = logits.float() / temperature if temperature != 1 else logits.float()
    logs = divided - sums.unsqueeze(1)
    factors = -of_logprobs.unsqueeze(1) / temperature
    if of_entropies is None or entropies is None:
        return logs.exp_().mul_(factors)
    factors = factors - of_entropies.unsqueeze(1) / temperature * (logs + entropies.unsqueeze(1))
    return logs.exp_().mul_(factors)


def _rounded(logits: torch.Tensor, *given: Any) -> torch.Tensor:
    return _off_target(logits, *given).to(logits.dtype)


def _parts(logits: torch.Tensor) -> Iterator[slice]:
    """Yield rows that a CPU reads at a time, which its caches hold."""
    size = max(1, PART // logits.shape[1])
    for start in range(0, len(logits), size):
        yield slice(start, start + size)


@cache
def _by_one_kernel(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return it fused for a GPU, whose operations would each read all logits; as it is without what compiles it."""
    has_compiler = any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang")))
    return torch.compile(function) if find_spec("triton") and has_compiler else function


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
