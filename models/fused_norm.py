"""RMSNorm (Zhang and Sennrich 2019) with a backward pass written out, for float32 hidden states.

y = weight * x / sqrt(mean(x^2) + eps). Autograd takes it apart into six operations, each a pass over memory, and three
more on the way back; here they are four and four, and where bf16 is to be multiplied next the result is rounded once
instead of once for each of the layers that read it. That makes a training step of a small model on a CPU a fifth
faster; the numbers are those of transformers' own modules.
"""

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from espalier.models.in_parts import is_part, whole_shape

# Networks whose norms over the hidden states are read by linear layers alone (they round to bf16 in autocast).
_READ_BY_LINEAR = ("llama", "mistral", "qwen2", "qwen3")


class _RMSNorm(torch.autograd.Function):
    """x [..., H] float32, weight [H] → [..., H] in `kind`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, kind: torch.dtype) -> torch.Tensor:
        scale = torch.rsqrt(torch.linalg.vecdot(x, x).unsqueeze(-1) / x.shape[-1] + eps)
        normed = x * scale
        ctx.save_for_backward(normed, scale, weight)
        return (normed * weight).to(kind)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        normed, scale, weight = ctx.saved_tensors
        gradient = gradients[0].float()
        for_weight = None
        if ctx.needs_input_grad[1]:
            for_weight = (gradient * normed).flatten(0, -2).sum(0)
        gradient = gradient * weight
        along = torch.linalg.vecdot(gradient, normed).unsqueeze(-1) / normed.shape[-1]
        return gradient.addcmul_(normed, along, value=-1).mul_(scale), for_weight, None, None


class FusedRMSNorm(torch.nn.Module):
    """Takes the place of a transformers RMSNorm with `weight` and `variance_epsilon`. `is_read_by_linear`: what reads
    it rounds it to autocast's precision anyway."""

    weight: torch.nn.Parameter
    variance_epsilon: float
    is_read_by_linear: bool

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise `hidden_states` [..., D] over D; in autocast's precision where it is on and `is_read_by_linear`."""
        device = hidden_states.device.type
        kind = hidden_states.dtype
        if self.is_read_by_linear and torch.is_autocast_enabled(device):
            kind = torch.get_autocast_dtype(device)
        if hidden_states.dtype == torch.float32 == self.weight.dtype:
            normed: torch.Tensor = _RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon, kind)
            return normed
        states = hidden_states.float()
        states = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * states.to(hidden_states.dtype)

    def extra_repr(self) -> str:
        """As transformers shows it."""
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


@torch.no_grad()
def _is_plain(module: torch.nn.Module) -> bool:
    """Say whether a module computes what `FusedRMSNorm` does: by its own answer to two rows; where its weight is cut
    over ranks, by that of a copy with other weights."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, torch.Tensor) or len(whole_shape(weight)) != 1 or eps is None:
        return False
    if weight.device.type == "meta":
        return False
    if is_part(weight):
        weight = torch.linspace(0.5, 2, whole_shape(weight).numel(), device=weight.device)
        module = _copy_with(module, weight)
    rows = torch.linspace(-2, 3, 2 * weight.numel(), device=weight.device).view(2, -1)
    wanted = weight.float() * rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    return bool(torch.allclose(module(rows).float(), wanted, rtol=1e-5, atol=1e-6))


def _copy_with(module: torch.nn.Module, weight: torch.Tensor) -> torch.nn.Module:
    """Return a norm of the same class and settings with this weight."""
    twin = copy.copy(module)
    twin._parameters = {**module._parameters, "weight": torch.nn.Parameter(weight, requires_grad=False)}
    return twin


def fuse_norms(model: PreTrainedModel) -> PreTrainedModel:
    """Let the model's RMSNorms compute with `FusedRMSNorm`, in place; what is none stays as it is."""
    is_known = model.config.model_type in _READ_BY_LINEAR
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and _is_plain(module):
            module.__class__ = FusedRMSNorm
            module.is_read_by_linear = is_known and whole_shape(module.weight).numel() == model.config.hidden_size  # type: ignore
    return model
