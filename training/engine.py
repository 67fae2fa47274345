"""The engine: one model, its optimizer, and how gradients become a step. The loop sees only this protocol.

Losses arrive already divided by the global count (over micro-batches and ranks), so gradients are summed
over ranks, never averaged.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from runtime.distributed import is_main_rank, sum_gradients


class BadPrecision(ValueError):
    """A precision that does not exist."""

    exit_code = 2


@contextmanager
def autocast(device: torch.device, precision: str) -> Iterator[None]:
    """bf16 matrix products over float32 master weights, or plain fp32."""
    if precision not in ("bf16", "fp32"):
        raise BadPrecision(f"precision must be bf16 or fp32, got '{precision}'")
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        yield


class Engine(Protocol):
    """What the loop needs of an engine."""

    model: Any
    device: torch.device

    def backward(self, loss: torch.Tensor) -> None:
        """Add one micro-batch's gradients."""

    def step(self, learning_rate: float) -> float:
        """Clip, update, clear, once all micro-batches have gone backward; the norm before clipping."""

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

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, device: torch.device, max_grad_norm: float):
        self.model = model
        self.optimizer = optimizer
        self.device = device
        self.max_grad_norm = max_grad_norm if max_grad_norm > 0 else float("inf")
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate gradients."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, learning_rate: float) -> float:
        """Sum over ranks, clip to `max_grad_norm`, update."""
        sum_gradients(self.parameters)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def save_model(self, folder: Path) -> None:
        """Rank 0 writes safetensors."""
        if is_main_rank():
            self.model.save_pretrained(folder)

    def save_state(self, folder: Path) -> None:
        """Rank 0 writes model and optimizer; the ranks are equal."""
        if is_main_rank():
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state, folder / "engine.pt")

    def load_state(self, folder: Path) -> None:
        """Restore model and optimizer bit for bit."""
        state = torch.load(folder / "engine.pt", map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
