"""Packed attention by every kernel of the device beside the float32 loop over segments on the CPU: outputs, gradients,
milliseconds of the forward pass and of both.

Rows are pairs with a shared prompt. Errors are the largest absolute difference over the largest absolute value; in bf16
a few thousandths are rounding. On a CPU flex attention has no gradient, and the other kernels for GPUs are not there.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch

from benchmarks.gpu.rows import Row
from espalier.data.batches.packing import PackedRows, pack_rows
from espalier.models.attention_kernels import How, eager_batch, eager_kernel, sdpa_batch, sdpa_kernel
from espalier.models.gpu_attention import by_flex, by_sequences, flash, varlen
from espalier.models.packed_attention import by_segments


@dataclass(frozen=True)
class Size:
    """`pairs` of rows of `prompt` and twice `answer` tokens."""

    pairs: int
    prompt: int
    answer: int
    heads: int
    kv_heads: int
    head_size: int


REAL, SMALL = Size(6, 1536, 576, 32, 8, 128), Size(2, 24, 10, 4, 2, 16)
Attend = Callable[..., torch.Tensor]
Found = list[torch.Tensor]


def rows_of(size: Size) -> PackedRows:
    """Return the pairs, packed."""
    rows, first = [], 0
    for _ in range(size.pairs):
        prompt = list(range(first, first + size.prompt))
        for side in range(2):
            start = first + size.prompt + side * size.answer
            rows.append([*prompt, *range(start, start + size.answer)])
        first += size.prompt + 2 * size.answer
    return pack_rows(rows)


def kernels(is_gpu: bool) -> dict[str, Attend | str]:
    """Return the functions by their names, or why one is not there."""
    return {
        "sdpa, segment by segment": lambda *given: by_segments((sdpa_kernel, sdpa_batch), *given),
        "flex_attention": by_flex,
        "varlen_attention": by_sequences(varlen) if is_gpu else "no GPU",
        "flash_attention_2": "no GPU" if not is_gpu else by_sequences(flash) if find_spec("flash_attn") else (
            "flash-attn is not installed"),
    }  # fmt: skip


def _run(attend: Attend, tensors: list[torch.Tensor], packed: PackedRows, scale: float, has_gradient: bool) -> Found:
    given = [tensor.clone().requires_grad_(has_gradient) for tensor in tensors]
    attended = attend(*given, packed.segments, How(scale)).float()
    if not has_gradient:
        return [attended]
    weights = torch.linspace(-1, 1, attended.numel(), device=attended.device).view_as(attended)
    (attended * weights).sum().backward()  # type: ignore[no-untyped-call]
    return [attended.detach(), *(tensor.grad.float() for tensor in given if tensor.grad is not None)]


def _error(found: Found, wanted: Found) -> float:
    pairs = zip(found, wanted, strict=True)
    return max(float((one.cpu() - other).abs().max() / other.abs().max()) for one, other in pairs)


def _milliseconds(work: Callable[[], Found], times: int, is_gpu: bool) -> float:
    """Return the median."""
    seconds = []
    for _ in range(times):
        if is_gpu:
            torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        if is_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return round(1000 * median(seconds), 3)


def measure(is_rehearsal: bool, folder: Path) -> list[Row]:
    """Compare all kernels. Raises SystemExit where one is wrong."""
    size, is_gpu = (SMALL, False) if is_rehearsal else (REAL, True)
    device = torch.device("cuda" if is_gpu else "cpu")
    packed, draws = rows_of(size), torch.Generator().manual_seed(0)
    num = len(packed.ids)
    shapes = [(1, heads, num, size.head_size) for heads in (size.heads, size.kv_heads, size.kv_heads)]
    tensors = [torch.randn(shape, generator=draws).bfloat16().float() for shape in shapes]
    scale = size.head_size**-0.5
    loop: Attend = lambda *given: by_segments((eager_kernel, eager_batch), *given)  # noqa: E731
    wanted, rows = _run(loop, tensors, packed, scale, True), []
    for name, attend in kernels(is_gpu).items():
        if isinstance(attend, str):
            rows.append(Row(name, None, note=attend))
            continue
        own = [tensor.to(device).bfloat16() for tensor in tensors]
        passes = {"forward": False, "forward and backward": True}
        if not is_gpu and attend is by_flex:
            del passes["forward and backward"]
        for what, has_gradient in passes.items():
            found = _run(attend, own, packed, scale, has_gradient)
            part, places = ("gradients", slice(1, None)) if has_gradient else ("output", slice(1))
            error = _error(found[places], wanted[places])
            if error > 0.03:
                raise SystemExit(f"error: {name} differs from the CPU's attention by {error:.3f} ({part})")
            rows.append(Row(f"{name}: error of the {part}", round(error, 5), "of the largest value"))
            again = partial(_run, attend, own, packed, scale, has_gradient)
            taken = _milliseconds(again, 2 if is_rehearsal else 10, is_gpu)
            rows.append(Row(f"{name}: {what}", taken, "ms", f"{num:,} tokens"))
        if len(passes) == 1:
            rows.append(Row(f"{name}: error of the gradients", None, note="no backward pass on a CPU"))
    return rows
