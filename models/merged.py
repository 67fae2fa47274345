"""The weights of a model with adapters as those of a plain one, without touching the model.

For a sampler that follows the policy: peft's own merge writes into the weights, and taking it back leaves rounding
behind. W' = W + s B A (Hu et al. 2022), and with DoRA (Liu et al. 2024) the rows of W' are then given the length of
the magnitude vector: W' m / |W'|.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from espalier.models.in_parts import whole_shape
from espalier.models.load import BadModel

_PREFIX = "base_model.model."
_ADAPTER = "default"


def adapter_scalings(model: Any) -> dict[str, float]:
    """s of every layer with an adapter, by the layer's name in the plain model; none without adapters.

    Raises BadModel where a layer is not a plain linear one.
    """
    from peft.tuners.lora import LoraLayer

    if not hasattr(model, "get_base_model"):
        return {}
    inner = model.get_base_model()
    scalings = {}
    for name, layer in inner.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        if type(layer.get_base_layer()) is not torch.nn.Linear:
            raise BadModel(f"lora.targets: the adapter of {name} cannot be delivered: it is no plain linear layer")
        scalings[name] = float(layer.scaling[_ADAPTER])
    return scalings


def merged(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, magnitude: torch.Tensor | None
) -> torch.Tensor:
    """W [out, in], A [rank, in], B [out, rank], magnitude [out] of DoRA → W' [out, in]."""
    whole = weight + scaling * (b @ a)
    return whole if magnitude is None else whole * (magnitude / torch.linalg.norm(whole, dim=1)).unsqueeze(1)


@dataclass(frozen=True)
class Merged:
    """How a weight of the plain model is computed of those of the model with adapters named `sources`: it is the only
    one, or W, A, B and DoRA's magnitude are `merged`."""

    sources: tuple[str, ...]
    scaling: float = 0.0

    def kind(self, *tensors: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
        """Return the shape and the dtype of the weight, which is not computed for it."""
        return whole_shape(tensors[0]), reduce(torch.promote_types, (tensor.dtype for tensor in tensors))

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Return the weight; what is without an adapter is not copied."""
        if len(tensors) == 1:
            return tensors[0]
        weight, a, b, *magnitude = tensors
        return merged(weight, a, b, self.scaling, magnitude[0] if magnitude else None)


def merge_plan(names: Iterable[str], scalings: Mapping[str, float]) -> dict[str, Merged]:
    """Return, by the plain model's names, how its weights are computed of those of a model with adapters, which has
    these `names`."""
    plain = {name.removeprefix(_PREFIX): name for name in names}
    plan = {}
    for name, source in plain.items():
        owner, _, what = name.partition(".base_layer.")
        if what == "weight":
            needed = [plain[f"{owner}.lora_{part}.{_ADAPTER}.weight"] for part in "AB"]
            magnitude = plain.get(f"{owner}.lora_magnitude_vector.{_ADAPTER}.weight")
            sources = (source, *needed, *([magnitude] if magnitude is not None else []))
            plan[f"{owner}.weight"] = Merged(sources, scalings[owner])
        elif what:
            plan[f"{owner}.{what}"] = Merged((source,))
        elif ".lora_" not in name:
            plan[name] = Merged((source,))
    return plan
