"""Passes that begin behind the parts that a changed weight does not touch."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from espalier.rl.probes.kept_pass import KeptPasses


class Part(torch.nn.Module):
    """Multiplies by its weight, gives that in a form, and counts its calls."""

    def __init__(self, form: Any):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(2.0))
        self.form, self.num_calls = form, 0

    def forward(self, given: torch.Tensor) -> Any:
        self.num_calls += 1
        return self.form(given * self.weight)


class Two(torch.nn.Module):
    config = SimpleNamespace(get_text_config=SimpleNamespace)

    def __init__(self, first: Part, second: Part, read: Any):
        super().__init__()
        self.first, self.second, self.read = first, second, read

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.read(self.first(given)))
        return found


@pytest.mark.parametrize(("form", "read", "num_calls"), [
    (lambda value: value, lambda output: output, 1),
    (lambda value: (value, None), lambda output: output[0], 1),
    (lambda value: {"value": value}, lambda output: output["value"], 2),  # which is not kept
])  # fmt: skip
def test_a_part_in_front_of_the_weight_is_computed_once_where_its_output_can_be_kept(
    form: Any, read: Any, num_calls: int
) -> None:
    model, given = Two(Part(form), Part(lambda value: value), read), torch.tensor(3.0)
    passes = KeptPasses(model)
    with passes.kept("a"):
        assert model(given) == 12
    model.second.weight.data.fill_(5.0)
    with passes.repeated("a", "second.weight"):
        assert model(given) == 30
    assert (model.first.num_calls, model.second.num_calls) == (num_calls, 2)
    assert not {"forward"} & (vars(model.first).keys() | vars(model.second).keys())


def test_a_module_under_two_names_is_computed_each_time() -> None:
    part = Part(lambda value: value)
    model = torch.nn.Module()
    for name in ("one", "other"):
        holder = torch.nn.Module()
        holder.part = part
        model.add_module(name, holder)
    model.config = Two.config
    passes = KeptPasses(model)
    with passes.kept("a"):
        assert part(torch.tensor(1.0)) == 2
    with passes.repeated("a", "one.part.weight"):
        assert part(torch.tensor(1.0)) == 2
    assert part.num_calls == 2
