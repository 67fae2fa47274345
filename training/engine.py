"""The engine: one model, its optimizer, and how gradients become a step. The loop sees only this protocol.

Losses arrive already divided by the global count (over micro-batches and ranks), so gradients are summed
over ranks, never averaged.
"""

import math
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from espalier.models.precision import autocast
from espalier.runtime.distributed import is_main_rank, sum_gradients, wait_visibly, world_size
from espalier.training.lookup_rows import find_lookups
from espalier.training.piece_files import BadCheckpoint as BadCheckpoint
from espalier.training.pieces import State, held_whole, persistent_buffers, trained_shapes

if TYPE_CHECKING:
    from espalier.training.shards import Shards


class Engine(Protocol):
    """What the loop needs of an engine."""

    model: Any
    device: torch.device

    @property
    def shards(self) -> "Shards | None":
        """What is cut over the ranks; None where every rank holds all weights."""

    def computing_in(self, precision: str) -> AbstractContextManager[None]:
        """Have forward passes computed in bf16 or fp32 within."""

    def start_step(self, num_micro_batches: int) -> None:
        """Say how many calls of `backward` the next step consists of, the same number on every rank."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of one micro-batch's loss []."""

    def step(self, learning_rate: float) -> float:
        """Clip, update, clear, once all micro-batches have gone backward; the norm before clipping."""

    def discard(self) -> None:
        """Forget the gradients of this step."""

    def whole_weights(self) -> dict[str, torch.Tensor]:
        """Return every weight by its name in the model, tied ones sharing memory: complete on rank 0, on the others
        perhaps empty. Called on every rank; not to be written to. Not where they are `shards`."""

    def save_model(self, folder: Path) -> None:
        """A standard Hugging Face folder; called on every rank, written by rank 0."""

    def save_state(self, folder: Path) -> None:
        """All that a resume needs; called on every rank."""

    def load_state(self, folder: Path) -> None:
        """What `save_state` of any engine wrote, on any number of ranks. Raises BadCheckpoint."""


class TorchEngine:
    """One process, or several that sum their gradients: every rank holds the whole model.

    `max_grad_norm` 0 does not clip. Of one process on a CPU, from `start_step` to the step, gradients of lookups are
    rows (`training.lookup_rows`), added to `grad` behind each pass where a head shares the weight or the optimizer
    needs them whole.
    """

    shards = None

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, device: torch.device, max_grad_norm: float):
        self.model = model
        self.optimizer = optimizer
        self.device = device
        self.max_grad_norm = max_grad_norm if max_grad_norm > 0 else float("inf")
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._num_left = 0  # calls of backward until the step
        keeps_rows = device.type == "cpu" and world_size() == 1
        self._lookups = find_lookups(model, self.parameters) if keeps_rows else {}  # by the place of the weight

    def computing_in(self, precision: str) -> AbstractContextManager[None]:
        """Have forward passes computed in bf16 or fp32 within."""
        return autocast(self.device, precision)

    def start_step(self, num_micro_batches: int) -> None:
        """Any number will do; the ranks wait for one another behind the last one."""
        self._num_left = num_micro_batches
        for lookups in self._lookups.values():
            lookups.is_open = num_micro_batches > 0

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of a loss []."""
        loss.backward()  # type: ignore[no-untyped-call]
        for lookups in self._lookups.values():
            lookups.sum_up(self.optimizer)
        self._num_left -= 1
        if self._num_left == 0:
            wait_visibly("the gradients of all ranks")

    def step(self, learning_rate: float) -> float:
        """Sum over ranks, clip to `max_grad_norm`, update; a norm that is not finite updates nothing."""
        sum_gradients(self.parameters)
        for lookups in self._lookups.values():
            lookups.sum_up(self.optimizer)  # with what somebody else has gone backward through
        norm = self._clip()
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
            for lookups in self._lookups.values():
                if lookups.rows:
                    lookups.step(self.optimizer)
        self.discard()
        return norm

    def _clip(self) -> float:
        """Clip to `max_grad_norm` as torch's `clip_grad_norm_` does, rows of lookups with the rest; the norm before."""
        rows = [rows.gradients for lookups in self._lookups.values() for rows in lookups.rows]
        norm = torch.nn.utils.get_total_norm([one.grad for one in self.parameters if one.grad is not None] + rows)
        share = torch.clamp(self.max_grad_norm / (norm + 1e-6), max=1.0)
        if self.device.type != "cpu" or share != 1:  # elsewhere the question takes longer than the product
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.max_grad_norm, norm)
            for gradients in rows:
                gradients.mul_(share)
        return float(norm)

    def discard(self) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none=True)
        for lookups in self._lookups.values():
            lookups.rows.clear()
            lookups.is_open = False

    def whole_weights(self) -> dict[str, torch.Tensor]:
        """Return the model's own."""
        return named_weights(self.model)

    def save_model(self, folder: Path) -> None:
        """Rank 0 writes safetensors."""
        if is_main_rank():
            self.model.save_pretrained(folder)

    def save_state(self, folder: Path) -> None:
        """Rank 0 writes what is trained and the optimizer; the ranks are equal."""
        if is_main_rank():
            self._state().save(folder, 0)

    def load_state(self, folder: Path) -> None:
        """Restore model and optimizer bit for bit. Raises BadCheckpoint."""
        self._state().load(folder)

    def _state(self) -> State:
        return State(held_whole(self.model), self.optimizer, trained_shapes(self.model), persistent_buffers(self.model))


def named_weights(model: Any) -> dict[str, torch.Tensor]:
    """Return every weight by its checkpoint name, without a graph; a tied head stands under its own name too."""
    return {name: value.detach() for name, value in model.state_dict().items()}


def trained_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return trainable parameters (tied ones once, under their first name) and persistent buffers."""
    persistent = model.state_dict().keys()
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    buffers = {name: value for name, value in model.named_buffers(remove_duplicate=False) if name in persistent}
    return {name: value.detach().contiguous() for name, value in {**parameters, **buffers}.items()}


@torch.no_grad()
def load_weights(model: torch.nn.Module, stored: dict[str, torch.Tensor], where: str) -> None:
    """Copy `stored` over the model's `trained_tensors`.

    Raises BadCheckpoint where their names or shapes differ.
    """
    own = {name: (value.shape, value) for name, value in model.state_dict().items() if name in stored}
    lacking = [name for name in trained_tensors(model) if name not in stored]
    strange = [name for name, value in stored.items() if name not in own or own[name][0] != value.shape]
    if lacking or strange:
        raise BadCheckpoint(f"{where} is of another model: {(lacking or strange)[0]} does not fit: choose another "
                            "output_dir")  # fmt: skip
    for name, value in stored.items():
        own[name][1].copy_(value)
