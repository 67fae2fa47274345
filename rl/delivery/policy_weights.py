"""One version of the policy as a delivery sees it: its weights, one by one, and what they make of the canaries.

Rank 0 talks to the engines. Where it holds all weights (`HeldWeights`) it asks nobody for them; where no rank does, all
ranks gather and compute together whenever it asks (`rl.delivery.sharded_weights`). What delivers and proves does not
see the difference.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

from espalier.models.precision import autocast
from espalier.rl.probes.canary import Canary, Scores, canary_scores, noisy, vocabulary_of
from espalier.rl.probes.rounding import rounded
from espalier.runtime.distributed import from_main_rank
from espalier.sampling.weight_buckets import Kinds, kinds_of
from espalier.training.engine import named_weights

T = TypeVar("T")


class PolicyWeights(ABC):
    """Implements `sampling.weight_buckets.Streamed`."""

    @property
    @abstractmethod
    def kinds(self) -> Kinds:
        """Whole shapes and dtypes by name, tied weights under every name."""

    @property
    @abstractmethod
    def first_names(self) -> Mapping[str, str]:
        """By every name the first one of the same tensor."""

    @abstractmethod
    def items(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the weights in the order of `kinds`, not to be written to, and each to be let go before the next is
        asked for: on every rank from its main thread, of which other ranks than 0 may get none; or on rank 0 alone
        within `on_all_ranks`. May be asked for again."""

    @abstractmethod
    def scores(self, canaries: Sequence[Canary], precision: str, dtype: torch.dtype | None = None) -> Scores:
        """Return what they make of the canaries' responses; with `dtype`, the output of every layer rounded to it.
        Called as `items`."""

    @abstractmethod
    def perturbed(self, scales: Mapping[str, float], seed: int) -> "PolicyWeights":
        """Return others, with normal noise of `scales[name]` times its own size on each parameter; names of one tensor
        share it."""

    @abstractmethod
    def without_noise(self, name: str) -> "PolicyWeights":
        """Return perturbed ones in which this parameter, under this name alone, is as it was."""

    @abstractmethod
    def on_all_ranks(self, call: Callable[[], T]) -> T:
        """Return what `call` returns on rank 0, which alone makes it; on every rank. These weights and those made of
        them may be asked for within."""


class HeldWeights(PolicyWeights):
    """All of them, by name, on rank 0 at least; `model` computes with what is put in. `before`: without noise."""

    def __init__(
        self, model: Any, weights: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor] | None = None
    ):
        self.model = model
        self.weights = dict(weights)
        self.before = self.weights if before is None else before

    @property
    def kinds(self) -> Kinds:
        """Of the tensors."""
        return kinds_of(self.weights)

    @property
    def first_names(self) -> Mapping[str, str]:
        """Of those that share memory."""
        owners: dict[int, str] = {}
        return {name: owners.setdefault(value.data_ptr(), name) for name, value in self.weights.items()}

    def items(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return them."""
        return self.weights.items()

    def scores(self, canaries: Sequence[Canary], precision: str, dtype: torch.dtype | None = None) -> Scores:
        """Compute them on this rank."""
        self.model.eval()
        device = next(iter(self.weights.values())).device

        def logits(**inputs: torch.Tensor) -> torch.Tensor:
            with autocast(device, precision):
                called = torch.func.functional_call(self.model, self.weights, kwargs=inputs, tie_weights=False)
            found: torch.Tensor = called.logits
            return found

        with rounded(self.model, dtype) if dtype is not None else nullcontext():
            return canary_scores(logits, device, canaries, vocabulary_of(self.model))

    def perturbed(self, scales: Mapping[str, float], seed: int) -> "HeldWeights":
        """Return copies of the perturbed ones."""
        found = dict(self.weights)
        shared: dict[int, torch.Tensor] = {}
        for index, (name, scale) in enumerate(scales.items()):
            value = self.weights[name]
            if value.data_ptr() not in shared:
                shared[value.data_ptr()] = noisy(value, scale, seed, index)
            found[name] = shared[value.data_ptr()]
        return HeldWeights(self.model, found, self.weights)

    def without_noise(self, name: str) -> "HeldWeights":
        """Return the same tensors but one."""
        return HeldWeights(self.model, {**self.weights, name: self.before[name]}, self.before)

    def on_all_ranks(self, call: Callable[[], T]) -> T:
        """Have the other ranks wait."""
        return from_main_rank(call)


def weights_of(policy: PolicyWeights | torch.nn.Module) -> PolicyWeights:
    """Return the weights; a model's own."""
    return policy if isinstance(policy, PolicyWeights) else HeldWeights(policy, named_weights(policy))
