"""Gradient checkpointing (Chen et al. 2016, arXiv 1604.06174): what the backward pass computes again instead of having
it kept.

`full` keeps each layer's input and computes the rest again: about a third more compute. `selective` (Korthikanti et al.
2022, arXiv 2205.05198) also keeps what matrix products and fused attention give, whose computation costs most per
byte, and computes again what lies between: norms, activations, rotations, sums (and flex attention). Gradients are the
same in all cases.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, _CachedTorchDispatchMode, _CachingTorchDispatchMode

from espalier.data.records import BadInput

_KINDS: dict[Any, str] = {None: "", False: "", True: "full", "selective": "selective"}
# by their whole names: that of the last one has a twin which writes into what it is given
_WHOLE_NAMES = ("aten::mm", "aten::addmm", "aten::_grouped_mm", "torch_attn::_varlen_attn")
# of torch, and of the packages that bring kernels for GPUs; what `eager` attention multiplies is as large as its scores
_ATTENTION = ("aten::_scaled_dot_product", "aten::_flash_attention", "aten::_efficient_attention", "flash_attn")


def recomputes(setting: Any) -> str:
    """Return "full", "selective" or "" (nothing) for `gradient_checkpointing`. Raises BadInput for anything else."""
    if not isinstance(setting, bool | str | None) or setting not in _KINDS:
        raise BadInput(f"model.gradient_checkpointing must be false, true or selective, got '{setting}'")
    return _KINDS[setting]


def _is_dear(operation: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Say whether the result of a call is kept. Attention with dropout draws random numbers: it is computed again, or
    what draws behind it would draw others in the second pass than in the first."""
    name = operation.name() if isinstance(operation, torch._ops.OpOverload) else str(operation)
    return name in _WHOLE_NAMES or (name.startswith(_ATTENTION) and not _drops(operation, arguments, named))


def _drops(operation: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> bool:
    names = [argument.name for argument in operation._schema.arguments] if hasattr(operation, "_schema") else []
    return bool({**dict(zip(names, arguments, strict=False)), **named}.get("dropout_p"))


def _policy(_: Any, operation: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    is_dear = _is_dear(operation, arguments, named)
    return CheckpointPolicy.MUST_SAVE if is_dear else CheckpointPolicy.PREFER_RECOMPUTE


class _Recomputing(_CachedTorchDispatchMode):
    """Torch's own second pass, which wants every operation of the first one again, held to those alone whose results
    were kept: ZeRO-3 gathers and frees weights between them as it likes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_dear(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _contexts() -> tuple[_CachingTorchDispatchMode, _Recomputing]:
    """Return what a layer's first and second forward pass run in."""
    kept: dict[Any, dict[int, Any]] = defaultdict(dict)
    return _CachingTorchDispatchMode(_policy, kept), _Recomputing(_policy, kept)


def checkpoint_settings(kind: str) -> dict[str, Any]:
    """Return transformers' `gradient_checkpointing_kwargs` for `kind` "full" or "selective"."""
    return {"use_reentrant": False} | ({"context_fn": _contexts} if kind == "selective" else {})
