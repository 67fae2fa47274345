"""One version of the policy as a delivery sees it: its weights, one by one, and what they make of the canaries.

Rank 0 talks to the engines. Where it holds all weights (`HeldWeights`) it asks nobody for them; where no rank does, all
ranks gather and compute together whenever it asks (`rl.delivery.sharded_weights`). What delivers and proves does not
see the difference.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch

from espalier.models.merged import merge_plan
from espalier.models.parametrised import parametrised
from espalier.models.precision import autocast
from espalier.rl.probes.canary import Canary, Scores, canary_scores, noisy, vocabulary_of
from espalier.rl.probes.kept_pass import KeptPasses
from espalier.rl.probes.rounding import rounded
from espalier.runtime.distributed import from_main_rank
from espalier.sampling.weight_buckets import Kinds, Sliced
from espalier.training.engine import named_weights
from espalier.training.shards import GROUP_BYTES

T = TypeVar("T")


@dataclass(frozen=True)
class Noise:
    """Normal noise on weights, of `scales[name]` times their own size, but for one name; names of one tensor share that
    of the first. None: weights as they are."""

    scales: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    without: str = ""

    def by_name(self, first_names: Mapping[str, str]) -> dict[str, tuple[float, int, int]]:
        """Return what `noisy` is called with beside the weight, by the names of those that it is put on."""
        found: dict[str, tuple[float, int, int]] = {}
        for index, (name, scale) in enumerate(self.scales.items()):
            found.setdefault(first_names[name], (scale, self.seed, index))
        return {name: found[first_names[name]] for name in self.scales if name != self.without}


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
    def whole(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the weights in the order of `kinds`, not to be written to, and each to be let go before the next is
        asked for: on every rank from its main thread, of which other ranks than 0 may get none; or on rank 0 alone
        within `on_all_ranks`. May be asked for again."""

    def items(self) -> Iterable[tuple[str, torch.Tensor | Sliced]]:
        """Return them to be sent, as `whole`, but on rank 0 alone within `on_all_ranks`: those of which nobody has to
        hold all in slices."""
        return self.whole()

    @abstractmethod
    def scores(self, canaries: Sequence[Canary], precision: str, dtype: torch.dtype | None = None) -> Scores:
        """Return what they make of the canaries' responses; with `dtype`, the output of every layer rounded to it.
        Called as `whole`."""

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


@dataclass
class Kept:
    """What copies that differ in one weight have in common: passes, and weights with noise, of `GROUP_BYTES` in all (of
    small ones it is the calls that cost), by their noise."""

    passes: KeptPasses
    small: dict[tuple[float, int, int], torch.Tensor] = field(default_factory=dict)
    num_bytes: int = 0

    def add(self, noise: tuple[float, int, int], weight: torch.Tensor) -> torch.Tensor:
        """Return the weight, kept where there is room."""
        if self.num_bytes + weight.nbytes <= GROUP_BYTES:
            self.small[noise] = weight
            self.num_bytes += weight.nbytes
        return weight


class HeldWeights(PolicyWeights):
    """Of `tensors`, which rank 0 at least holds, by their names in the trained model: each weight is made when its turn
    comes, adapters (`scalings` of `models.merged`) merged and noise put on. `model` computes with what is put in."""

    def __init__(
        self,
        model: Any,
        tensors: Mapping[str, torch.Tensor],
        scalings: Mapping[str, float] | None = None,
        noise: Noise | None = None,
        kept: Kept | None = None,
    ):
        self.model = model
        self.tensors = tensors
        self.scalings = scalings or {}
        self.noise = noise or Noise()
        self._kept = kept
        self.plan = merge_plan(tensors, self.scalings)
        self._noise_on = self.noise.by_name(self.first_names)

    @property
    def kinds(self) -> Kinds:
        """Known before anything is merged."""
        return {name: how.kind(*self._sources(name)) for name, how in self.plan.items()}

    @property
    def first_names(self) -> Mapping[str, str]:
        """Of those that share memory."""
        owners: dict[int, str] = {}
        return {name: owners.setdefault(self._sources(name)[0].data_ptr(), name) for name in self.plan}

    def whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Make one after the other."""
        for name in self.plan:
            yield name, self._weight(name)

    def scores(self, canaries: Sequence[Canary], precision: str, dtype: torch.dtype | None = None) -> Scores:
        """Compute them on this rank, the weights made layer by layer."""
        self.model.eval()
        device = next(iter(self.tensors.values())).device

        def logits(**inputs: torch.Tensor) -> torch.Tensor:
            key = (precision, *(str(value.tolist()) for value in inputs.values()))
            with autocast(device, precision), self._beginning(key, dtype):
                found: torch.Tensor = self.model(**inputs).logits
            return found

        making = {name: partial(self._weight, name) for name in self.plan}
        rounding = rounded(self.model, dtype) if dtype is not None else nullcontext()
        with parametrised(self.model, making, device), rounding:
            return canary_scores(logits, device, canaries, vocabulary_of(self.model))

    def perturbed(self, scales: Mapping[str, float], seed: int) -> "HeldWeights":
        """Return a description: noise is put on when a weight is made."""
        return HeldWeights(self.model, self.tensors, self.scalings, Noise(dict(scales), seed),
                           Kept(KeptPasses(self.model)))  # fmt: skip

    def without_noise(self, name: str) -> "HeldWeights":
        """Return a description, as `perturbed`."""
        noise = replace(self.noise, without=name)
        return HeldWeights(self.model, self.tensors, self.scalings, noise, self._kept)

    def on_all_ranks(self, call: Callable[[], T]) -> T:
        """Have the other ranks wait."""
        return from_main_rank(call)

    def _beginning(self, key: Hashable, dtype: torch.dtype | None) -> AbstractContextManager[None]:
        """Have a pass kept, or begin as the kept one that differs from it in one weight."""
        if self._kept is None or dtype is not None:
            return nullcontext()
        passes = self._kept.passes
        return passes.repeated(key, self.noise.without) if self.noise.without else passes.kept(key)

    def _sources(self, name: str) -> list[torch.Tensor]:
        return [self.tensors[source] for source in self.plan[name].sources]

    @torch.no_grad()
    def _weight(self, name: str, own: torch.Tensor | None = None) -> torch.Tensor:
        """Return a weight as an engine gets it; what the model itself holds there does not matter."""
        noise = self._noise_on.get(name)
        if noise is None or self._kept is None:
            return self.plan[name](*self._sources(name))
        known = self._kept.small.get(noise)
        return self._kept.add(noise, noisy(self.plan[name](*self._sources(name)), *noise)) if known is None else known


def weights_of(policy: PolicyWeights | torch.nn.Module) -> PolicyWeights:
    """Return the weights; a model's own."""
    return policy if isinstance(policy, PolicyWeights) else HeldWeights(policy, named_weights(policy))
