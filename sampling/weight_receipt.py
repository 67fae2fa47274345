"""What is mixed into vLLM's worker: new weights with a receipt of what was read, and a random state that is kept.

vLLM (0.32) answers a reload with 200 whatever it was given, and its own checksums of a CPU model are those of empty
tensors (linear layers are packed after loading). `ReceivesWeights` is mixed into its worker (the flag
`worker-extension-cls`, set by `sampling.server` where `has_controls` is on), takes what comes by
`sampling.weight_stream`, and answers with a digest of every tensor it handed on, to be compared with those of what was
sent.
"""

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
import torch

from espalier.sampling.weight_chain import Invitation
from espalier.sampling.weight_digest import digest
from espalier.sampling.weight_stream import WeightReceiver


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

    reload_weights: Any  # the worker's: under vLLM's config, which some layers ask for
    rank: int
    _weights: WeightReceiver | None = None
    _last: tuple[str, dict[str, str]] = ("", {})
    _is_torn = False

    def worker_rank(self) -> str:
        """Return which worker of its engine this one is."""
        return str(self.rank)

    def join_weights(self, invitation: dict[str, Any], first_rank: int) -> dict[str, int]:
        """Join the trainer's group, as one of an engine whose first worker has that rank; the own rank. Asked again by
        the same trainer, it is in the group already. Raises StreamBroken."""
        asked = Invitation(**invitation)
        if self._weights is None or self._weights.invitation.key != asked.key:
            if self._weights is not None:
                self._weights.close()
            self._weights = None
            self._weights = WeightReceiver(asked, first_rank + self.rank, self.device)
        return {"rank": self._weights.rank}

    def receive_weights(self, key: str, number: int) -> dict[str, str]:
        """Serve the weights that the trainer of the group `key` sends next, its delivery `number`; name → digest of
        every one, on every worker. Asked again for a delivery that came, its receipt.

        Raises StreamBroken; RuntimeError where another trainer has taken the engine, or where an earlier delivery broke
        off: vLLM (0.32) then holds layers without weights and the first shards of others, which the next delivery would
        mix with its own.
        """
        if self._is_torn:
            raise RuntimeError("an earlier delivery broke off in the middle of a reload, and what this engine holds is "
                               "no model: start it again")  # fmt: skip
        if self._weights is None or self._weights.invitation.key != key:
            raise RuntimeError("this engine does not listen to this trainer: another one has taken it since")
        if self._last[0] == f"{key}/{number}":
            return self._last[1]
        receipt: dict[str, str] = {}
        coming = self._weights.receive()
        first = list(islice(coming, 1))  # nothing is touched before something comes

        def read() -> Iterator[tuple[str, torch.Tensor]]:
            for name, value in chain(first, coming):
                first.clear()
                receipt[name] = digest(value)
                yield name, value

        try:
            self.reload_weights(weights_iterator=read())
        except BaseException:
            self._is_torn = True
            raise
        for name, value in coming:  # nothing, unless the engine stopped early: those it left are on no receipt
            del name, value
        self._last = f"{key}/{number}", receipt
        return receipt
