"""A lookup's gradient as rows, and a step of Adam that leaves alone what has never had one.

The gradient of an embedding is as large as the vocabulary and, for all but a few rows, zero. Where nothing but lookups
has a gradient of the weight (a head of its own, or none that says tokens), Adam and AdamW move a row without weight
decay only once it has had a gradient: until then both of its moments are zero, and so is its update. So no gradient of
the whole weight is made, and only rows that ever had one are stepped: the same bits, while pages of moments that nobody
writes to are no memory of a process on a CPU.
"""

import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
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
    """Every plain lookup that a weight [V, H] has in a network. `rows` are gradients since the last step; those of
    forward passes while it `is_open`, others go their usual way into `grad`."""

    def __init__(self, weight: torch.Tensor):
        self.weight = weight
        self.is_open = False
        self.num_hooks = 0  # of its engine, when `grad` has been added to
        self.rows: list[Rows] = []
        self._moved: torch.Tensor | None = None  # [V] bool: rows that have moments
        self._moments: weakref.ref[torch.Tensor] | None = None  # whose
        self._num_steps = 0.0  # of the weight, when that was so

    def __reduce__(self) -> Any:
        """A copy of a network has no engine."""
        return Lookups, (self.weight,)

    @property
    def is_watched(self) -> bool:
        """Whether somebody else is to see every gradient of the weight, or changes it."""
        weight: Any = self.weight
        return bool(weight._backward_hooks) or len(weight._post_accumulate_grad_hooks or ()) > self.num_hooks

    def add_to(self, gradient: torch.Tensor) -> None:
        """Add what is there to the gradient [V, H] of the whole weight, in the order of the backward pass as autograd
        does, and forget it."""
        for rows in self.rows:
            rows.add_to(gradient)
        self.rows.clear()

    def sum_up(self, optimizer: torch.optim.Optimizer) -> None:
        """Behind each pass of a step: keep the sum of what is there, as rows where `step` can take them and nothing but
        lookups has a gradient of the weight, else in its `grad`."""
        if not self.rows:
            return
        if self.weight.grad is None and self.can_step(optimizer):
            self.rows[:] = [Rows.sum_of(self.rows)]
            return
        if self.weight.grad is None:
            self.weight.grad = torch.zeros_like(self.weight)
        self.add_to(self.weight.grad)

    def can_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Say whether `step` does what a step of the whole weight does."""
        weight, group = self.weight, self._group(optimizer)
        if group is None:
            return False
        is_adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
        is_plain = weight.dtype == torch.float32 and weight.shape[1] % VECTOR == 0
        if not is_adam or group["eps"] == 0 or group["differentiable"] or not is_plain:
            return False
        return all(value.is_contiguous() for value in (weight, *optimizer.state[weight].values()))

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """Update the weight, and its moments in `optimizer`, by what is there, and forget it; returns its norm []."""
        group, weight = self._group(optimizer), self.weight.detach()
        assert group is not None
        state = optimizer.state[self.weight]
        if not state:
            state.update(self._first_state(optimizer, group))
        moments = {name: value for name, value in state.items() if value.dim()}
        norms = [torch.zeros((), device=weight.device)]
        if self._num_steps != float(state["step"]):
            self._moments = None  # whole gradients were stepped with since: any row may have moments
        for at in self._stepped(moments, bool(group["weight_decay"])):
            part = torch.nn.Parameter(weight[at])
            part.grad = torch.zeros_like(part)
            for rows in self.rows:
                rows.add_to(part.grad, at)
            norms.append(torch.linalg.vector_norm(part.grad))
            one = _alike(optimizer, group, part)
            one.state[part] = {name: value[at] for name, value in moments.items()} | {"step": state["step"].clone()}
            one.step()
            if not isinstance(at, slice):  # else it is the memory of the weight and of its moments itself
                weight[at] = part.detach()
                for name, value in moments.items():
                    value[at] = one.state[part][name]
            del part, one  # before there is the next
        state["step"] += 1
        self._num_steps = float(state["step"])
        self.rows.clear()
        return torch.linalg.vector_norm(torch.stack(norms))

    def _group(self, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        own = (group for group in optimizer.param_groups if any(one is self.weight for one in group["params"]))
        return next(own, None)

    def _first_state(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return what the optimizer holds of a weight before its first step."""
        row = torch.nn.Parameter(torch.zeros_like(self.weight[:1]))
        row.grad = torch.zeros_like(row)
        one = _alike(optimizer, group, row)
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
        if is_all:
            self._moved.fill_(True)
        ids = self._moved.nonzero().flatten()
        for portion in ids.split(max(1, PORTION // self.weight.shape[1])) if len(ids) else ():
            first, last = int(portion[0]), int(portion[-1])
            yield slice(first, last + 1) if last - first + 1 == len(portion) else portion


class Rows:
    """Gradients [N, H] of N lookups; of an id that was looked up more than once their sum, as torch sums them up."""

    def __init__(self, ids: torch.Tensor, gradients: torch.Tensor):
        self.ids, inverse = ids.unique(return_inverse=True)
        self.gradients = torch.ops.aten.embedding_dense_backward(gradients, inverse, len(self.ids), -1, False)

    @classmethod
    def sum_of(cls, rows: Sequence["Rows"]) -> "Rows":
        """Return the sum of one or more, in their order."""
        if len(rows) == 1:
            return rows[0]
        found = cls.__new__(cls)
        found.ids = torch.cat([one.ids for one in rows]).unique()
        found.gradients = rows[0].gradients.new_zeros(len(found.ids), rows[0].gradients.shape[1])
        for one in rows:
            one.add_to(found.gradients, found.ids)
        return found

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
    """Return, by the place of a weight among those `trained`, its lookups: their gradients go there while they are
    open. Those of a network that had some before are closed for good."""
    places: dict[torch.Tensor, int] = {parameter: place for place, parameter in enumerate(trained)}
    found: dict[int, Lookups] = {}
    for module in plain_lookups(model):
        if module.weight in places:
            lookups = found.setdefault(places[module.weight], Lookups(module.weight))
            for number in [number for number, hook in module._forward_hooks.items() if _is_own(hook)]:
                del module._forward_hooks[number]
            module.register_forward_hook(partial(_look_up, lookups))
    return found


def plain_lookups(model: torch.nn.Module) -> list[torch.nn.Embedding]:
    """Return the modules that look rows up and do nothing else with them or with their weight, by a hook neither."""
    lookups = [module for module in model.modules() if type(module) is torch.nn.Embedding]
    return [module for module in lookups if not (
        module.sparse or module.scale_grad_by_freq or module.max_norm is not None or "forward" in vars(module)
        or any(map(_changes_outputs, module._forward_hooks.values()))
    )]  # fmt: skip


def _changes_outputs(hook: Any) -> bool:
    """Say whether a forward hook may do more than ask for gradients of what it sees, as those of transformers' and
    PEFT's gradient checkpointing do: of a weight that is trained there are some."""
    return not (_is_own(hook) or getattr(hook, "__name__", "").startswith("make_inputs_require_grad"))


def _is_own(hook: Any) -> bool:
    return isinstance(hook, partial) and hook.func is _look_up


def _zeros(like: torch.Tensor) -> torch.Tensor:
    """Return zeros of that shape; large ones of a CPU are pages that take no memory before they are written to."""
    size = like.numel() * like.element_size()
    if like.device.type != "cpu" or size < LAZY_BYTES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros_like(like)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # of a system without huge pages
            pages.madvise(mmap.MADV_NOHUGEPAGE)  # a row would take 2 MiB
    return torch.frombuffer(pages, dtype=like.dtype).view(like.shape)


def _alike(optimizer: torch.optim.Optimizer, group: dict[str, Any], part: torch.nn.Parameter) -> torch.optim.Optimizer:
    """Return one of the same kind and settings for a part of a weight."""
    kind: Callable[..., torch.optim.Optimizer] = type(optimizer)
    return kind([{**group, "params": [part]}])


def _look_up(own: Lookups, module: torch.nn.Embedding, given: tuple[Any, ...], output: torch.Tensor) -> Any:
    """Return an embedding's output with a graph that ends in its own rows, where it is nothing but rows of its own
    weight; a forward hook."""
    is_lookup = type(output.grad_fn).__name__ == "EmbeddingBackward0" and "forward" not in vars(module)
    if not own.is_open or not given or not is_lookup or module.weight is not own.weight or own.is_watched:
        return output
    padding = module.padding_idx if module.padding_idx is None else module.padding_idx % len(own.weight)
    return _Lookup.apply(own.weight, given[0], padding, own.rows, output.detach())  # type: ignore[no-untyped-call]


class _Lookup(torch.autograd.Function):
    """weight [V, H], ids [...], their rows [..., H] → these. The weight's gradient goes into a list."""

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, ids: torch.Tensor, padding: int | None, sink: list[Rows], values: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.padding, ctx.sink = padding, sink
        return values.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None, None, None]:
        (ids,) = ctx.saved_tensors
        ids, rows = ids.reshape(-1), gradient.reshape(-1, gradient.shape[-1])
        if ctx.padding is not None:
            ids, rows = ids[ids != ctx.padding], rows[ids != ctx.padding]
        ctx.sink.append(Rows(ids, rows))
        return None, None, None, None, None
