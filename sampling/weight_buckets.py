"""New weights as bytes: which tensors come, in which buckets, and by which digest each is known again."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import xxhash

BUCKET_BYTES = 4 * 2**20  # large ones come as fresh pages from the allocator each time, which costs more than to send
_ALIGNED = 16  # bytes: any dtype may begin there

Kinds = Mapping[str, tuple[torch.Size, torch.dtype]]


class Streamed(Protocol):
    """Weights that come one by one, of which nobody has to hold all."""

    @property
    def kinds(self) -> Kinds:
        """What will come, in that order."""

    def items(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return each when it is asked for; from the first one again with every call."""


@dataclass(frozen=True)
class Entry:
    """One tensor in a bucket, from byte `start`."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start: int

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the tensor in the buffer [bytes]."""
        size = self.shape.numel() * self.dtype.itemsize
        return buffer[self.start : self.start + size].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Bucket:
    """`size`: bytes, the last one of which says whether the rest is good."""

    entries: list[Entry]
    size: int


def buckets_of(kinds: Kinds, limit: int) -> list[Bucket]:
    """Return the buckets that hold these tensors in their order: at most `limit` bytes of tensors in each, or one."""
    found: list[Bucket] = []
    entries: list[Entry] = []
    end = 0
    for name, (shape, dtype) in kinds.items():
        size = shape.numel() * dtype.itemsize
        start = -(-end // _ALIGNED) * _ALIGNED
        if entries and start + size > limit:
            found.append(Bucket(entries, end + 1))
            entries, start = [], 0
        entries.append(Entry(name, shape, dtype, start))
        end = start + size
    return [*found, Bucket(entries, end + 1)] if entries else found


def kinds_of(weights: Mapping[str, torch.Tensor] | Streamed, dtype: torch.dtype | None = None) -> Kinds:
    """Return the shapes and dtypes that weights are sent in: floating-point ones in `dtype`, as an engine of that dtype
    rounds what it reads (None: as they are); the few that some networks keep in float32 there (routers' biases) too."""
    if isinstance(weights, Mapping):
        kinds: Kinds = {name: (value.shape, value.dtype) for name, value in weights.items()}
    else:
        kinds = weights.kinds
    return {
        name: (shape, dtype if dtype is not None and kind.is_floating_point else kind)
        for name, (shape, kind) in kinds.items()
    }


def digest(tensor: torch.Tensor) -> str:
    """Return 32 hex digits of XXH3 of the bytes of a tensor [...]: as fast as memory is read (SHA-256 of a large
    policy takes longer than all the rest of a delivery)."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(flat.numpy().data)
