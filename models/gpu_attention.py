"""Attention over packed rows in one call, for GPUs: sequences of varying lengths, or blocks of a mask.

`flash` (the package flash-attn) and `varlen` (torch's own varlen attention) take all segments as sequences of their
own, causal and aligned at the end; the keys of a shared segment are repeated for every segment below it. `by_flex`
(torch's flex attention) repeats nothing: a mask says which segments see which. `best_kernel` says which one
`model.attention=auto` takes. `bash scripts/gpu_check.sh attention` compares them with the kernels for CPUs; on an H200
`varlen` and `by_flex` lie within 0.005 of the largest value, `flash` was not run.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.functional import pad

from espalier.data.batches.packing import Segments
from espalier.models.attention_kernels import BadAttention, How

log = logging.getLogger(__name__)

AUTO = "auto"
BLOCK = 128  # of flex attention: rows are rounded up to it
Tensors = tuple[torch.Tensor, ...]
Attend = Callable[[Tensors, Tensors, tuple[int, int], How], torch.Tensor]


@cache
def has_varlen() -> bool:
    """Say whether torch's varlen attention is here: it needs an NVIDIA GPU of Ampere or later. GPUs that are planned
    for and not here have it."""
    if find_spec("torch.nn.attention.varlen") is None:
        return False
    if not torch.cuda.is_available():
        return True
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability() >= (8, 0)


def best_kernel(device_type: str, kind: torch.dtype, head_size: int, how: How) -> str:
    """Return the kernel that `auto` computes packed rows by: `sdpa` on a CPU; on a CUDA GPU in half precision
    `varlen_attention`, and `flex_attention` where that cannot (soft caps, older GPUs, odd heads). In float32, with
    attention sinks and with dropout `sdpa` there too."""
    is_half = kind in (torch.float16, torch.bfloat16)
    if device_type != "cuda" or not is_half or how.sinks is not None or how.dropout:
        return "sdpa"
    fits = how.softcap is None and head_size <= 256 and head_size % 8 == 0
    return "varlen_attention" if fits and has_varlen() else "flex_attention"


def kernel_of(attention: str, device_type: str, is_bf16: bool) -> str:
    """Return the kernel of `model.attention` on a kind of device ("cpu", "cuda"), of an ordinary network where it is
    auto."""
    if attention != AUTO:
        return attention
    return best_kernel(device_type, torch.bfloat16 if is_bf16 else torch.float32, 128, How(1.0))


def flash(tensors: Tensors, borders: Tensors, longest: tuple[int, int], how: How) -> torch.Tensor:
    """Return [T, H, D] by flash-attention 2; `tensors`: queries [T, H, D], keys and values [K, H, D] of all sequences,
    one after the other; `borders`: where they begin and end; `longest` of queries and of keys."""
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    attended: torch.Tensor = flash_attn_varlen_func(
        *tensors,
        *borders,
        *longest,
        dropout_p=how.dropout,
        softmax_scale=how.scaling,
        causal=True,
        window_size=(-1, -1) if how.window is None else (how.window - 1, 0),
        softcap=how.softcap or 0.0,
    )
    return attended


def varlen(tensors: Tensors, borders: Tensors, longest: tuple[int, int], how: How) -> torch.Tensor:
    """Do the same by torch's varlen attention, which knows neither soft caps nor dropout."""
    from torch.nn.attention.varlen import varlen_attn

    if how.softcap is not None or how.dropout:
        raise BadAttention("torch's varlen attention has no soft caps and no dropout: set model.attention=sdpa")
    attend: Any = varlen_attn
    attended: torch.Tensor = attend(
        *tensors,
        *borders,
        *longest,
        scale=how.scaling,
        window_size=(-1, 0) if how.window is None else (how.window - 1, 0),
        enable_gqa=tensors[0].shape[1] != tensors[1].shape[1],
    )
    return attended


def _attend(
    attend: Attend, tensors: Tensors, num_queries: Sequence[int], num_keys: Sequence[int], how: How
) -> torch.Tensor:
    if how.sinks is not None:
        raise BadAttention("attention sinks are computed by matrix products alone: set model.attention=sdpa")
    kind = tensors[2].dtype
    if kind not in (torch.float16, torch.bfloat16):
        _warn_of_bf16(kind)
        kind = torch.bfloat16
    borders = tuple(
        torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32).to(tensors[0].device, non_blocking=True)
        for lengths in (num_queries, num_keys)
    )
    return attend(tuple(tensor.to(kind) for tensor in tensors), borders, (max(num_queries), max(num_keys)), how)


@lru_cache(maxsize=1)
def _warn_of_bf16(kind: torch.dtype) -> None:
    log.warning("attention of %s is computed in bfloat16, the kernel knows no other: set precision=bf16, or "
                "model.attention=sdpa for the whole precision", str(kind).removeprefix("torch."))  # fmt: skip


def by_sequences(attend: Attend) -> Callable[..., torch.Tensor]:
    """Return a function of packed rows: [1, T, H, D] of query, key, value [1, H, T, D]."""

    def packed(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, how: How
    ) -> torch.Tensor:
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        positions, num_keys = key_layout(segments)
        if segments.num_unread or any(segments.above):
            positions = positions.to(key.device, non_blocking=True)
            key, value = key.index_select(0, positions), value.index_select(0, positions)
        queries = query[: sum(segments.lengths)]
        attended = _attend(attend, (queries, key, value), segments.lengths, num_keys, how).to(value.dtype)
        return pad(attended, (0, 0, 0, 0, 0, segments.num_unread)).unsqueeze(0)

    return packed


def padded_by_sequences(attend: Attend) -> Callable[..., torch.Tensor]:
    """Return a function of padded rows with a mask [B, T] (None: no padding): packed for the kernel, and padded
    again."""

    def padded(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        how: How,
        **foreign: Any,
    ) -> torch.Tensor:
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        kept = torch.ones(query.shape[:2], dtype=torch.bool, device=query.device) if mask is None else mask.bool()
        lengths = kept.sum(-1).tolist()
        attended = torch.zeros_like(query)
        rows = tuple(tensor[kept] for tensor in (query, key, value))
        attended[kept] = _attend(attend, rows, lengths, lengths, how).to(attended.dtype)
        return attended

    return padded


def key_layout(segments: Segments) -> tuple[torch.Tensor, list[int]]:
    """Return (where the keys of all segments lie [K], segment after segment; the number of keys of each)."""
    ends = torch.tensor(segments.lengths).cumsum(0).tolist()
    runs = [torch.arange(end - length, end) for end, length in zip(ends, segments.lengths, strict=True)]
    chains = [[*above, own] for own, above in enumerate(segments.above)]
    positions = torch.cat([runs[segment] for chain in chains for segment in chain])
    return positions, [sum(segments.lengths[segment] for segment in chain) for chain in chains]


@lru_cache(maxsize=8)  # for the layers of a pass
@torch.inference_mode(False)
def flex_mask(segments: Segments, window: int | None, device: torch.device) -> Any:
    """Return flex attention's blocks of a packed row, rounded up to `BLOCK`: a query sees the keys of its own segment
    up to itself, and of the segments above it; what nobody reads sees itself."""
    from torch.nn.attention.flex_attention import create_block_mask

    num = len(segments.lengths)
    size = sum(segments.lengths) + segments.num_unread
    size += -size % BLOCK
    lengths = torch.tensor([*segments.lengths, size - sum(segments.lengths)])
    owners = torch.repeat_interleave(torch.arange(num + 1), lengths).to(device)
    sees, before = torch.zeros(num + 1, num + 1, dtype=torch.bool), torch.zeros(num + 1, dtype=torch.long)
    for own, above in enumerate(segments.above):
        sees[own, list(above)] = True
        before[own] = sum(segments.lengths[segment] for segment in above)
    starts = lengths.cumsum(0) - lengths
    places = (torch.arange(size) - starts.repeat_interleave(lengths) + before.repeat_interleave(lengths)).to(device)
    sees = sees.to(device)

    def visible(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        own, other = owners[query], owners[key]
        seen = (query == key) | (sees[own, other] | ((own == other) & (query >= key) & (own < num)))
        return seen if window is None else seen & (places[query] - places[key] < window)

    return create_block_mask(visible, None, None, size, size, device=device, BLOCK_SIZE=BLOCK)


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)  # type: ignore[no-any-return]


def by_flex(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, how: How) -> torch.Tensor:
    """Return [1, T, H, D] of packed rows by flex attention, compiled on a GPU; on a CPU, where it is for tests, it has
    no gradient."""
    from torch.nn.attention.flex_attention import flex_attention

    if how.sinks is not None or how.dropout:
        raise BadAttention("flex attention has no attention sinks and no dropout here: set model.attention=sdpa")
    size, cap = query.shape[2], how.softcap
    mask = flex_mask(segments, how.window, query.device)
    rows = [pad(tensor.to(value.dtype), (0, 0, 0, -size % BLOCK)) for tensor in (query, key, value)]

    def capped(score: torch.Tensor, *_: Any) -> torch.Tensor:
        assert cap is not None
        return cap * torch.tanh(score / cap)

    attend: Any = _compiled() if query.device.type == "cuda" else flex_attention
    attended = attend(*rows, score_mod=None if cap is None else capped, block_mask=mask, scale=how.scaling,
                      enable_gqa=query.shape[1] != key.shape[1])  # fmt: skip
    found: torch.Tensor = attended[:, :, :size].transpose(1, 2)
    return found
