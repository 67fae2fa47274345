"""By what a weight is known again: 32 hex digits of its bytes, of what was sent and of what an engine read."""

from typing import Protocol

import torch
import xxhash


def digest(tensor: torch.Tensor) -> str:
    """Return 32 hex digits of the bytes of a tensor [...], computed where it is: on a CPU XXH3, as fast as memory is
    read (SHA-256 of a large policy takes longer than all the rest of a delivery), on a GPU `DeviceDigest`."""
    found = new_digest(tensor.device)
    found.update(flat_bytes(tensor))
    return found.hexdigest()


class Digest(Protocol):
    """Of bytes that come one part behind the other; all but the last hold a multiple of four."""

    def update(self, part: torch.Tensor, /) -> None:
        """Take the next bytes [bytes]."""

    def hexdigest(self) -> str:
        """Return 32 hex digits of all of them."""


class HostDigest:
    """XXH3 on a CPU."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def update(self, part: torch.Tensor) -> None:
        """Take the next bytes [bytes]."""
        self._hash.update(part.numpy().data)

    def hexdigest(self) -> str:
        """Return 32 hex digits."""
        return self._hash.hexdigest()


class DeviceDigest:
    """Computed by the device that holds the bytes: nothing is copied off it. Two sums modulo 2^64, over words w_i of
    four bytes, of w_i m(i), where m(i) is odd and scattered: one word that differs always shows, several do but by a
    chance of 2^-64 (multilinear hashing, Carter and Wegman 1979). It guards against mistakes, not against forgers."""

    _FACTORS = (-7046029254386353131, -4417276706812531889)  # odd: 2^64 by the golden ratio, a prime of XXH64
    _WORDS = 2**20  # at a time
    NUM_BYTES = 4 * 8 * _WORDS
    """That their products take at most."""

    def __init__(self, device: torch.device | str) -> None:
        self._sums = torch.zeros(len(self._FACTORS), dtype=torch.int64, device=device)
        self._num_words = 0
        self._num_bytes = 0

    def update(self, part: torch.Tensor) -> None:
        """Take the next bytes [bytes]."""
        self._num_bytes += len(part)
        if len(part) % 4 or part.data_ptr() % 4:
            padded = torch.zeros(-(-len(part) // 4) * 4, dtype=torch.uint8, device=part.device)
            padded[: len(part)] = part
            part = padded
        for words in part.view(torch.int32).split(self._WORDS):
            places = torch.arange(self._num_words + 1, self._num_words + len(words) + 1, device=part.device)
            for k, factor in enumerate(self._FACTORS):
                mixed = places * factor
                mixed = (mixed ^ (mixed >> 29)) * self._FACTORS[k - 1]
                self._sums[k] += ((mixed ^ (mixed >> 32) | 1) * words).sum()
            self._num_words += len(words)

    def hexdigest(self) -> str:
        """Return 32 hex digits."""
        first, second = (int(value) % 2**64 for value in self._sums.tolist())
        return f"{(first + self._num_bytes) % 2**64:016x}{second:016x}"


def new_digest(device: torch.device) -> Digest:
    """Return a digest of bytes that lie there."""
    return HostDigest() if device.type == "cpu" else DeviceDigest(device)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor [...] where it is; [bytes]."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
