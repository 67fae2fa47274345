"""Gradient checkpointing: how often each product is computed, and settings that do not exist."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import dropout
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from espalier.data.records import BadInput
from espalier.models.load import load_policy
from espalier.models.recompute import checkpoint_settings


class Calls(TorchDispatchMode):
    """Within: how often each operation is called."""

    def __init__(self) -> None:
        super().__init__()
        self.number: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number[func.name()] = self.number.get(func.name(), 0) + 1
        return func(*args, **(kwargs or {}))


def calls(path: Path, setting: bool | str) -> dict[str, int]:
    """The calls of a forward and a backward pass."""
    model: Any = load_policy(str(path), "sdpa", setting).train()
    ids = torch.arange(6, 38).view(2, 16)
    with Calls() as found:
        model(ids, attention_mask=torch.ones_like(ids)).logits.square().mean().backward()
    return found.number


def test_selective_checkpointing_computes_no_product_and_no_attention_again(tiny_policy: Path) -> None:
    none, full, selective = (calls(tiny_policy, setting) for setting in (False, True, "selective"))
    attention = next(name for name in none if "scaled_dot_product" in name and "backward" not in name)
    for name in ("aten::mm", attention):
        assert selective[name] == none[name] < full[name], name
    assert selective["aten::silu"] == full["aten::silu"] == 2 * none["aten::silu"]


@torch.library.custom_op("flash_attn::of_a_test", mutates_args=())
def _attend(query: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """Fused attention for a GPU in one thing: where it drops, it draws inside."""
    return dropout(query, dropout_p) if dropout_p else query.clone()


_attend.register_autograd(
    lambda ctx, grad: (grad * ctx.saved_tensors[0], None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward((output / inputs[0]).detach()),
)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_what_drops_behind_fused_attention_drops_the_same_in_the_second_pass(share: float) -> None:
    def layer(states: torch.Tensor) -> torch.Tensor:
        return dropout(_attend(states.exp(), share).sin(), 0.5).square()

    def gradient(kind: str) -> torch.Tensor:
        torch.manual_seed(3)
        states = torch.linspace(-1, 1, 64).requires_grad_()
        done: Any = checkpoint(layer, states, **checkpoint_settings(kind)) if kind else layer(states)
        done.sum().backward()
        assert states.grad is not None
        return states.grad

    assert torch.equal(gradient("selective"), gradient(""))
    assert torch.equal(gradient("full"), gradient(""))


@pytest.mark.parametrize("setting", ["yes", "full", 1.0, 0])
def test_another_setting_is_one_line(setting: Any, tiny_policy: Path) -> None:
    with pytest.raises(BadInput, match=r"^model\.gradient_checkpointing must be false, true or selective, got"):
        load_policy(str(tiny_policy), "sdpa", setting)
    with pytest.raises(BadInput, match=r"^model\.gradient_checkpointing"):  # before anything is read
        load_policy("no/such/folder", gradient_checkpointing=setting)
