"""Rows of tokens → one packed row without padding, in which a prefix that several rows share stands once.

The rows of a batch form a prefix tree: a **segment** is a run of tokens that the same rows pass through, and a
token may attend to its own segment up to itself and to the segments above it, nothing else. Two sides of a pair,
the demonstrations of one problem and the rollouts of a group share their prompt this way; a row without a
relation is a segment of its own. Exact: every token has the position and the keys that it has alone.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from espalier.data.records import BadInput

MIN_SHARED = 16  # tokens; a shorter common beginning costs more in small pieces than it saves


@dataclass(frozen=True)
class Segments:
    """`lengths` [S] of the segments in the order of the packed row; `above[s]`: those that lead to segment s,
    from the root down. `num_unread` tokens behind the last one round the row's size up: nobody reads them."""

    lengths: tuple[int, ...]
    above: tuple[tuple[int, ...], ...]
    num_unread: int = 0

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(self.lengths[own] + sum(self.lengths[s] for s in above) for own, above in enumerate(self.above))


@dataclass(frozen=True)
class PackedRows:
    """`ids` and `position_ids` [T] of the distinct tokens; `paths[b]` [len of row b]: where row b's tokens lie."""

    ids: torch.Tensor
    position_ids: torch.Tensor
    segments: Segments
    paths: list[torch.Tensor]


def shared_length(first: np.ndarray, second: np.ndarray) -> int:
    """Return tokens that two rows begin with alike."""
    size = min(len(first), len(second))
    differs = first[:size] != second[:size]
    return int(differs.argmax()) if differs.any() else size


class _Tree:
    """Segments as they are found, depth first; `rows` in lexicographic order."""

    def __init__(self, rows: Sequence[np.ndarray], min_shared: int):
        self.rows = rows
        self.min_shared = min_shared
        self.common = [0, *(shared_length(a, b) for a, b in pairwise(rows))]
        self.pieces: list[np.ndarray] = []
        self.depths: list[int] = []
        self.above: list[tuple[int, ...]] = []
        self.last: list[tuple[int, ...]] = [()] * len(rows)  # the segments of each row, from the root down

    def grow(self, first: int, end: int, depth: int, above: tuple[int, ...]) -> None:
        """Segments of rows first..end-1, which agree up to `depth` and stand there below `above`."""
        while first < end:
            stop = first + 1
            while stop < end and self.common[stop] - depth >= self.min_shared:
                stop += 1
            self._branch(first, stop, depth, above)
            first = stop

    def _branch(self, first: int, end: int, depth: int, above: tuple[int, ...]) -> None:
        agreed = min([len(self.rows[first]), *self.common[first + 1 : end]])
        path = above
        if agreed > depth:
            path = (*above, len(self.pieces))
            self.pieces.append(self.rows[first][depth:agreed])
            self.depths.append(depth)
            self.above.append(above)
        while first < end and len(self.rows[first]) == agreed:  # rows that end here, one or several alike
            self.last[first] = path
            first += 1
        if first < end:
            self.grow(first, end, agreed, path)


def pack_rows(rows: Sequence[Sequence[int]], *, is_sharing: bool = True, min_shared: int = MIN_SHARED) -> PackedRows:
    """Return one packed row of all tokens of `rows` (none of them empty). `is_sharing` false: each row stands alone."""
    arrays = [np.asarray(row, dtype=np.int64) for row in rows]
    if is_sharing:
        order = sorted(range(len(rows)), key=lambda index: list(rows[index]))
        tree = _Tree([arrays[index] for index in order], min_shared)
        tree.grow(0, len(rows), 0, ())
        paths = {index: tree.last[place] for place, index in enumerate(order)}
        pieces, depths, above = tree.pieces, tree.depths, tree.above
    else:
        paths = {index: (index,) for index in range(len(rows))}
        pieces, depths, above = arrays, [0] * len(rows), [()] * len(rows)
    starts = np.cumsum([0, *(len(piece) for piece in pieces)])
    slots = [np.arange(start, start + len(piece)) for start, piece in zip(starts, pieces, strict=False)]
    positions = [np.arange(depth, depth + len(piece)) for depth, piece in zip(depths, pieces, strict=True)]
    return PackedRows(
        ids=torch.from_numpy(np.concatenate(pieces)),
        position_ids=torch.from_numpy(np.concatenate(positions)),
        segments=Segments(tuple(len(piece) for piece in pieces), tuple(above)),
        paths=[torch.from_numpy(np.concatenate([slots[s] for s in paths[index]])) for index in range(len(rows))],
    )


KINDS = ("shared", "packed", "padded")


@dataclass(frozen=True)
class Layout:
    """How a batch lies in memory: `shared` (no padding, common beginnings once), `packed` (no padding) or `padded`
    with `pad_id`, for networks whose attention cannot be packed. No value depends on it."""

    kind: str = "shared"
    pad_id: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BadInput(f"layout must be one of {', '.join(KINDS)}, got '{self.kind}'")


@dataclass(frozen=True)
class PlacedRows:
    """`ids` [1, T] with `position_ids` and `segments`, or padded [B, L] with `attention_mask`; `paths[b]`: where the
    tokens of row b lie in the flattened ids."""

    ids: torch.Tensor
    paths: list[torch.Tensor]
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    segments: Segments | None = None


def place_rows(rows: Sequence[Sequence[int]], layout: Layout) -> PlacedRows:
    """Return rows of tokens, none of them empty, as a model takes them."""
    if layout.kind != "padded":
        packed = pack_rows(rows, is_sharing=layout.kind == "shared")
        ids, positions = packed.ids.unsqueeze(0), packed.position_ids.unsqueeze(0)
        return PlacedRows(ids, packed.paths, position_ids=positions, segments=packed.segments)
    length = max(len(row) for row in rows)
    ids = torch.full((len(rows), length), layout.pad_id, dtype=torch.long)
    attention_mask = torch.zeros((len(rows), length), dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.as_tensor(row)
        attention_mask[index, : len(row)] = 1
    paths = [torch.arange(index * length, index * length + len(row)) for index, row in enumerate(rows)]
    return PlacedRows(ids, paths, attention_mask)


def pad_rows(rows: Sequence[Sequence[int]], starts: Sequence[int], pad_id: int) -> tuple[torch.Tensor, ...]:
    """Return (ids, attention_mask, response_mask) [B, T]; row i's response begins at token `starts[i]`."""
    placed = place_rows(rows, Layout("padded", pad_id))
    assert placed.attention_mask is not None
    response_mask = placed.attention_mask.bool()
    response_mask &= torch.arange(placed.ids.shape[1]) >= torch.tensor(starts).unsqueeze(1)
    return placed.ids, placed.attention_mask, response_mask


def in_batches(rows: Sequence[Sequence[int]], is_packed: bool, batch_tokens: int) -> list[list[int]]:
    """Return indices in batches of at most `batch_tokens` tokens (and one row at least). Packed: in order, so that
    trajectories of one problem share their prompt; padded: of similar length, padding counted."""
    order = list(range(len(rows))) if is_packed else sorted(range(len(rows)), key=lambda index: len(rows[index]))
    return list(cut_batches(((index, len(rows[index])) for index in order), is_packed, batch_tokens))


def cut_batches(rows: Iterable[tuple[int, int]], is_packed: bool, batch_tokens: int) -> Iterator[list[int]]:
    """Yield the batches of rows (number, length) that come in the order of `in_batches`."""
    batch: list[int] = []
    size = 0
    for number, length in rows:
        size = size + length if is_packed else length * (len(batch) + 1)
        if batch and size > batch_tokens:
            yield batch
            batch, size = [], length
        batch.append(number)
    if batch:
        yield batch
