"""An engine that never holds all gradients: each weight is updated as soon as its own is there, which is then dropped.

What a step takes in float32 falls from 16 bytes per parameter to 12. (LOMO, Lv et al. 2023, arXiv:2306.09782; others
call it `optimizer_in_bwd` or a fused backward pass.) The update is the same as that of plain torch, bit for bit, where
nothing is clipped. What needs all gradients at once cannot be had: a norm to clip to, a sum over passes or over ranks,
a step that is taken back because its gradient is not finite, and an optimizer that counts its calls.

A lookup's gradient is kept as rows (`training.lookup_rows`), and added to that of the output head where the two share a
weight: one gradient of the vocabulary's size is there, not two. Where they share none, and the optimizer is Adam or
AdamW, none is.
"""

import ctypes
import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch

from espalier.data.records import BadInput
from espalier.runtime.schemas import TrainConfig
from espalier.training.engine import TorchEngine
from espalier.training.lookup_rows import find_lookups

KEY = "update.step_in_backward=true"
LARGE = 2**24
"""Numbers of a weight for whose gradient a process on a CPU makes room: 64 MiB."""


def check_step_in_backward(config: TrainConfig, num_ranks: int) -> None:
    """Raise BadInput where the config asks for steps in the backward pass beside what needs all gradients of a step at
    once."""
    update = config.update
    if not update.step_in_backward:
        return
    refused = (
        (num_ranks > 1, "is of one process", "use deepspeed=zero2 in its place"),
        (bool(config.deepspeed), "is of plain torch", "set deepspeed=none"),
        (update.max_grad_norm > 0, "cannot clip, whose norm is that of all gradients", "set update.max_grad_norm=0"),
        (update.on_nonfinite == "skip", "cannot take a step back whose gradient is not finite",
         "set update.on_nonfinite=stop"),
        (update.micro_batch_tokens > 0, "needs a step to be one pass", "set update.micro_batch_tokens=0"),
        (update.micro_batch_size < update.batch_size, "needs a step to be one pass",
         f"set update.micro_batch_size={update.batch_size}"),
    )  # fmt: skip
    for is_refused, reason, remedy in refused:
        if is_refused:
            raise BadInput(f"{KEY} {reason}: {remedy}")


class StepInBackwardEngine(TorchEngine):
    """One process, one pass a step; `step` computes the gradients and updates on the way. Nothing is clipped."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, device: torch.device):
        super().__init__(model, optimizer, device, 0.0)
        self._loss: torch.Tensor | None = None
        self._norms: dict[int, torch.Tensor] = {}  # of the parameters that this step has updated, by place
        for place, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._update, place))
        self._lookups = self._lookups or find_lookups(model, self.parameters)
        for lookups in self._lookups.values():
            lookups.num_hooks = 1
        self._is_large = device.type == "cpu" and any(one.numel() >= LARGE for one in self.parameters)

    def backward(self, loss: torch.Tensor) -> None:
        """Keep the loss [] with its graph for `step`. Raises RuntimeError where the step has another pass."""
        if self._loss is not None:
            raise RuntimeError(f"{KEY}: a step of more than one pass")
        self._loss = loss

    def step(self, learning_rate: float) -> float:
        """Go backward, update each weight on the way; the norm of the gradient."""
        if self._loss is None:
            raise RuntimeError(f"{KEY}: a step without a pass")
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        loss, self._loss, self._norms = self._loss, None, {}
        self._make_room()
        loss.backward()  # type: ignore[no-untyped-call]
        for place in self._lookups:
            self._update(place, self.parameters[place])  # where no hook has come
        super().discard()
        return math.sqrt(sum(float(norm) ** 2 for norm in self._norms.values()))

    def discard(self) -> None:
        """Forget the loss: no weight has moved yet."""
        self._loss = None
        super().discard()

    def _update(self, place: int, parameter: torch.Tensor) -> None:
        """Step with the one parameter that has a gradient. Raises RuntimeError where it has been updated already (of a
        gradient that comes in parts none is the whole one), and where the optimizer counts its calls."""
        lookups = self._lookups.get(place)
        has_rows = lookups is not None and bool(lookups.rows)
        if parameter.grad is None and not has_rows:
            return
        if place in self._norms:
            raise RuntimeError(f"{KEY}: the gradient of a weight of shape {tuple(parameter.shape)} came in parts")
        if lookups is not None and parameter.grad is None and lookups.can_step(self.optimizer):
            self._norms[place] = lookups.step(self.optimizer)
            return
        if parameter.grad is None:
            self._make_room()
            parameter.grad = torch.zeros_like(parameter)  # nothing but lookups has a gradient of it
        if lookups is not None:
            lookups.add_to(parameter.grad)
        self._norms[place] = torch.linalg.vector_norm(parameter.grad)
        before = [_numbers(group) for group in self.optimizer.param_groups]
        self.optimizer.step()
        if [_numbers(group) for group in self.optimizer.param_groups] != before:
            raise RuntimeError(f"{KEY}: {type(self.optimizer).__name__} counts steps in its groups, and is called once "
                               "for every weight: choose another optimizer")  # fmt: skip
        parameter.grad = None

    def _make_room(self) -> None:
        """Give back what the C library keeps of smaller tensors that are gone."""
        if self._is_large and (trim := _malloc_trim()) is not None:
            trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Return glibc's, None where the C library is another."""
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    return found


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an optimizer's group holds beside its parameters, of plain kinds."""
    return {name: value for name, value in group.items() if isinstance(value, bool | int | float | str)}
