"""A lookup's gradient as rows, and a step of Adam that leaves alone what has never had one.

The gradient of an embedding is as large as the vocabulary and, for all but a few rows, zero. Where nothing but lookups
has a gradient of the weight (a head of its own, or none that says tokens), Adam and AdamW move a row without weight
decay only once it has had a gradient: until then both of its moments are zero, and so is its update. So no gradient of
the whole weight is made, and only rows that ever had one are stepped: the same bits, while pages of moments that nobody
writes to are no memory of a process on a CPU.
"""

import mmap
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

PORTION = 2**20
"""Numbers that are stepped at a time: 4 MiB of gradients, and three times as much of copies."""
LAZY_BYTES = 2**24
"""Of moments: smaller ones are not worth pages of their own."""
VECTOR = 16
"""Rows of a multiple of it fill the vectors of fused kernels, which may round what is left behind them otherwise."""


class Lookups:
    """Every plain lookup that a weight [V, H] has in a network. `rows` are gradients since the last step."""

    def __init__(self, weight: torch.Tensor):
        self.weight = weight
        self.rows: list[Rows] = []
        self._moved: torch.Tensor | None = None  # [V] bool: rows that have moments
        self._moments: weakref.ref[torch.Tensor] | None = None  # whose

    def add_to(self, gradient: torch.Tensor) -> None:
        """Add what is there to the gradient [V, H] of the whole weight, in the order of the backward pass as autograd
        does, and forget it."""
        self._moments = None  # any row may have moments behind a step with this
        for rows in self.rows:
            rows.add_to(gradient)
        self.rows.clear()

    def can_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Say whether `step` does what a step of the whole weight does."""
        weight, group = self.weight, self._group(optimizer)
        is_adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
        is_plain = weight.dtype == torch.float32 and weight.shape[1] % VECTOR == 0
        if not is_adam or group["eps"] == 0 or group["differentiable"] or not is_plain:
            return False
        return all(value.is_contiguous() for value in (weight, *optimizer.state[weight].values()))

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """Update the weight, and its moments in `optimizer`, by what is there, and forget it; returns its norm []."""
        group, weight = self._group(optimizer), self.weight.detach()
        state = optimizer.state[self.weight]
        if not state:
            state.update(self._first_state(optimizer))
        moments = {name: value for name, value in state.items() if value.dim()}
        norms = [torch.zeros((), device=weight.device)]
        for at in self._stepped(moments, bool(group["weight_decay"])):
            part = torch.nn.Parameter(weight[at])
            part.grad = torch.zeros_like(part)
            for rows in self.rows:
                rows.add_to(part.grad, at)
            norms.append(torch.linalg.vector_norm(part.grad))
            one = _alike(optimizer, group, part)
            one.state[part] = {name: value[at] for name, value in moments.items()} | {"step": state["step"].clone()}
            one.step()
            if isinstance(at, slice):  # the memory of the weight and of its moments itself
                continue
            weight[at] = part.detach()
            for name, value in moments.items():
                value[at] = one.state[part][name]
        state["step"] += 1
        self.rows.clear()
        return torch.linalg.vector_norm(torch.stack(norms))

    def _group(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return next(group for group in optimizer.param_groups if any(one is self.weight for one in group["params"]))

    def _first_state(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """Return what the optimizer holds of a weight before its first step."""
        row = torch.nn.Parameter(torch.zeros_like(self.weight[:1]))
        row.grad = torch.zeros_like(row)
        one = _alike(optimizer, self._group(optimizer), row)
        one.step()
        whole = partial(_zeros, self.weight)
        return {name: whole() if value.dim() else torch.zeros_like(value) for name, value in one.state[row].items()}

    def _stepped(self, moments: dict[str, torch.Tensor], is_all: bool) -> Iterator[slice | torch.Tensor]:
        """Return the rows to step, in portions; a slice where one has no gaps."""
        if self._moved is None or self._moments is None or self._moments() is not moments["exp_avg"]:
            self._moments = weakref.ref(moments["exp_avg"])  # the first ones, or those of a checkpoint
            largest = [torch.linalg.vector_norm(value, ord=torch.inf, dim=1) for value in moments.values()]
            self._moved = (torch.stack(largest) != 0).any(0)
        for rows in self.rows:
            self._moved[rows.ids] = True
        ids = torch.arange(len(self._moved), device=self._moved.device) if is_all else self._moved.nonzero().flatten()
        for portion in ids.split(max(1, PORTION // self.weight.shape[1])) if len(ids) else ():
            first, last = int(portion[0]), int(portion[-1])
            yield slice(first, last + 1) if last - first + 1 == len(portion) else portion


class Rows:
    """Gradients [N, H] of N lookups; of an id that was looked up more than once their sum, as torch sums them up."""

    def __init__(self, ids: torch.Tensor, gradients: torch.Tensor):
        self.ids, inverse = ids.unique(return_inverse=True)
        self.gradients = torch.ops.aten.embedding_dense_backward(gradients, inverse, len(self.ids), -1, False)

    def add_to(self, gradient: torch.Tensor, at: slice | torch.Tensor = slice(0, None)) -> None:
        """Add them to the gradient of the rows `at` [M], in ascending order, of a weight."""
        if isinstance(at, slice):
            places = self.ids - at.start
            is_there = (places >= 0) & (places < len(gradient))
        else:
            places = torch.searchsorted(at, self.ids).clamp(max=len(at) - 1)
            is_there = at[places] == self.ids
        gradient.index_add_(0, places[is_there], self.gradients[is_there].to(gradient.dtype))


def find_lookups(model: torch.nn.Module, trained: list[torch.nn.Parameter]) -> dict[int, Lookups]:
    """Return, by the place of a weight among those `trained`, its lookups; from now on their gradients go there."""
    places: dict[torch.Tensor, int] = {parameter: place for place, parameter in enumerate(trained)}
    found: dict[int, Lookups] = {}
    for module in plain_lookups(model):
        if module.weight in places:
            lookups = found.setdefault(places[module.weight], Lookups(module.weight))
            module.register_forward_hook(partial(_look_up, lookups.rows))
    return found


def plain_lookups(model: torch.nn.Module) -> list[torch.nn.Embedding]:
    """Return the modules that look rows up and do nothing else with them or with their weight, by a hook neither."""
    lookups = [module for module in model.modules() if type(module) is torch.nn.Embedding]
    return [module for module in lookups if not (
        module.sparse or module.scale_grad_by_freq or module.max_norm is not None or module._forward_hooks
    )]  # fmt: skip


def _zeros(like: torch.Tensor) -> torch.Tensor:
    """Return zeros of that shape; large ones of a CPU are pages that take no memory before they are written to."""
    size = like.numel() * like.element_size()
    if like.device.type != "cpu" or size < LAZY_BYTES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros_like(like)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        pages.madvise(mmap.MADV_NOHUGEPAGE)  # a row would take 2 MiB
    return torch.frombuffer(pages, dtype=like.dtype).view(like.shape)


def _alike(optimizer: torch.optim.Optimizer, group: dict[str, Any], part: torch.nn.Parameter) -> torch.optim.Optimizer:
    """Return one of the same kind and settings for a part of a weight."""
    kind: Callable[..., torch.optim.Optimizer] = type(optimizer)
    return kind([{**group, "params": [part]}])


def _look_up(sink: list[Rows], module: torch.nn.Embedding, given: tuple[Any, ...], output: torch.Tensor) -> Any:
    """Return an embedding's output with a graph that ends in `sink`; a forward hook."""
    if not given or not output.requires_grad or not module.weight.requires_grad:
        return output
    return _Lookup.apply(module.weight, given[0], module.padding_idx, sink)  # type: ignore[no-untyped-call]


class _Lookup(torch.autograd.Function):
    """weight [V, H], ids [...] → [..., H]. The weight's gradient goes into a list."""

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, ids: torch.Tensor, padding: int | None, sink: list[Rows]
    ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.padding, ctx.sink = padding, sink
        return torch.nn.functional.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None, None]:
        (ids,) = ctx.saved_tensors
        ids, rows = ids.reshape(-1), gradient.reshape(-1, gradient.shape[-1])
        if ctx.padding is not None:
            ids, rows = ids[ids != ctx.padding], rows[ids != ctx.padding]
        ctx.sink.append(Rows(ids, rows))
        return None, None, None, None
