"""The weights of a policy that ZeRO-3 cuts, which no rank and no host holds whole.

They are gathered a few at a time when they are sent, and it is the sharded model itself, on all ranks, that computes
what is looked at before a delivery and what proves that deliveries arrive. For that proof the parameters themselves are
perturbed, while every rank keeps a copy of its own part, and put back bit for bit before anything else is done.
"""

import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from espalier.models.inputs import network
from espalier.rl.delivery.policy_weights import PolicyWeights
from espalier.rl.probes.canary import Canary, Scores, canary_scores, noisy, vocabulary_of
from espalier.rl.probes.rounding import rounded
from espalier.runtime.rank_calls import RankCalls
from espalier.sampling.weight_buckets import Kinds
from espalier.training.engine import Engine
from espalier.training.shards import GatheredWeights

T = TypeVar("T")


@dataclass(frozen=True)
class Noise:
    """On which parameters, in units of their own size (`scales`), but for one name; none: the weights as they are.
    `key`: by which it is known again, no other one has it."""

    scales: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    without: str = ""
    key: str = field(default_factory=lambda: secrets.token_hex(8))


class ShardedPolicy:
    """What every rank's main thread does with its part of the policy when rank 0 asks (`RankCalls`): gather a group of
    weights, or compute the canaries, with the noise that is asked for. In between it may be left perturbed; `rest` puts
    everything back."""

    def __init__(self, engine: Engine, weights: GatheredWeights):
        self.engine = engine
        self.weights = weights
        self.groups = weights.groups()
        names = weights.first_names
        counts = Counter(names.values())
        self._tied = {name for name, first in names.items() if counts[first] > 1}
        self._all_carriers = [*{id(one): one for name in names for one in self._carriers(name)}.values()]
        self._kept: dict[int, torch.Tensor] = {}  # this rank's part of what was perturbed, as it was
        self._now: dict[int, tuple[float, int, int]] = {}  # noise by parameter
        self._noise = Noise()

    def gather(self, number: int, key: str) -> list[tuple[str, torch.Tensor]]:
        """Return a group's weights on rank 0, which holds them until the next call. Raises RuntimeError where others
        than those with the noise of that `key` are to be had now."""
        if key != self._noise.key:
            raise RuntimeError("other weights were asked for in the middle of a delivery")
        return self.weights.gather(self.groups[number])

    def release(self) -> None:
        """Let go of what was gathered."""
        self.weights.release()

    @torch.no_grad()
    def scores(self, noise: Noise, canaries: Sequence[Canary], precision: str, dtype: torch.dtype | None) -> Scores:
        """Return what the model makes of the canaries."""
        self.take(noise)
        model = self.engine.model
        model.eval()

        def logits(**inputs: torch.Tensor) -> torch.Tensor:
            with self.engine.computing_in(precision):
                found: torch.Tensor = model(**inputs).logits
            return found

        rounding = rounded(network(model), dtype) if dtype is not None else nullcontext()
        with rounding, self._one_name_as_it_was(noise.without):
            return canary_scores(logits, self.engine.device, canaries, vocabulary_of(network(model)))

    def rest(self) -> None:
        """Let go of what was gathered, and put back what was perturbed."""
        self.take(Noise())

    def take(self, noise: Noise) -> None:
        """Have the parameters as `noise` says, those of tied names perturbed whatever name is to be without."""
        self.weights.release()
        self._noise = noise
        wanted: dict[int, tuple[float, int, int]] = {}
        for index, (name, scale) in enumerate(noise.scales.items()):
            if name != noise.without or name in self._tied:
                for tensor in self._carriers(name):
                    wanted.setdefault(id(tensor), (scale, noise.seed, index))
        for tensor in self._all_carriers:
            if self._now.get(id(tensor)) != wanted.get(id(tensor)):
                self._change(tensor, wanted.get(id(tensor)))
        if not noise.scales:
            self._kept.clear()

    def _carriers(self, name: str) -> list[torch.Tensor]:
        """Return what the noise of a weight is put on: with DoRA on its direction and on its length."""
        return [self.weights.first(name), *self.weights.lengths(name)]

    def _change(self, tensor: torch.Tensor, noise: tuple[float, int, int] | None) -> None:
        shards = self.weights.shards
        if id(tensor) in self._kept:
            shards.put_part(tensor, self._kept[id(tensor)])
            self._now.pop(id(tensor), None)
        else:
            self._kept[id(tensor)] = shards.own_part(tensor)
        if noise is not None:
            shards.change(tensor, lambda whole: noisy(whole, *noise))
            self._now[id(tensor)] = noise

    @contextmanager
    def _one_name_as_it_was(self, name: str) -> Iterator[None]:
        """Have the layer that knows a tied parameter by this name compute with it as it was, the others with noise: as
        an engine does that keeps a copy of its own under that name."""
        if name not in self._tied:
            yield
            return
        owner, _, leaf = self.weights.plan[name].sources[0].rpartition(".")
        layer: Any = self.weights.shards.module.get_submodule(owner)
        before, had_own, forward = (
            self._whole_as_it_was(self.weights.first(name)),
            "forward" in vars(layer),
            layer.forward,
        )

        def with_old(*inputs: Any, **more: Any) -> Any:
            held, layer._parameters[leaf] = layer._parameters[leaf], before
            try:
                return forward(*inputs, **more)
            finally:
                layer._parameters[leaf] = held

        layer.forward = with_old
        try:
            yield
        finally:
            if had_own:
                layer.forward = forward
            else:
                del layer.forward

    def _whole_as_it_was(self, tensor: torch.Tensor) -> torch.Tensor:
        shards = self.weights.shards
        noisy_part = shards.own_part(tensor)
        shards.put_part(tensor, self._kept[id(tensor)])
        with shards.whole([tensor]):
            before = tensor.detach().clone()
        shards.put_part(tensor, noisy_part)
        return before


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

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather them, group by group."""
        self.calls.ask("take", self.noise)
        for number in range(len(self.policy.groups)):
            group = self.calls.ask("gather", number, self.noise.key)
            while group:
                yield group.pop(0)  # what is let go at the other end is held by nobody else
        self.calls.ask("release")

    def scores(self, canaries: Sequence[Canary], precision: str, dtype: torch.dtype | None = None) -> Scores:
        """Have all ranks compute them."""
        found: Scores = self.calls.ask("scores", self.noise, list(canaries), precision, dtype)
        return found

    def perturbed(self, scales: Mapping[str, float], seed: int) -> "ShardedWeights":
        """Return a description: the parameters are perturbed when they are asked for."""
        return ShardedWeights(self.calls, Noise(dict(scales), seed))

    def without_noise(self, name: str) -> "ShardedWeights":
        """Return a description, as `perturbed`."""
        return ShardedWeights(self.calls, replace(self.noise, without=name, key=secrets.token_hex(8)))

    def on_all_ranks(self, call: Callable[[], T]) -> T:
        """Have every rank gather and compute meanwhile."""
        return self.calls.serve(call)
