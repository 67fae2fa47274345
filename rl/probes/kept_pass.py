"""Forward passes that are kept, so that others which differ from them in one weight begin behind them.

A decoder's layers work one after the other. In front of the first part that reads the weight every part gives what it
gave before, to the last bit, and is not computed again: of weights that are spread over the depth this saves half.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

MOST_BYTES = 2**28  # of what parts gave: what comes behind that is computed again
_Call = Callable[..., Any]  # of a part's name, its own forward, and what that is given


class KeptPasses:
    """Of `model`, cut into parts: its layers, and what has weights outside of them. A pass is known by its `key`."""

    def __init__(self, model: Any):
        layers = frozenset(getattr(model, "_no_split_modules", None) or ())
        shares_keys = getattr(model.config.get_text_config(), "num_kv_shared_layers", 0)
        # Layers that read what earlier ones put aside cannot go without them.
        parts = {} if shares_keys else dict(_parts_of(model, "", layers))
        # one module under two names is called under one
        self._parts = {} if len(set(map(id, parts.values()))) < len(parts) else parts
        self._given: dict[Hashable, list[tuple[str, Any]]] = {}  # in the order of the calls
        self._num_bytes = 0

    @contextmanager
    def kept(self, key: Hashable) -> Iterator[None]:
        """Keep what the parts give within, in one pass."""
        given = self._given[key] = []

        def keep(name: str, forward: Callable[..., Any], *inputs: Any, **more: Any) -> Any:
            output = forward(*inputs, **more)
            self._num_bytes += _num_bytes(output)
            given.append((name, _copied(output) if self._num_bytes <= MOST_BYTES else None))
            return output

        with _called(self._parts, keep):
            yield

    @contextmanager
    def repeated(self, key: Hashable, weight: str) -> Iterator[None]:
        """Within, a pass with the same inputs and weights, but for the one of that name, begins as the kept one; where
        none was kept it is computed whole."""
        own = next((name for name in self._parts if f"{weight}.".startswith(f"{name}.")), None)
        calls = iter(self._given.get(key, []) if own is not None else [])
        is_behind = False

        def repeat(name: str, forward: Callable[..., Any], *inputs: Any, **more: Any) -> Any:
            nonlocal is_behind
            known, output = next(calls, ("", None))
            is_behind = is_behind or name == own or name != known or output is None
            return forward(*inputs, **more) if is_behind else _copied(output)

        with _called(self._parts, repeat):
            yield


def _parts_of(module: torch.nn.Module, name: str, layers: frozenset[str]) -> Iterator[tuple[str, torch.nn.Module]]:
    if name and (module._parameters or module._buffers or type(module).__name__ in layers):
        yield name, module
        return
    for leaf, child in module.named_children():
        yield from _parts_of(child, f"{name}.{leaf}" if name else leaf, layers)


@contextmanager
def _called(parts: dict[str, torch.nn.Module], call: _Call) -> Iterator[None]:
    """Have `call` made in place of each part's forward."""
    before = {name: vars(part).get("forward") for name, part in parts.items()}
    try:
        for name, part in parts.items():
            vars(part)["forward"] = partial(call, name, part.forward)
        yield
    finally:
        for name, part in parts.items():
            del vars(part)["forward"]
            if before[name] is not None:
                vars(part)["forward"] = before[name]


def _copied(output: Any) -> Any:
    """Return copies of a tensor, or of those of a tuple: what comes behind may write to them. None of anything else,
    which is computed again."""
    if isinstance(output, torch.Tensor):
        return output.clone()
    if type(output) is not tuple or not all(part is None or isinstance(part, torch.Tensor) for part in output):
        return None
    return tuple(part if part is None else part.clone() for part in output)


def _num_bytes(output: Any) -> int:
    if isinstance(output, torch.Tensor):
        return output.nbytes
    return sum(map(_num_bytes, output)) if type(output) is tuple else 0
