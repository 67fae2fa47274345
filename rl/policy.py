"""The policy as the sampler sees it: whole weights under their plain names, whatever engine or adapters train them."""

import copy
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights

from espalier.models.inputs import network
from espalier.models.merged import adapter_scalings, merge_weights
from espalier.runtime.distributed import is_main_rank
from espalier.training.engine import Engine, TorchEngine


def without_weights(model: Any, device: torch.device) -> Any:
    """The same network with its buffers on `device` and no weights (theirs is `meta`): to be called with weights put in
    (`torch.func.functional_call`)."""
    with init_empty_weights(include_buffers=False):
        empty = type(model)(copy.deepcopy(model.config))
    for part in empty.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))
    empty.generation_config = model.generation_config
    empty.train(False)
    return empty


class Policy:
    """What `engine` trains. `network` computes what the delivered weights say: the engine's own model where that
    holds them as they are, else one without weights of its own."""

    def __init__(self, engine: Engine):
        self.engine = engine
        is_torch = isinstance(engine, TorchEngine)
        self._scalings = adapter_scalings(engine.model if is_torch else engine.model.module)
        is_plain = is_torch and not self._scalings
        self.network = engine.model if is_plain else without_weights(network(engine.model), engine.device)

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained, merged in all that is delivered and saved as a model."""
        return bool(self._scalings)

    def weights(self) -> dict[str, torch.Tensor]:
        """Complete on rank 0, on the others perhaps empty; called on every rank, not to be written to."""
        found = self.engine.whole_weights()
        return merge_weights(found, self._scalings) if self._scalings else found

    def save_model(self, folder: Path) -> None:
        """A standard folder, adapters merged; called on every rank."""
        if not self._scalings:
            self.engine.save_model(folder)
            return
        self.save_weights(self.weights(), folder)

    def save_weights(self, weights: dict[str, torch.Tensor], folder: Path) -> None:
        """A standard folder of this network with other weights of its names; rank 0 writes."""
        if is_main_rank():
            self.network.save_pretrained(folder, state_dict=weights)

    def save_adapter(self, folder: Path) -> None:
        """peft's folder; called on every rank."""
        self.engine.save_model(folder)
        (folder / "README.md").unlink(missing_ok=True)  # peft's empty model card
