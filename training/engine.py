"""The engine: one model, its optimizer, and how gradients become a step. The loop sees only this protocol.

Losses arrive already divided by the global count (over micro-batches and ranks), so gradients are summed
over ranks, never averaged.
"""

import json
import math
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors.torch import load_file, save_file

from espalier.models.precision import autocast
from espalier.runtime.distributed import is_main_rank, sum_gradients

if TYPE_CHECKING:
    from espalier.training.shards import Shards


class BadCheckpoint(ValueError):
    """A checkpoint that is not there, is damaged, or does not belong to this run."""

    exit_code = 2


class Engine(Protocol):
    """What the loop needs of an engine."""

    model: Any
    device: torch.device

    @property
    def resumes_on_any_ranks(self) -> bool:
        """Whether other ranks than those that wrote a state can go on from it."""

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
        """What `save_state` wrote."""


class TorchEngine:
    """One process, or several that sum their gradients: every rank holds the whole model.

    `max_grad_norm` 0 does not clip.
    """

    shards = None
    resumes_on_any_ranks = True

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, device: torch.device, max_grad_norm: float):
        self.model = model
        self.optimizer = optimizer
        self.device = device
        self.max_grad_norm = max_grad_norm if max_grad_norm > 0 else float("inf")
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def computing_in(self, precision: str) -> AbstractContextManager[None]:
        """Have forward passes computed in bf16 or fp32 within."""
        return autocast(self.device, precision)

    def start_step(self, num_micro_batches: int) -> None:
        """Any number will do."""

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of a loss []."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, learning_rate: float) -> float:
        """Sum over ranks, clip to `max_grad_norm`, update; a norm that is not finite updates nothing."""
        sum_gradients(self.parameters)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        if not math.isfinite(norm):
            self.discard()
            return float(norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def discard(self) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def whole_weights(self) -> dict[str, torch.Tensor]:
        """Return the model's own."""
        return named_weights(self.model)

    def save_model(self, folder: Path) -> None:
        """Rank 0 writes safetensors."""
        if is_main_rank():
            self.model.save_pretrained(folder)

    def save_state(self, folder: Path) -> None:
        """Rank 0 writes what is trained and the optimizer, as safetensors and JSON; the ranks are equal."""
        if is_main_rank():
            save_file(trained_tensors(self.model), folder / "weights.safetensors")
            _save_optimizer(self.optimizer, folder)

    def load_state(self, folder: Path) -> None:
        """Restore model and optimizer bit for bit."""
        load_weights(self.model, load_file(folder / "weights.safetensors"), str(folder))
        _load_optimizer(self.optimizer, folder)


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


def _save_optimizer(optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Tensors `<parameter>.<name>` as safetensors, all else as JSON."""
    state = optimizer.state_dict()
    rows = {f"{index}.{name}": value for index, row in state["state"].items() for name, value in row.items()}
    tensors = {name: value.contiguous() for name, value in rows.items() if isinstance(value, torch.Tensor)}
    save_file(tensors, folder / "optimizer.safetensors")
    plain = {name: value for name, value in rows.items() if name not in tensors}
    text = json.dumps({"names": list(rows), "plain": plain, "param_groups": state["param_groups"]}, indent=1)
    (folder / "optimizer.json").write_text(text + "\n")


def _load_optimizer(optimizer: torch.optim.Optimizer, folder: Path) -> None:
    stored = json.loads((folder / "optimizer.json").read_text())
    state: dict[int, dict[str, Any]] = {}
    values = {**stored["plain"], **load_file(folder / "optimizer.safetensors")}
    for key in stored["names"]:
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = values[key]
    groups = [
        {name: tuple(value) if isinstance(value, list) and name != "params" else value for name, value in row.items()}
        for row in stored["param_groups"]
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
