"""Weights that are made when they are read, and put nothing in the network's place."""

from typing import Any

import pytest
import torch

from espalier.models.parametrised import parametrised

CPU = torch.device("cpu")


class Reading(torch.nn.Module):
    """Reads the weight of its own layer twice, and that of a layer that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.read = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3, bias=False)
        self.own = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.called(given) * self.own + given @ self.read.weight + self.own + self.shift


def test_every_read_of_a_weight_gets_what_is_made_of_it_and_once_in_a_pass() -> None:
    torch.manual_seed(0)
    model, given = Reading(), torch.randn(2, 3)
    made: list[str] = []

    def doubled(name: str) -> Any:
        return lambda own: made.append(name) or own + 1

    expected = torch.func.functional_call(model, {name: own + 1 for name, own in model.state_dict().items()}, (given,))
    names = list(model.state_dict())
    with parametrised(model, {name: doubled(name) for name in names}, CPU):
        assert torch.equal(model(given), expected)
        assert sorted(made) == sorted(names), "`own` was read twice"
        assert list(model.state_dict()) == names
        assert type(model).__name__ == "Reading"
        assert torch.equal(model.own, torch.full((3,), 2.0)), "read outside of a pass"
        assert made.count("own") == 2
    assert type(model) is Reading
    assert torch.equal(model.own, torch.ones(3))
    assert model.own.requires_grad


def test_a_pass_that_fails_leaves_the_network_as_it_was() -> None:
    model = Reading()

    def failing(own: torch.Tensor) -> torch.Tensor:
        raise AttributeError("nothing is there")

    refused = pytest.raises(RuntimeError, match="weight of a Linear cannot be made")
    with refused, parametrised(model, {"called.weight": failing}, CPU):
        model(torch.ones(1, 3))
    assert type(model.called) is torch.nn.Linear
    model(torch.ones(1, 3))


def test_weights_are_made_in_their_own_precision_within_autocast() -> None:
    model = torch.nn.Linear(3, 3)
    outer = torch.nn.Sequential(model)
    kinds: list[torch.dtype] = []
    with torch.autocast("cpu", torch.bfloat16), parametrised(outer, {"0.weight": lambda own: own @ own}, CPU):
        kinds.append(outer[0].weight.dtype)
        assert outer(torch.ones(1, 3)).dtype == torch.bfloat16
    assert kinds == [torch.float32]
