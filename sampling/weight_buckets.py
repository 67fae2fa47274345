"""New weights as bytes: which tensors come, and in which buckets."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from espalier.sampling.weight_digest import flat_bytes, new_digest

BUCKET_BYTES = 4 * 2**20  # larger ones do not stay in the processor's caches
NUM_HELD = 2  # buckets that an engine holds: one that comes, and the last one
_ALIGNED = 16  # bytes: any dtype may begin there
_LARGE = 2**16  # bytes that are not worth a call of their own
HOST = torch.device("cpu")

Kinds = Mapping[str, tuple[torch.Size, torch.dtype]]


@dataclass(frozen=True)
class Sliced:
    """A tensor that is nowhere whole: `numbers(start, stop)` of it, flattened; asked for from its first number on."""

    shape: torch.Size
    numbers: Callable[[int, int], torch.Tensor]


class Streamed(Protocol):
    """Weights that come one by one, of which nobody has to hold all."""

    @property
    def kinds(self) -> Kinds:
        """What will come, in that order."""

    def items(self) -> Iterable[tuple[str, torch.Tensor | Sliced]]:
        """Return each when it is asked for; from the first one again with every call."""


@dataclass(frozen=True)
class Part:
    """The bytes of a tensor from `offset` to `end`, in a bucket from byte `start`."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start: int
    offset: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Of the whole tensor."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def is_whole(self) -> bool:
        """Whether the bucket holds all of the tensor."""
        return self.end - self.offset == self.num_bytes

    def bytes_in(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return this part of a bucket [bytes]."""
        return buffer[self.start : self.start + self.end - self.offset]

    def shaped(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the tensor of all its bytes."""
        return whole.view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Bucket:
    """`size`: bytes, the last one of which says whether the rest is good."""

    parts: list[Part]
    size: int


def buckets_of(kinds: Kinds, limit: int) -> list[Bucket]:
    """Return the buckets that hold these tensors in their order, at most `limit` bytes of tensors in each. One that is
    larger is cut: a bucket begins with it, and what comes next is in the bucket of its end."""
    limit = max(_ALIGNED, limit - limit % _ALIGNED)
    found: list[Bucket] = []
    parts: list[Part] = []
    filled = 0
    for name, (shape, dtype) in kinds.items():
        size, offset = shape.numel() * dtype.itemsize, 0
        start = -(-filled // _ALIGNED) * _ALIGNED
        if parts and start + size > limit:
            found.append(Bucket(parts, filled + 1))
            parts, start = [], 0
        while size - offset > limit:
            found.append(Bucket([Part(name, shape, dtype, 0, offset, offset + limit)], limit + 1))
            offset += limit
        parts.append(Part(name, shape, dtype, start, offset, size))
        filled = start + size - offset
    return [*found, Bucket(parts, filled + 1)] if parts else found


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


class Packing:
    """Makes the bytes of buckets as these are sent, one behind the other; `digests` of what was given, by name."""

    def __init__(self, source: Iterator[tuple[str, torch.Tensor | Sliced]], device: torch.device = HOST):
        self.digests: dict[str, str] = {}
        self.num_given = 0  # bytes of the bucket at hand
        self._source = source
        self._device = device  # of the buckets
        self._value: torch.Tensor | Sliced | None = None  # of which a part was given, and the rest comes next
        self._digest = new_digest(device)

    def pieces(self, buffer: torch.Tensor, bucket: Bucket) -> Iterator[memoryview]:
        """Yield the bytes of a bucket, each piece to be sent before the next is asked for: those of large tensors that
        are as they are sent from where they are, all others from the bucket's `buffer` [bytes], into which they are
        copied; its last byte comes from there. A tensor is asked for when its turn comes. Raises ValueError where it is
        not the one that is planned."""
        self.num_given = 0
        for part in bucket.parts:
            rest = self._rest(part)
            is_sent_so = rest.dtype == part.dtype and rest.device.type == "cpu" and rest.is_contiguous()
            if not is_sent_so or part.end - part.offset < _LARGE:
                self._copy(part, buffer, rest)
                del rest
                self._let_go(part)
                continue
            bytes_ = flat_bytes(rest)
            self._digest.update(bytes_)
            yield self._give(buffer, part.start)
            self.num_given += len(bytes_)
            yield bytes_.numpy().data
            del rest, bytes_
            self._let_go(part)
        yield self._give(buffer, bucket.size)

    def fill(self, buffer: torch.Tensor, bucket: Bucket) -> None:
        """Copy all parts of a bucket into its `buffer` [bytes], but for the last byte. Raises as `pieces`."""
        for part in bucket.parts:
            self._copy(part, buffer, self._rest(part))
            self._let_go(part)

    def _copy(self, part: Part, buffer: torch.Tensor, rest: torch.Tensor) -> None:
        bytes_ = part.bytes_in(buffer)
        bytes_.view(part.dtype).view(rest.shape).copy_(rest)
        self._digest.update(bytes_)

    def _rest(self, part: Part) -> torch.Tensor:
        """Return what of its tensor a part holds; the next tensor where it begins."""
        if self._value is None:
            name, value = next(self._source)
            if name != part.name or value.shape != part.shape:
                raise ValueError(f"{name} {list(value.shape)} comes where {part.name} {list(part.shape)} is planned")
            self._value = value if isinstance(value, Sliced) else value.detach()
        first, end = part.offset // part.dtype.itemsize, part.end // part.dtype.itemsize
        if isinstance(self._value, Sliced):
            return self._value.numbers(first, end)
        return self._value if part.is_whole else self._value.reshape(-1)[first:end]

    def _let_go(self, part: Part) -> None:
        """Keep no tensor that is given whole: the next one may be made."""
        if part.end == part.num_bytes:
            self.digests[part.name] = self._digest.hexdigest()
            self._digest, self._value = new_digest(self._device), None

    def _give(self, buffer: torch.Tensor, end: int) -> memoryview:
        start, self.num_given = self.num_given, end
        return buffer[start:end].numpy().data


class Unpacking:
    """Gives the tensors of buckets that come one behind the other."""

    def __init__(self) -> None:
        self._whole: torch.Tensor | None = None  # [bytes] of a tensor of which a part has come

    def tensors(self, buffer: torch.Tensor, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor of those that end in this bucket [bytes]: views of it, of what was cut a copy."""
        for part in bucket.parts:
            if part.is_whole:
                yield part.name, part.shaped(part.bytes_in(buffer))
                continue
            if self._whole is None:
                self._whole = torch.empty(part.num_bytes, dtype=torch.uint8, device=buffer.device)
            self._whole[part.offset : part.end] = part.bytes_in(buffer)
            if part.end == part.num_bytes:
                whole, self._whole = self._whole, None
                yield part.name, part.shaped(whole)
                del whole


class HeldBuckets:
    """Memory for buckets, used again once nobody has a view of it: fresh pages from the allocator cost more than to
    fill them."""

    def __init__(self, device: torch.device = HOST) -> None:
        self._device = device
        self._size = 0
        self._blocks: deque[torch.Tensor] = deque(maxlen=NUM_HELD)
        self._num_users = 0  # of a block that nobody uses

    def reserve(self, size: int) -> None:
        """Have `free` give so many bytes."""
        if size > self._size:
            self._size = size
            self._blocks.clear()

    def free(self, size: int) -> torch.Tensor:
        """Return `size` bytes that nobody uses: what an engine has kept stays as it is."""
        for block in self._blocks:
            if _num_users(block) == self._num_users:
                return block[:size]
        block = torch.empty(self._size, dtype=torch.uint8, device=self._device)
        self._num_users = _num_users(block)
        self._blocks.append(block)
        return block[:size]


def _num_users(tensor: torch.Tensor) -> int:
    """Return how many tensors share the memory."""
    return int(cast(Any, torch._C)._storage_Use_Count(tensor.untyped_storage()._cdata))
