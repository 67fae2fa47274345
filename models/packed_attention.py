"""Attention over packed rows (`data.batches.packing`): padding-free and exact, on the kernel that the user chose, or,
with `auto`, on the fastest one that the device, the precision and the layer allow (`models.gpu_attention.best_kernel`).

`attention_name("sdpa")` is the name under which transformers finds it; padded input (a model called without
`segments`) goes to transformers' own function for that kernel, so that one model serves both. Every segment attends
on its own, to the keys of the segments above it and to its own up to itself: no mask over the whole row exists, and
no token of another example is within reach. On CPUs a loop over segments is faster than padding them into one
call where they are long, and slower where they are short and many (a group's rollouts): short ones of about one
size are padded to it and computed at once. GPUs take all segments in one call (`models.gpu_attention`).

Sliding windows, soft caps and attention sinks are computed (`models.attention_kernels`), window by window: a layer's
window is compared with the longest row, not with the packed length. What else a network hands to its attention
function is refused by name; what it does not hand over, the check at loading finds (`models.packing_check`).
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from espalier.data.batches.packing import Segments
from espalier.models.attention_kernels import (
    BadAttention,
    How,
    Kernel,
    eager_batch,
    eager_kernel,
    eager_padded,
    sdpa_batch,
    sdpa_kernel,
    sdpa_padded,
)
from espalier.models.gpu_attention import AUTO, best_kernel, by_flex, by_sequences, flash, padded_by_sequences, varlen
from espalier.models.shapes import TOGETHER

log = logging.getLogger(__name__)

PREFIX = "packed_"
KERNELS = (AUTO, "eager", "sdpa", "varlen_attention", "flex_attention", "flash_attention_2")
# Arguments of transformers' attention functions that change the scores and are not built here.
_FOREIGN = ("position_bias",)
# Segments that are computed at once: at least so many, of at most so many queries x keys, padded to these multiples.
_FEWEST, _LARGEST, _STEP_QUERIES, _STEP_KEYS = 4, 96 * 192, 16, 32


@dataclass(frozen=True)
class Together:
    """Short segments of about one size: where their queries [N, Q] and keys [N, K] lie (0 where there is none), which
    queries are there [N, Q], and what they see [N, 1, Q, K]; a query that is not there sees everything."""

    queries: torch.Tensor
    keys: torch.Tensor
    is_query: torch.Tensor
    visible: torch.Tensor


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # kept over passes, of which some have gradients
def _plan(segments: Segments, window: int | None, device: torch.device) -> tuple[list[Together], list[int]]:
    """Return (those that are computed at once, the others); `window`: how many keys a query sees at most, itself
    included."""
    ends = torch.tensor(segments.lengths).cumsum(0).tolist()
    runs = [range(end - length, end) for end, length in zip(ends, segments.lengths, strict=True)]
    sizes = defaultdict(list)
    for own, above in enumerate(segments.above):
        num_queries = segments.lengths[own]
        num_keys = num_queries + sum(segments.lengths[segment] for segment in above)
        sizes[-(-num_queries // _STEP_QUERIES), -(-num_keys // _STEP_KEYS)].append((own, num_queries, num_keys))
    groups, alone = [], []
    for (num_queries, num_keys), members in sizes.items():
        shape = (num_queries * _STEP_QUERIES, num_keys * _STEP_KEYS)
        if len(members) < _FEWEST or shape[0] * shape[1] > _LARGEST:
            alone += [own for own, _, _ in members]
            continue
        num_rows = len(members) + (-len(members) % TOGETHER if device.type == "cpu" else 0)
        queries, keys = (torch.zeros(num_rows, size, dtype=torch.long) for size in shape)
        is_query = torch.zeros(queries.shape, dtype=torch.bool)
        for row, (own, own_queries, own_keys) in enumerate(members):
            chain = [place for segment in (*segments.above[own], own) for place in runs[segment]]
            queries[row, :own_queries] = torch.tensor(runs[own])
            keys[row, :own_keys] = torch.tensor(chain)
            is_query[row, :own_queries] = True
        before = torch.zeros(num_rows, dtype=torch.long)
        before[: len(members)] = torch.tensor([own_keys - own_queries for _, own_queries, own_keys in members])
        last_seen = torch.arange(shape[0]) + before.unsqueeze(1)  # [N, Q], as a place among the keys
        visible = torch.arange(shape[1]) <= last_seen.unsqueeze(2)
        if window is not None:
            visible &= torch.arange(shape[1]) > last_seen.unsqueeze(2) - window
        visible |= ~is_query.unsqueeze(2)
        groups.append(Together(*(part.to(device) for part in (queries, keys, is_query, visible.unsqueeze(1)))))
    return groups, sorted(alone)


def by_segments(
    kernels: tuple[Kernel, Kernel],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    how: How,
) -> torch.Tensor:
    """Return [1, T, H, D]: each segment with the keys of those above it."""
    kernel, batch = kernels
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    query, key = query.to(value.dtype), key.to(value.dtype)
    groups, alone = _plan(segments, how.window, value.device)
    positions, outputs = [], []
    if groups:
        rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    for group in groups:
        picked = [
            tensor.index_select(0, at.flatten()).view(*at.shape, *tensor.shape[1:]).transpose(1, 2)
            for tensor, at in zip(rows, (group.queries, group.keys, group.keys), strict=True)
        ]
        positions.append(group.queries[group.is_query])
        outputs.append(batch(*picked, group.visible, how).transpose(1, 2)[group.is_query])
    sizes = (*segments.lengths, segments.num_unread)
    parts = [tensor.split(sizes, dim=2) for tensor in (query, key, value)] if alone else []
    for own in alone:
        above = segments.above[own]
        queries, keys, values = (part[own] for part in parts)
        if above:
            keys, values = (torch.cat([*(part[s] for s in above), part[own]], dim=2) for part in parts[1:])
        outputs.append(kernel(queries, keys, values, how)[0].transpose(0, 1))
    outputs.append(value.new_zeros(segments.num_unread, value.shape[1], value.shape[3]))
    if not groups:
        return torch.cat(outputs).unsqueeze(0)
    ends = torch.tensor(segments.lengths).cumsum(0).tolist()
    positions += [torch.arange(ends[own] - segments.lengths[own], ends[own], device=value.device) for own in alone]
    positions.append(torch.arange(ends[-1], ends[-1] + segments.num_unread, device=value.device))
    attended = torch.cat(outputs)
    return torch.empty_like(attended).index_copy(0, torch.cat(positions), attended).unsqueeze(0)


@dataclass
class Calls:
    """The windows (None: none) of the layers of a pass that attend through this module, in order."""

    windows: list[int | None]


_calls: list[Calls] = []


@contextmanager
def watched() -> Iterator[Calls]:
    """Within: every call of a layer is noted."""
    calls = Calls([])
    _calls.append(calls)
    try:
        yield calls
    finally:
        _calls.remove(calls)


class _Attention:
    """What transformers calls in every layer, under one name a kernel."""

    def __init__(self, packed: Callable[..., torch.Tensor], padded: Callable[..., torch.Tensor]):
        self.packed = packed
        self.padded = padded

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        segments: Segments | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **foreign: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return (attended [B, T, H, D], None); query [B, H, T, D]."""
        for calls in _calls:
            calls.windows.append(sliding_window)
        strange = [name for name in _FOREIGN if foreign.get(name) is not None]
        if strange:
            raise BadAttention(f"{type(module).__name__} attends with {', '.join(strange)}, which is not built here")
        longest = segments.longest if segments is not None else query.shape[2]
        window = sliding_window if sliding_window is not None and sliding_window < longest else None
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        how = How(scale, dropout, window, softcap, s_aux)
        if segments is None:
            return self.padded(module, query, key, value, attention_mask, how, **foreign), None
        return self.packed(query, key, value, segments, how), None


def _segmented(*kernels: Kernel) -> Callable[..., torch.Tensor]:
    return lambda query, key, value, segments, how: by_segments(kernels, query, key, value, segments, how)  # type: ignore[arg-type]


_by_sdpa = _segmented(sdpa_kernel, sdpa_batch)
_CHOSEN = {"sdpa": _by_sdpa, "flex_attention": by_flex, "varlen_attention": by_sequences(varlen)}


def by_best(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, how: How) -> torch.Tensor:
    """Return [1, T, H, D] by the kernel that `best_kernel` names, said in the log once."""
    name = best_kernel(value.device.type, value.dtype, value.shape[-1], how)
    _say_kernel(name, str(value.dtype).removeprefix("torch."), how.softcap is not None)
    attended: torch.Tensor = _CHOSEN[name](query, key, value, segments, how)
    return attended


@lru_cache(maxsize=8)
def _say_kernel(name: str, kind: str, has_softcap: bool) -> None:
    log.info("model.attention=auto: packed rows of %s%s are computed by %s", kind,
             " with soft caps" if has_softcap else "", name)  # fmt: skip


for _kernel, _packed, _padded in (
    (AUTO, by_best, sdpa_padded),
    ("sdpa", _by_sdpa, sdpa_padded),
    ("eager", _segmented(eager_kernel, eager_batch), eager_padded),
    ("flex_attention", by_flex, sdpa_padded),
    ("flash_attention_2", by_sequences(flash), padded_by_sequences(flash)),
    ("varlen_attention", by_sequences(varlen), padded_by_sequences(varlen)),
):
    AttentionInterface.register(PREFIX + _kernel, _Attention(_packed, _padded))  # type: ignore[no-untyped-call]
    _mask = {AUTO: "sdpa", "flex_attention": "sdpa", "varlen_attention": "flash_attention_2"}.get(_kernel, _kernel)
    AttentionMaskInterface.register(PREFIX + _kernel, ALL_MASK_ATTENTION_FUNCTIONS[_mask])  # type: ignore[no-untyped-call]


def attention_name(kernel: str) -> str:
    """Return the name to load a model with; of `auto` without a GPU that of sdpa. Raises BadAttention on an unknown
    kernel, and on one that this machine lacks."""
    if kernel not in KERNELS:
        raise BadAttention(f"model.attention must be one of {', '.join(KERNELS)}, got '{kernel}'")
    if kernel == AUTO:
        return PREFIX + (AUTO if torch.cuda.is_available() else "sdpa")
    if kernel not in ("eager", "sdpa") and not torch.cuda.is_available():
        raise BadAttention(f"model.attention={kernel} needs a CUDA GPU: set model.attention=sdpa")
    if kernel == "flash_attention_2" and not find_spec("flash_attn"):
        raise BadAttention("model.attention=flash_attention_2 needs the package flash-attn (docs/training.md has its "
                           "line): set model.attention=varlen_attention, which is torch's own")  # fmt: skip
    return PREFIX + kernel


def takes_packed_rows(model: Any) -> bool:
    """Say whether a transformers model attends through this module."""
    name = getattr(getattr(model, "config", None), "_attn_implementation", None) or ""
    return name.startswith(PREFIX)
