"""An exponential moving average of the policy over its versions: tensors of its own, in float32 on the CPU of rank 0.

After every iteration average = decay * average + (1 - decay) * policy (Polyak and Juditsky 1992, with a constant
weight); it begins as the first policy. It is neither sampled from nor trained: it is saved in checkpoints and, at the
end, as `model_ema/`. Weights are those that are delivered, adapters merged. Where ZeRO-3 cuts the policy, this average
is whole all the same.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from espalier.data.records import BadInput
from espalier.rl.delivery.policy_weights import PolicyWeights
from espalier.runtime.distributed import from_main_rank, is_main_rank
from espalier.training.engine import BadCheckpoint

_FILE = "ema.safetensors"


class MovingAverage:
    """Empty until `start` or `load`, and always on other ranks than 0."""

    def __init__(self, decay: float):
        if not 0 < decay < 1:
            raise BadInput(f"ema.decay must be in (0, 1), or 0 for no average, got {decay:g}")
        self.decay = decay
        self._own: dict[str, torch.Tensor] = {}

    def start(self, weights: PolicyWeights) -> None:
        """Begin as a copy of `weights`, tied names as one; called on every rank."""
        self._own, first_names = {}, weights.first_names
        for name, value in weights.whole():
            if is_main_rank():
                own = self._own.get(first_names[name])
                self._own[name] = value.to("cpu", torch.float32, copy=True) if own is None else own

    @torch.no_grad()
    def update(self, weights: PolicyWeights) -> None:
        """One version later; called on every rank."""
        done = set()
        for name, value in weights.whole():
            own = self._own.get(name)
            if own is not None and id(own) not in done:
                own.lerp_(value.to(own), 1 - self.decay)
                done.add(id(own))

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the average by the names of the policy's weights."""
        return dict(self._own)

    def save(self, folder: Path) -> None:
        """Shared tensors once, under their first name."""
        if self._own:
            first = {id(value): name for name, value in reversed(self._own.items())}
            save_file({name: self._own[name] for name in sorted(first.values())}, folder / _FILE)

    def load(self, folder: Path, weights: PolicyWeights) -> None:
        """What `save` wrote, for a policy of `weights`; called on every rank. Raises BadCheckpoint where there is
        nothing, or another policy's."""
        self.start(weights)
        from_main_rank(lambda: self._load(folder))

    def _load(self, folder: Path) -> None:
        path = folder / _FILE
        stored = load_file(path) if path.is_file() else {}
        names = {id(value): name for name, value in reversed(self._own.items())}
        if {name: self._own[name].shape for name in names.values()} != {k: v.shape for k, v in stored.items()}:
            raise BadCheckpoint(f"{folder} has no average of this policy's weights: choose another output_dir")
        for name, value in stored.items():
            self._own[name].copy_(value)
