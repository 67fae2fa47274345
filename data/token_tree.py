"""The tokens of a prefix tree whose sequences memory does not hold: they are sorted on disk."""

from array import array
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from espalier.data.prefix_tree import Tokens
from espalier.data.row_index import NamelessBase

_BYTES = 4  # of a token


class TokenTree(NamelessBase):
    """Takes in token sequences, some at a time, and counts what `prefix_tree.num_distinct_tokens` counts of all."""

    def __init__(self, beside: Path):
        """The sequences lie in the folder of `beside`, in a file without a name."""
        super().__init__(beside, "CREATE TABLE sequences (tokens BLOB); BEGIN;")

    def add(self, sequences: Sequence[Tokens]) -> None:
        """Take in sequences of ids below 2**31. Those that another of them extends add no token and are not kept."""
        rows = sorted(array("i", tokens).tobytes() for tokens in sequences)
        longest = [(one,) for one, after in pairwise([*rows, b""]) if not after.startswith(one)]
        with self._on_disk():
            self._base.executemany("INSERT INTO sequences VALUES (?)", longest)

    def num_tokens(self) -> int:
        """Return the nodes of the tree without its root: tokens that sequences share from the start count once."""
        total, last = 0, b""
        with self._on_disk():
            for (row,) in self._base.execute("SELECT tokens FROM sequences ORDER BY tokens"):
                total += len(row) // _BYTES - _shared_bytes(row, last) // _BYTES
                last = row
        return total


def _shared_bytes(one: bytes, other: bytes) -> int:
    """Return how many bytes two texts have in common from the start."""
    size = min(len(one), len(other))
    differs = np.frombuffer(one, np.uint8, size) != np.frombuffer(other, np.uint8, size)
    return int(differs.argmax()) if differs.any() else size
