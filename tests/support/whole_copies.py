"""Weights as whole copies, held at once: what weights that are made one at a time are compared with.

    whole_copies.py {noise|adapters|whole} FOLDER

says by how many MiB the resident memory of a process rises at most, in which a policy's weights are walked over and
computed with; and how many MiB they are.
"""

import ctypes
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from espalier.models.load import load_policy
from espalier.models.lora import Lora
from espalier.models.merged import adapter_scalings, merge_plan
from espalier.models.precision import autocast
from espalier.rl.delivery.policy_weights import HeldWeights
from espalier.rl.policy import without_weights
from espalier.rl.probes.canary import Canary, Scores, canary_scores, vocabulary_of
from espalier.rl.probes.rounding import rounded
from espalier.training.engine import named_weights
from tests.support.resident_memory import peak_mib

Held = dict[str, torch.Tensor]


def merged_weights(weights: Mapping[str, torch.Tensor], scalings: Mapping[str, float]) -> Held:
    """All at once, adapters merged."""
    plan = merge_plan(weights, scalings)
    return {name: how(*(weights[source] for source in how.sources)) for name, how in plan.items()}


def with_noise(value: torch.Tensor, scale: float, seed: int, index: int) -> torch.Tensor:
    """Written out once more, as a sum of two tensors."""
    generator = torch.Generator(value.device).manual_seed(seed * 100_003 + index)
    noise = torch.randn(value.shape, generator=generator, device=value.device).to(value)
    size = float(value.float().square().mean().sqrt()) or 0.01
    return value + scale * size * noise


class WholeCopies:
    """As `HeldWeights`, which holds none."""

    def __init__(self, model: Any, weights: Held, before: Held | None = None):
        self.model, self.weights = model, weights
        self.before = weights if before is None else before

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.weights.items()

    def scores(self, canaries: Sequence[Canary], precision: str, dtype: torch.dtype | None = None) -> Scores:
        device = torch.device("cpu")
        self.model.eval()

        def logits(**inputs: torch.Tensor) -> torch.Tensor:
            with autocast(device, precision):
                called = torch.func.functional_call(self.model, self.weights, kwargs=inputs, tie_weights=False)
            found: torch.Tensor = called.logits
            return found

        with rounded(self.model, dtype) if dtype is not None else nullcontext():
            return canary_scores(logits, device, canaries, vocabulary_of(self.model))

    def perturbed(self, scales: Mapping[str, float], seed: int) -> "WholeCopies":
        found, shared = dict(self.weights), dict[int, torch.Tensor]()
        for index, (name, scale) in enumerate(scales.items()):
            value = self.weights[name]
            if value.data_ptr() not in shared:
                shared[value.data_ptr()] = with_noise(value, scale, seed, index)
            found[name] = shared[value.data_ptr()]
        return WholeCopies(self.model, found, self.weights)

    def without_noise(self, name: str) -> "WholeCopies":
        return WholeCopies(self.model, {**self.weights, name: self.before[name]}, self.before)


def main() -> None:
    """Print both numbers."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: what is freed goes back at once
    kind, folder = sys.argv[1:]
    model: Any = load_policy(folder, "eager")
    num_mib = sum(value.nbytes for value in model.state_dict().values()) / 2**20
    canaries = [Canary(list(range(5, 45)), start=8)]
    network, scalings = model, dict[str, float]()
    if kind == "adapters":
        model = Lora(rank=4, alpha=8.0).wrap(model)
        scalings = adapter_scalings(model)
        network = without_weights(model.get_base_model(), torch.device("cpu"))
    held: Any = HeldWeights(network, named_weights(model), scalings)
    if kind == "whole":
        held = WholeCopies(network, named_weights(model))
    held.scores(canaries, "fp32")  # what a first pass allocates stays

    def prove() -> None:
        weights = held if kind == "adapters" else held.perturbed(dict.fromkeys(model.state_dict(), 0.4), 3)
        weights.scores(canaries, "fp32")
        if kind != "adapters":
            weights.without_noise("model.layers.1.mlp.down_proj.weight").scores(canaries, "fp32")
        for _, value in weights.items():
            value.sum()

    print(round(peak_mib(prove)), round(num_mib))


if __name__ == "__main__":
    main()
