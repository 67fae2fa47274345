"""What rounding alone makes of a policy's log-probs: the scale that the engine's difference from the trainer is held
against.

The engine computes in a dtype of its own (bfloat16 most often), the trainer in another or the same one, with other
kernels. How far two right computations lie apart depends on the network, on how sharp it is, on the length of the
responses and on how unlikely their tokens have become: 0.001 nats per token in one run, 0.1 in another. So the trainer
computes some of the same tokens once more, in float32 with the output of every layer rounded to the engine's dtype;
what that differs from its own log-probs is what the engine may differ. On tiny policies of two families, bfloat16 on
both sides, vLLM's difference was 0.7 to 1.9 times this one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from espalier.models.precision import FP32

FACTOR = 5.0  # how many times what rounding makes the engine may differ
FLOOR = 1e-3  # nats per token: below it nothing is a fault, however little rounding makes


def rounds_nothing(dtype: torch.dtype, precision: str) -> bool:
    """Say whether an engine of that dtype computes as a trainer of that precision: then no pass tells what rounding
    makes, since it would be the same pass again."""
    return dtype == torch.float32 and precision == FP32


def _round(value: Any, dtype: torch.dtype) -> Any:
    """Return a tensor, or the tensors of a tuple, with no more digits than `dtype` has; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype).to(value.dtype) if value.is_floating_point() else value
    return tuple(_round(part, dtype) for part in value) if type(value) is tuple else value


@contextmanager
def rounded(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Within, what every part of `model` gives is rounded to `dtype`; weights and the type of outputs stay. Float32
    rounds nothing."""

    def round_output(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        return _round(output, dtype)

    parts = [part for part in model.modules() if part is not model]
    hooks = [part.register_forward_hook(round_output) for part in parts] if dtype != torch.float32 else []
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
