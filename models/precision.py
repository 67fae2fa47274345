"""In what matrix products are computed: bfloat16 over float32 weights, or float32; and which a device does fast.

A CPU without AVX-512 (many laptops and desktops, AMD's before Zen 4) multiplies bfloat16 some 35 to 50 times slower
than float32 with torch 2.13: 48 ms beside 1.3 ms for 256 x 256 matrices on a Zen 3 core. GPUs before Ampere emulate it.
A program asks once, for all of its ranks, and says what it found (`training.run_precision`).
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

log = logging.getLogger(__name__)

AUTO, BF16, FP32 = PRECISIONS = ("auto", "bf16", "fp32")


class BadPrecision(ValueError):
    """A precision that does not exist."""

    exit_code = 2


def has_fast_bf16(device_type: str) -> bool:
    """Say whether this process's device of a kind ("cpu", "cuda") multiplies bfloat16 in hardware; GPUs that are
    planned for and not here do."""
    if device_type == "cuda":
        return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
    return _has_fast_cpu()


@cache
def _has_fast_cpu() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def is_bf16(precision: str, device_type: str) -> bool:
    """Say whether `precision` is bfloat16 on that kind of device: `auto` is where it is fast. Raises BadPrecision."""
    if precision not in PRECISIONS:
        raise BadPrecision(f"precision must be auto, bf16 or fp32, got '{precision}'")
    return has_fast_bf16(device_type) if precision == AUTO else precision == BF16


@contextmanager
def autocast(device: torch.device, precision: str = AUTO) -> Iterator[None]:
    """Compute with bf16 matrix products over float32 master weights, or plain fp32. Raises BadPrecision on others."""
    with torch.autocast(device.type, torch.bfloat16, enabled=is_bf16(precision, device.type)):
        yield


def warn_of_slow_bf16(device: torch.device) -> None:
    """Warn where precision=bf16 would be far slower than float32 on this device."""
    if not has_fast_bf16(device.type):
        log.warning("precision=bf16, which this %s multiplies far slower than float32", device.type)
