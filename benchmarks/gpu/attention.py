"""Packed attention by every kernel of the device beside the float32 loop over segments on the CPU: outputs, gradients,
milliseconds.

Rows are pairs with a shared prompt. Errors are the largest absolute difference over the largest absolute value; in bf16
a few thousandths are rounding. On a CPU flex attention has no gradient, and the other kernels for GPUs are not there.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

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
    pairs = zip(found, wanted, strict=False)  # without gradients the outputs alone
    return max(float((one.cpu() - other).abs().max() / other.abs().max()) for one, other in pairs)


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
        has_gradient = is_gpu or attend is not by_flex
        own = [tensor.to(device).bfloat16() for tensor in tensors]
        error = _error(_run(attend, own, packed, scale, has_gradient), wanted)
        if error > 0.03:
            raise SystemExit(f"error: {name} differs from the CPU's attention by {error:.3f}")
        rows.append(Row(f"{name}: error", round(error, 5), "of the largest value"))
        seconds = []
        for _ in range(2 if is_rehearsal else 10):
            if is_gpu:
                torch.cuda.synchronize()
            started = time.perf_counter()
            _run(attend, own, packed, scale, has_gradient)
            if is_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        rows.append(Row(f"{name}: forward and backward", round(1000 * sorted(seconds)[len(seconds) // 2], 3), "ms",
                        f"{num:,} tokens"))  # fmt: skip
    return rows
