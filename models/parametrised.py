"""A network that computes with weights which are made when they are read: one layer's at a time, never all of them.

For weights that lie apart from the network, or that are a function of its own (adapters merged, noise put on). Every
read of such a weight is caught, by whatever module, as with `torch.func.functional_call`, which needs all of them at
once; `torch.nn.utils.parametrize` would rename the parameters.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

Make = Callable[[torch.Tensor], torch.Tensor]
_STATE = "_made_weights"


class _State:
    """Of one layer. `kept`: what was made since its forward pass began (None: outside of one)."""

    def __init__(self, making: Mapping[str, Make], device: torch.device):
        self.making = making
        self.device = device
        self.kept: dict[str, torch.Tensor] | None = None

    def read(self, leaf: str, own: torch.Tensor) -> torch.Tensor:
        """Return the weight, made once in a forward pass, in the precision that it has: outside of autocast."""
        if self.kept is not None and leaf in self.kept:
            return self.kept[leaf]
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            made = self.making[leaf](own)
        if self.kept is not None:
            self.kept[leaf] = made
        return made


@contextmanager
def parametrised(model: torch.nn.Module, making: Mapping[str, Make], device: torch.device) -> Iterator[None]:
    """Within, `model` computes on `device` with what `making[name](own)` returns in place of its own parameter or
    buffer of that name (of `state_dict`), without a gradient. It is let go when the forward pass of its layer ends;
    parameters, their names and iterators over them stay as they are."""
    by_layer: dict[str, dict[str, Make]] = {}
    for name, make in making.items():
        owner, _, leaf = name.rpartition(".")
        by_layer.setdefault(owner, {})[leaf] = make
    layers = {owner: model.get_submodule(owner) for owner in by_layer}
    kinds: dict[str, Any] = {owner: type(layer) for owner, layer in layers.items()}
    try:
        for owner, layer in layers.items():
            vars(layer)[_STATE] = _State(by_layer[owner], device)
            layer.__class__ = _reading(kinds[owner], tuple(by_layer[owner]))
        yield
    finally:
        for owner, layer in layers.items():
            layer.__class__ = kinds[owner]
            vars(layer).pop(_STATE, None)


@cache
def _reading(kind: Any, leaves: tuple[str, ...]) -> type:
    """Return the class of such a layer, under the name of its own: reads of `leaves` go to its `_State`."""

    def call(layer: Any, *inputs: Any, **more: Any) -> Any:
        state: _State = vars(layer)[_STATE]
        state.kept = {}
        try:
            return kind.__call__(layer, *inputs, **more)
        finally:
            state.kept = None

    members: dict[str, Any] = {"__call__": call, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), members | {leaf: _read_of(leaf) for leaf in leaves})


def _read_of(leaf: str) -> property:
    def read(layer: Any) -> torch.Tensor:
        state: _State = vars(layer)[_STATE]
        own: Any = torch.nn.Module.__getattr__(layer, leaf)
        try:
            return state.read(leaf, own)
        except AttributeError as error:  # which would have torch return the layer's own
            raise RuntimeError(f"{leaf} of a {type(layer).__name__} cannot be made") from error

    return property(read)
