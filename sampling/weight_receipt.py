"""What is mixed into vLLM's worker: new weights with a receipt of what was read, and a random state that is kept.

vLLM (0.32) answers a reload with 200 whatever it found in the folder, and its own checksums of a CPU model are those of
empty tensors (linear layers are packed after loading). `ReceivesWeights` is mixed into its worker (the flag
`worker-extension-cls`, set by `sampling.server` where `has_controls` is on) and answers with a digest of every tensor
it handed on, to be compared with those of what was sent.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import safe_open

NAME = "espalier-weights"  # of the trainer's file in memory (rl.delivery.weights_file)


def digest(tensor: torch.Tensor) -> str:
    """Return 32 hex digits of XXH3 of the bytes of a tensor [...]: as fast as memory is read (SHA-256 of a large
    policy takes longer than all the rest of a delivery)."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(flat.numpy().data)


def check_link(path: Path) -> None:
    """Raise ValueError where a link into the trainer's memory leads elsewhere from here."""
    if not path.is_symlink():
        return
    target = path.readlink()
    try:
        is_there = NAME in str(target.readlink())
    except OSError:
        is_there = False
    if not is_there:
        raise ValueError(f"{target} is not the trainer's file: the engine must run as the same user in the same "
                         "container (the same process ids)")  # fmt: skip


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

    def receive_weights(self, folder: str) -> dict[str, str]:
        """Serve the weights of `folder/*.safetensors`; name → digest of every one, on every worker."""
        receipt: dict[str, str] = {}

        def read() -> Iterator[tuple[str, torch.Tensor]]:
            for path in sorted(Path(folder).glob("*.safetensors")):
                check_link(path)
                with safe_open(path, "pt") as file:
                    for name in file.keys():  # noqa: SIM118 (no mapping)
                        value = file.get_tensor(name)
                        receipt[name] = digest(value)
                        yield name, value

        self.model_runner.reload_weights(weights_iterator=read())
        return receipt
