"""The policy with its adapters off as the frozen reference: no second copy of the weights."""

from collections.abc import Iterator
from typing import Any

import torch

from espalier.models.evaluating import evaluating
from espalier.models.inputs import network


class PolicyWithoutAdapters:
    """The frozen reference that costs no memory: calls `model()` with its adapters off and without dropout.

    `model` is what the loop calls (a peft model, or an engine's wrapper of one); heads that are trained whole
    are those of the start. Calls have no graph.
    """

    def __init__(self, model: Any):
        self.model = model

    def get_base_model(self) -> Any:
        """Return the model whose adapters are switched off."""
        return self.model

    def to(self, device: torch.device) -> "PolicyWithoutAdapters":
        """It stands where the policy does."""
        return self

    def eval(self) -> "PolicyWithoutAdapters":
        """It always is."""
        return self

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Return the policy's."""
        return iter(self.model.parameters())

    def base_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Return (name, weight) of what its answers depend on: neither adapters nor the trained copies of heads."""
        for name, value in network(self.model).named_parameters():
            if not any(part.startswith("lora_") or part == "modules_to_save" for part in name.split(".")):
                yield name, value

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Return the base model's output."""
        with evaluating(self.model), torch.no_grad(), self.model.disable_adapter():
            return self.model(*arguments, **named)
