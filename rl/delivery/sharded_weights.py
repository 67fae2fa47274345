"""The weights of a policy that ZeRO-3 cuts, which no rank and no host holds whole.

They are gathered a few at a time when they are sent, large ones slice by slice, and it is the sharded model itself, on
all ranks, that computes what is looked at before a delivery and what proves that deliveries arrive. For that proof
noise is put on each parameter while it is whole: the ranks' own parts are not touched.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from espalier.models.inputs import network
from espalier.models.parametrised import parametrised
from espalier.rl.delivery.policy_weights import Noise, PolicyWeights
from espalier.rl.probes.canary import Canary, Scores, canary_scores, noisy, vocabulary_of
from espalier.rl.probes.rounding import rounded
from espalier.runtime.rank_calls import RankCalls
from espalier.sampling.weight_buckets import Kinds, Sliced
from espalier.training.engine import Engine
from espalier.training.shards import GatheredWeights

T = TypeVar("T")


class ShardedPolicy:
    """What every rank's main thread does with its part of the policy when rank 0 asks (`RankCalls`): gather a group of
    weights, or compute the canaries, with the noise that is asked for."""

    def __init__(self, engine: Engine, weights: GatheredWeights):
        self.engine = engine
        self.weights = weights
        self.groups = weights.groups()

    def gather(self, number: int, noise: Noise) -> list[tuple[str, torch.Tensor]]:
        """Return a group's weights on rank 0, which holds them until the next call."""
        return self.weights.gather(self.groups[number], self._making(noise))

    def numbers(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return [stop - start] of a large weight, flattened."""
        return self.weights.slice_of(name, start, stop)

    def rest(self) -> None:
        """Let go of what was gathered."""
        self.weights.release()

    @torch.no_grad()
    def scores(self, noise: Noise, canaries: Sequence[Canary], precision: str, dtype: torch.dtype | None) -> Scores:
        """Return what the model makes of the canaries."""
        self.rest()
        model = self.engine.model
        model.eval()

        def logits(**inputs: torch.Tensor) -> torch.Tensor:
            with self.engine.computing_in(precision):
                found: torch.Tensor = model(**inputs).logits
            return found

        rounding = rounded(network(model), dtype) if dtype is not None else nullcontext()
        with rounding, parametrised(self.weights.shards.module, self._making(noise), self.engine.device):
            return canary_scores(logits, self.engine.device, canaries, vocabulary_of(network(model)))

    def _making(self, noise: Noise) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
        """Return what puts noise on the model's tensors, by their names there: on what adapters are added to, and with
        DoRA on its length too."""
        making: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
        for name, how in noise.by_name(self.weights.first_names).items():
            for source in self.weights.carriers(name):
                making[source] = partial(_noisy, how)
        return making


def _noisy(noise: tuple[float, int, int], whole: torch.Tensor) -> torch.Tensor:
    return noisy(whole.detach(), *noise)


class ShardedWeights(PolicyWeights):
    """`calls`: to a `ShardedPolicy`, whose weights these are with that `noise`."""

    def __init__(self, calls: RankCalls, noise: Noise | None = None):
        self.calls = calls
        self.noise = noise or Noise()
        self.policy: ShardedPolicy = calls.target

    @property
    def kinds(self) -> Kinds:
        """Known without gathering."""
        return self.policy.weights.kinds

    @property
    def first_names(self) -> Mapping[str, str]:
        """Of the model's parameters."""
        return self.policy.weights.first_names

    def whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather them, group by group."""
        for number in range(len(self.policy.groups)):
            yield from self._group(number)
        self.calls.ask("rest")

    def items(self) -> Iterator[tuple[str, torch.Tensor | Sliced]]:
        """Gather them, group by group; a large one that has no noise slice by slice."""
        weights, kinds = self.policy.weights, self.kinds
        has_noise = self.noise.by_name(weights.first_names)
        for number, names in enumerate(self.policy.groups):
            if names[0] not in has_noise and weights.is_in_slices(names):
                self.calls.ask("rest")  # what came before is let go
                yield names[0], Sliced(kinds[names[0]][0], partial(self.calls.ask, "numbers", names[0]))
            else:
                yield from self._group(number)
        self.calls.ask("rest")

    def _group(self, number: int) -> Iterator[tuple[str, torch.Tensor]]:
        group = self.calls.ask("gather", number, self.noise)
        while group:
            yield group.pop(0)  # what is let go at the other end is held by nobody else

    def scores(self, canaries: Sequence[Canary], precision: str, dtype: torch.dtype | None = None) -> Scores:
        """Have all ranks compute them."""
        found: Scores = self.calls.ask("scores", self.noise, list(canaries), precision, dtype)
        return found

    def perturbed(self, scales: Mapping[str, float], seed: int) -> "ShardedWeights":
        """Return a description: noise is put on what is asked for."""
        return ShardedWeights(self.calls, Noise(dict(scales), seed))

    def without_noise(self, name: str) -> "ShardedWeights":
        """Return a description, as `perturbed`."""
        return ShardedWeights(self.calls, replace(self.noise, without=name))

    def on_all_ranks(self, call: Callable[[], T]) -> T:
        """Have every rank gather and compute meanwhile."""
        return self.calls.serve(call)
