"""Log-prob and entropy of tokens from hidden states and an output head, in chunks: without logits for the whole batch.

The float32 softmax never stands for more than `MAX_SCORES` (tokens x vocabulary, or `LEAST_TOKENS` of them) at a time:
beyond that, chunks of tokens are computed, forgotten, and computed again in the backward pass (Chen et al. 2016), so
that memory does not grow with the tokens. `temperature` divides the logits, as in sampling.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear, pad

from espalier.models.shapes import ROWS, missing

MAX_SCORES = {"cpu": 2**22, "cuda": 2**28}  # tokens x vocabulary in float32 at a time: 16 MiB, 1 GiB
# Tokens of a chunk however large the vocabulary (151,936: 148 MiB). Each chunk reads the head and adds to all of its
# gradient, and what fits in one is not computed twice: 112 tokens on a CPU take 7.1 s, 27 of them at a time, 4.4 s with
# 110, 2.9 s in one chunk.
LEAST_TOKENS = 256


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
        is_kept = hidden.shape[0] <= size  # one chunk: its softmax stays for the backward pass
        scores = torch.empty(3, hidden.shape[0], dtype=torch.float32, device=hidden.device)
        kept = None
        for start in range(0, hidden.shape[0], size):
            rows = slice(start, start + size)
            probs, scores[:, rows] = _scores(hidden[rows], weight, bias, targets[rows], temperature)
            kept = probs if is_kept else None
            del probs  # before the next chunk's: two at once would be half of the peak
        ctx.save_for_backward(hidden, weight, bias, targets, scores[1], kept)
        ctx.temperature, ctx.size = temperature, size
        ctx.set_materialize_grads(False)
        return scores

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, entropies, kept = ctx.saved_tensors
        gradient = gradients[0]
        if gradient is None:
            return (None,) * 6
        for_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and ctx.needs_input_grad[2] else None
        has_entropies = bool(gradient[1].any())
        for start in range(0, hidden.shape[0], ctx.size):
            rows = slice(start, start + ctx.size)
            probs = kept
            if probs is None:
                probs, _ = _scores(hidden[rows], weight, bias, targets[rows], ctx.temperature)
            grads = probs * -gradient[0, rows].unsqueeze(1)
            if has_entropies:
                grads -= _entropy_grads(probs, gradient[1, rows], entropies[rows])
            del probs
            grads.scatter_add_(1, targets[rows].unsqueeze(1), gradient[0, rows].unsqueeze(1))
            grads = grads.div_(ctx.temperature).to(hidden.dtype) if ctx.temperature != 1 else grads.to(hidden.dtype)
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


def _scores(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (softmax [R, V], the three scores [3, R]) of a chunk, in float32."""
    logits = linear(hidden, weight, bias).float()
    if temperature != 1:
        logits = logits / temperature
    highest = logits.max(-1, keepdim=True).values
    chosen = logits.gather(1, targets.unsqueeze(1)).squeeze(1)
    logits = logits - highest
    probs = logits.exp()
    sums = probs.sum(-1, keepdim=True)
    probs /= sums
    logs = sums.squeeze(1).log()
    entropies = logs - torch.linalg.vecdot(probs, logits)
    logprobs = chosen - highest.squeeze(1) - logs
    return probs, torch.stack((logprobs, entropies, (chosen >= highest.squeeze(1)).float()))


def _entropy_grads(probs: torch.Tensor, gradient: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
    """Return minus the entropies' part [R, V] of the gradient."""
    logs = probs.clamp_min(1e-38).log()
    return gradient.unsqueeze(1) * probs * (logs + entropies.unsqueeze(1))


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

    At most `max_scores` (0: `most_scores`) numbers, tokens x vocabulary, stand in float32 at a time.
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
