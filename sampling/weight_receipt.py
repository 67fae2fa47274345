"""What is mixed into vLLM's worker: new weights with a receipt of what was read, and a random state that is kept.

vLLM (0.32) answers a reload with 200 whatever it was given, and its own checksums of a CPU model are those of empty
tensors (linear layers are packed after loading). `ReceivesWeights` is mixed into its worker (the flag
`worker-extension-cls`, set by `sampling.server` where `has_controls` is on), takes what comes by
`sampling.weight_stream`, and answers with a digest of every tensor it handed on, to be compared with those of what was
sent.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from espalier.sampling.weight_stream import Invitation, WeightReceiver, device_of, digest


class KeepsRandomState:
    """The random state of an engine, kept while it is asked for what must not change its later draws.

    vLLM draws for all requests without a seed by one random state per worker, and on CPUs (0.32) moves it for requests
    with a seed too: every sample changes all samples behind it. The state is torch's; its second model runner, the one
    of GPUs, gives every such request a seed that it draws by NumPy's.
    """

    device: Any
    _kept_random_states: tuple[torch.Tensor, torch.Tensor | None, Any] | None = None

    def keep_random_state(self) -> bool:
        """Remember torch's random state here, the device's too, and NumPy's."""
        on_gpu = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        self._kept_random_states = torch.get_rng_state(), on_gpu, np.random.get_state()
        return True

    def put_random_state_back(self) -> bool:
        """Draw from now on as if nothing had been drawn since. Raises RuntimeError where nothing was kept."""
        if self._kept_random_states is None:
            raise RuntimeError("no random state was kept")
        on_cpu, on_gpu, of_numpy = self._kept_random_states
        torch.set_rng_state(on_cpu)
        np.random.set_state(of_numpy)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, self.device)
        return True


class ReceivesWeights(KeepsRandomState):
    """Mixed into vLLM's worker."""

    model_runner: Any
    rank: int
    _weights: WeightReceiver | None = None

    def weight_device(self) -> str:
        """Return what tells this worker's device from every other."""
        return device_of(self.device)

    def join_weights(self, invitation: dict[str, Any], first_rank: int) -> dict[str, int]:
        """Join the trainer's group, as one of an engine whose first worker has that rank; the own rank. Raises
        StreamBroken."""
        self._weights = None
        self._weights = WeightReceiver(Invitation(**invitation), first_rank + self.rank, self.device)
        return {"rank": first_rank + self.rank}

    def receive_weights(self) -> dict[str, str]:
        """Serve the weights that the trainer sends next; name → digest of every one, on every worker. Raises
        StreamBroken."""
        if self._weights is None:
            raise RuntimeError("this engine has not joined the trainer's group")
        receipt: dict[str, str] = {}
        coming = self._weights.receive()

        def read() -> Iterator[tuple[str, torch.Tensor]]:
            for name, value in coming:
                receipt[name] = digest(value)
                yield name, value

        self.model_runner.reload_weights(weights_iterator=read())
        for name, value in coming:  # nothing, unless the engine stopped early: those it left are on no receipt
            del name, value
        return receipt
