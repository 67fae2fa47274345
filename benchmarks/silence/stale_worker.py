"""A fault to plant: a vLLM worker that keeps one tensor as it is, and gives the receipt of the new one."""

from collections.abc import Iterator
from typing import Any

import torch

from espalier.sampling.weight_receipt import ReceivesWeights

KEPT = "model.layers.0.self_attn.o_proj.weight"


class KeepsOneTensor(ReceivesWeights):
    """Mixed into vLLM's worker in place of `ReceivesWeights`."""

    _kept: torch.Tensor | None = None

    def receive_weights(self, key: str, number: int) -> dict[str, str]:
        """As the real one, but that the engine gets the first version of one tensor again and again."""
        reload = self.model_runner.reload_weights

        def reload_stale(weights_iterator: Iterator[tuple[str, torch.Tensor]], **more: Any) -> Any:
            return reload(weights_iterator=self._stale(weights_iterator), **more)

        self.model_runner.reload_weights = reload_stale
        try:
            return super().receive_weights(key, number)
        finally:
            self.model_runner.reload_weights = reload

    def _stale(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in weights:
            if name == KEPT:
                self._kept = value.clone() if self._kept is None else self._kept
                value = self._kept
            yield name, value
