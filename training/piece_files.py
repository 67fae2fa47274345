"""Pieces of tensors in files, each rank's its own, by torch's distributed checkpoint
(https://docs.pytorch.org/docs/stable/distributed.checkpoint.html) in its safetensors format.

`shard-<rank>-model-<i>-of-<n>.safetensors` say which pieces of what they hold, so that no rank has to talk to another:
each writes what it has, and reads what it is to have, whoever wrote it. For each further part of a large piece 100,000
is added to the rank.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as read
from torch.distributed.checkpoint.state_dict_saver import save as write

FILE_BYTES = 16 * 2**20  # of one file, which is put together in memory
MOST_FILES = 16  # of one rank: larger ones then
_MOST_RANKS = 100_000  # whose files have numbers of their own


class BadCheckpoint(ValueError):
    """A checkpoint that is not there, is damaged, or does not belong to this run."""

    exit_code = 2


@dataclass(frozen=True)
class Piece:
    """`values` stand at `start` in a tensor of the size `whole`."""

    values: torch.Tensor
    start: tuple[int, ...]
    whole: tuple[int, ...]

    @property
    def place(self) -> ChunkStorageMetadata:
        """Return where it stands, in torch's words."""
        return ChunkStorageMetadata(torch.Size(self.start), self.values.size())


def whole_piece(tensor: torch.Tensor) -> Piece:
    """Return a tensor that is not cut as a piece of itself."""
    return Piece(tensor, (0,) * tensor.dim(), tuple(tensor.shape))


def flat_piece(tensor: torch.Tensor) -> Piece:
    """Return a tensor that is not cut, flattened, as a piece of itself."""
    return whole_piece(tensor.detach().reshape(-1))


class _SavePlanner(DefaultSavePlanner):
    def __init__(self, pieces: Mapping[str, Piece]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pieces = pieces

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, piece in self.pieces.items():
            properties = TensorProperties.create_from_tensor(piece.values)
            data = TensorWriteData(piece.place, properties, torch.Size(piece.whole))
            index = MetadataIndex(name, piece.place.offsets)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self.pieces[index.fqn].values


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, pieces: Mapping[str, Piece]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pieces = pieces

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, piece in self.pieces.items():
            row = cast(TensorStorageMetadata, self.metadata.state_dict_metadata[name])
            items += create_read_items_for_chunk_list(name, row, [piece.place])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.pieces[index.fqn].values


class _Writer(HuggingFaceStorageWriter):
    """Of one rank alone."""

    def __init__(self, folder: Path, files: dict[str, int], shard: int):
        super().__init__(str(folder), files, save_distributed=True)
        self.shard = shard
        self.sync_files = False  # who has it written waits for the disk, once (`runtime.manifest`)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        names = {"fqn_to_index_mapping": self.fqn_to_index_mapping, "shard_index": self.shard}
        return [replace(plan, storage_data=names) for plan in plans]


def write_pieces(folder: Path, pieces: Mapping[str, Piece], rank: int) -> None:
    """Write them into files of this rank, on this rank alone. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    limit = max(FILE_BYTES, sum(piece.values.nbytes for piece in pieces.values()) // MOST_FILES)
    for number, parts in enumerate(_in_parts(pieces, limit)):
        _write(folder, parts, rank + 1 + number * _MOST_RANKS, limit)


def _in_parts(pieces: Mapping[str, Piece], limit: int) -> Iterator[dict[str, Piece]]:
    """Cut pieces of more than `limit` bytes: their first parts beside those that are none, then their second ones, ...;
    a file has one of a name."""
    rest = dict(pieces)
    while rest:
        cut = {name: max(1, limit // piece.values.itemsize) for name, piece in rest.items()
               if piece.values.dim() == 1 and piece.values.nbytes > max(limit, piece.values.itemsize)}  # fmt: skip
        yield {name: replace(piece, values=piece.values[: cut.get(name)]) if name in cut else piece
               for name, piece in rest.items()}  # fmt: skip
        rest = {name: replace(rest[name], values=rest[name].values[length:], start=(rest[name].start[0] + length,))
                for name, length in cut.items()}  # fmt: skip


def _write(folder: Path, pieces: Mapping[str, Piece], shard: int, limit: int) -> None:
    files, filled, number = dict[str, int](), 0, 1
    for name, piece in pieces.items():
        if filled and filled + piece.values.nbytes > limit:
            filled, number = 0, number + 1
        filled += piece.values.nbytes
        files[name] = number
    with _alone(folder):
        values = {name: piece.values for name, piece in pieces.items()}
        write(values, storage_writer=_Writer(folder, files, shard), planner=_SavePlanner(pieces), no_dist=True)


class PieceReader(HuggingFaceStorageReader):
    """Reads what all ranks wrote into a folder; their headers once."""

    def __init__(self, folder: Path):
        super().__init__(str(folder))
        self.folder = folder
        self._found: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """Return what there is, as torch asks for it."""
        if self._found is None:
            with _alone(self.folder):
                self._found = super().read_metadata()
        return self._found

    @property
    def stored(self) -> dict[str, TensorStorageMetadata]:
        """Return what there is by name: whole sizes, and the pieces they are in. Raises BadCheckpoint where one lacks
        a piece before the last."""
        found = self.read_metadata().state_dict_metadata
        rows = {name: cast(TensorStorageMetadata, row) for name, row in found.items()}
        for name, row in rows.items():
            if sum(chunk.sizes.numel() for chunk in row.chunks) != row.size.numel():
                raise lacks_pieces(self.folder, name)
        return rows

    def read_into(self, pieces: Mapping[str, Piece]) -> None:
        """Read the numbers of these pieces, on this rank alone."""
        with _alone(self.folder):
            values: dict[str, Any] = {name: piece.values for name, piece in pieces.items()}
            read(values, storage_reader=self, planner=_LoadPlanner(pieces), no_dist=True)


def lacks_pieces(folder: Path, name: str) -> BadCheckpoint:
    """Return the error of a tensor that is not whole."""
    return BadCheckpoint(f"{folder.parent} has not all of {name}: choose another one (checkpoints.resume=step-N)")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Have torch read or write `folder` on this rank without a warning that it does, and raise what was raised."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:  # not an Exception
        first = next(iter(error.failures.values()))[0]
        if isinstance(first, OSError) and first.filename is None:
            raise OSError(first.errno, first.strerror, str(folder)) from error
        raise first from error
    except SafetensorError as error:
        raise BadCheckpoint(
            f"{folder}: a file of it cannot be read ({error}): choose checkpoints.resume=step-N"
        ) from None
