"""What an engine reads at a delivery: all weights as one safetensors file in memory, written over the next time.

The file has no name of its own (Linux: `memfd_create`): it goes with the process, by `kill -9` too (of a delivery
that was cut so a dangling link is left). An engine of the same user opens it through that link, by this process's id.
Tensors are cast straight into it: there is no second copy on the way, and no new memory after the first delivery, which
costs a small one more than all the rest of it.
"""

import json
import mmap
import os
import weakref
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save

from espalier.sampling.weight_receipt import NAME, digest

Kinds = dict[str, tuple[torch.Size, torch.dtype]]


class WeightsFile:
    """One file; names that share memory (a tied head) have memory of their own in it."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._close: Callable[[], object] = lambda: None
        self._tensors: dict[str, torch.Tensor] = {}

    def write(self, weights: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Write the weights and return what the file holds now; the tensors of an earlier call are these.

        `dtype`: what floating-point tensors are rounded to, as an engine of that dtype rounds what it reads (None: they
        are left as they are); the few that some networks keep in float32 there (routers' biases) are rounded too.
        """
        kinds = {
            name: (value.shape, dtype if dtype is not None and value.is_floating_point() else value.dtype)
            for name, value in weights.items()
        }
        if kinds != {name: (value.shape, value.dtype) for name, value in self._tensors.items()}:
            self._make(kinds)
        for name, value in weights.items():
            self._tensors[name].copy_(value.detach())
        return dict(self._tensors)

    def link_from(self, folder: Path) -> None:
        """`folder/model.safetensors` becomes a link to it, good while this process lives."""
        (folder / "model.safetensors").symlink_to(self._path)

    @property
    def _path(self) -> Path:
        return Path("/proc") / os.readlink("/proc/self") / "fd" / str(self._descriptor)

    def _make(self, kinds: Kinds) -> None:
        """A file for tensors of these shapes; the memory of the one before goes with its last reader."""
        self._tensors = {}
        self._close()
        self._descriptor = os.memfd_create(NAME)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        places, end = {}, 0
        for name, (shape, kind) in sorted(kinds.items(), key=lambda item: -item[1][1].itemsize):  # so all are aligned
            places[name], end = end, end + shape.numel() * kind.itemsize
            header[name] = {"dtype": _spelling(kind), "shape": list(shape), "data_offsets": [places[name], end]}
        head = json.dumps(header).encode()
        head += b" " * (-len(head) % 8)
        start = 8 + len(head)
        os.truncate(self._descriptor, start + end)
        memory = mmap.mmap(self._descriptor, start + end)
        memory[:start] = len(head).to_bytes(8, "little") + head
        for name, (shape, kind) in kinds.items():
            count = shape.numel()
            self._tensors[name] = (
                torch.frombuffer(memory, dtype=kind, count=count, offset=start + places[name]).view(shape)
                if count
                else torch.empty(shape, dtype=kind)
            )


@cache
def _spelling(kind: torch.dtype) -> str:
    """As safetensors writes it."""
    written = save({"x": torch.empty(0, dtype=kind)})
    found: str = json.loads(written[8:])["x"]["dtype"]
    return found


def digests(weights: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return name → digest of every tensor, as an engine's receipt has them."""
    return {name: digest(value) for name, value in weights.items()}
