"""How many different things a long stream holds, 8 bytes for each."""

import numpy as np

_BUFFER = 1 << 16


class Distinct:
    """Counts different hexadecimal digests by their first 64 bits."""

    def __init__(self) -> None:
        self._known = np.empty(0, dtype=np.uint64)
        self._new: set[int] = set()

    def add(self, digest: str) -> None:
        """Count one."""
        self._new.add(int(digest[:16], 16))
        if len(self._new) >= _BUFFER:
            self._merge()

    def _merge(self) -> None:
        self._known = np.union1d(self._known, np.fromiter(self._new, dtype=np.uint64))
        self._new = set()

    def __len__(self) -> int:
        self._merge()
        return len(self._known)
