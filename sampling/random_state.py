"""The random state of an engine, kept while it is asked for what must not change its later draws.

vLLM draws for all requests without a seed by one random state per worker, and on CPUs (0.32) moves it for requests with
a seed too: every sample changes all samples behind it. `KeepsRandomState` is mixed into its worker.
"""

from typing import Any

import torch


class KeepsRandomState:
    """Mixed into vLLM's worker with `sampling.weight_receipt.ReceivesWeights`."""

    device: Any
    _kept_random_states: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def keep_random_state(self) -> bool:
        """Remember torch's random state here, the device's too."""
        on_gpu = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        self._kept_random_states = torch.get_rng_state(), on_gpu
        return True

    def put_random_state_back(self) -> bool:
        """Draw from now on as if nothing had been drawn since. Raises RuntimeError where nothing was kept."""
        if self._kept_random_states is None:
            raise RuntimeError("no random state was kept")
        on_cpu, on_gpu = self._kept_random_states
        torch.set_rng_state(on_cpu)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, self.device)
        return True
