"""Attention of one segment of a packed row, of several at once, and of padded rows, as `models.packed_attention` needs
it: by torch's fused kernel and by matrix products.

A query sees the keys up to its own, in a sliding window (Beltagy et al. 2020) only the last `window` of them. A soft
cap c turns scores s into c tanh(s / c) (Gemma 2). A sink (Xiao et al. 2023, learned in GPT-OSS) is one more score a
head, which takes its part of the softmax and gives nothing. The fused kernel has neither: both are computed by matrix
products, whichever kernel is asked for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.nn.functional import dropout as drop
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from espalier.models.shapes import SEGMENT, missing

Kernel = Callable[..., torch.Tensor]


class BadAttention(ValueError):
    """An attention kernel that does not exist, or a network whose attention cannot be packed."""

    exit_code = 2


@dataclass(frozen=True)
class How:
    """What a layer does to its scores; `sinks` [H]."""

    scaling: float
    dropout: float = 0.0
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the fused kernel can compute it."""
        return self.softcap is None and self.sinks is None


@lru_cache(maxsize=64)  # for the layers of a pass: behind a shared prompt nearly every segment has a size of its own
@torch.inference_mode(False)  # kept over passes, of which some have gradients
def _visible(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return [queries, keys] bool: the queries are the last of the keys."""
    everything = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    seen = everything.tril(num_keys - num_queries)
    return seen if window is None else seen.triu(num_keys - num_queries - window + 1)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _hidden(
    num_queries: int, num_keys: int, before: int, window: int | None, kind: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return [queries, keys]: 0 where the query sees the key, else minus infinity; `before` keys stand before the
    queries. A query that sees none, which is one that was added, sees all: a softmax of nothing would be no number."""
    seen = _visible(num_queries, before + num_queries, window, device)
    seen = pad(seen, (0, num_keys - seen.shape[1])) if num_keys > seen.shape[1] else seen[:, :num_keys]
    seen = seen | ~seen.any(-1, keepdim=True)
    return torch.zeros(seen.shape, dtype=kind, device=device).masked_fill(~seen, float("-inf"))


def _capped(scores: torch.Tensor, how: How) -> torch.Tensor:
    return scores if how.softcap is None else how.softcap * torch.tanh(scores / how.softcap)


def _attention_probs(scores: torch.Tensor, how: How) -> torch.Tensor:
    """Return softmax of [..., H, Q, K] over the keys and the head's sink; torch sums it in float32."""
    if how.sinks is None:
        return torch.softmax(scores, dim=-1)
    sinks = how.sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]


def sdpa_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: How) -> torch.Tensor:
    """Return one segment; query [1, H, Q, D], key and value [1, H, K, D]; torch's fused kernel."""
    if not how.is_plain:
        return eager_kernel(query, key, value, how)
    is_simple = query.shape[2] == key.shape[2] and how.window is None
    mask = None if is_simple else _visible(query.shape[2], key.shape[2], how.window, query.device)
    attended: torch.Tensor = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=how.dropout, is_causal=is_simple, scale=how.scaling
    )
    return attended


def eager_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: How) -> torch.Tensor:
    """Attend in one segment by matrix products, mask and scaling inside the first one where nothing comes between them.

    Query [1, H, Q, D], key and value [1, H, K, D]; gives [1, H, Q, D].

    On CPUs in bf16 the fastest there is: half the time of the fused kernel for segments of 200 tokens. Rounded up
    (`models.shapes`) where that saves kernels: no query sees the keys behind its own, which the added ones are.
    """
    size, before = query.shape[2], key.shape[2] - query.shape[2]
    query, key, value = (pad(part, (0, 0, 0, missing(part.shape[2], SEGMENT, value))) for part in (query, key, value))
    mask = _hidden(query.shape[2], key.shape[2], before, how.window, value.dtype, query.device)
    if how.softcap is None:
        scores = torch.baddbmm(mask.expand(query.shape[1], -1, -1), query[0], key[0].transpose(1, 2), alpha=how.scaling)
    else:
        scores = _capped(torch.bmm(query[0], key[0].transpose(1, 2)) * how.scaling, how) + mask
    probs = _attention_probs(scores, how).to(value.dtype)
    attended = torch.bmm(drop(probs, how.dropout) if how.dropout else probs, value[0])
    return attended[:, :size].unsqueeze(0)


def sdpa_batch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, how: How
) -> torch.Tensor:
    """Return several segments at once; query [N, H, Q, D], key and value [N, H, K, D], visible [N, 1, Q, K] bool."""
    if not how.is_plain:
        return eager_batch(query, key, value, visible, how)
    attended: torch.Tensor = scaled_dot_product_attention(
        query, key, value, attn_mask=visible, dropout_p=how.dropout, scale=how.scaling
    )
    return attended


def eager_batch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, how: How
) -> torch.Tensor:
    """Attend in several segments by matrix products; shapes as of `sdpa_batch`, gives [N, H, Q, D]."""
    scores = _capped((query * how.scaling) @ key.transpose(2, 3), how)
    scores = scores.masked_fill_(~visible, float("-inf"))  # no second copy
    probs = _attention_probs(scores, how).to(value.dtype)
    return (drop(probs, how.dropout) if how.dropout else probs) @ value


def eager_padded(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    how: How,
    **foreign: Any,
) -> torch.Tensor:
    """Return plain attention of padded rows [B, H, T, D] with a mask (additive, or bool: what is seen), softmax in
    float32; [B, T, H, D]. The mask holds the window."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = _capped((query @ key.transpose(2, 3)) * how.scaling, how)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    probs = _attention_probs(scores.float(), how).to(value.dtype)
    return (drop(probs, how.dropout) @ value).transpose(1, 2).contiguous()


def sdpa_padded(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    how: How,
    **foreign: Any,
) -> torch.Tensor:
    """Attend in padded rows [B, H, T, D] by transformers' own function, which knows neither soft caps nor sinks: those
    by matrix products. Gives [B, T, H, D]."""
    if how.is_plain:
        named = {"scaling": how.scaling, "dropout": how.dropout, **foreign}
        attended: torch.Tensor = sdpa_attention_forward(module, query, key, value, mask, **named)[0]
        return attended
    is_causal = foreign.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if mask is None and is_causal and query.shape[2] > 1:  # left out where it would say nothing else
        mask = _visible(query.shape[2], key.shape[2], how.window, query.device)
    return eager_padded(module, query, key, value, mask, how)
