"""What a resume needs of a network and its optimizer, by parameter, so that any number of ranks can go on from it.

Each rank writes the pieces that it holds into files of its own, and reads those that it is to hold, whoever wrote them:
torch's distributed checkpoint (https://docs.pytorch.org/docs/stable/distributed.checkpoint.html) in its safetensors
format, without a pickle. Ranks do not talk to each other on the way: every file says which piece of what it holds.

`<checkpoint>/pieces/shard-<rank>-model-<i>-of-<n>.safetensors` hold, flattened,

    weights/<parameter>            what is trained
    buffers/<name>                 persistent ones
    moments/<key>/<parameter>      of the optimizer, a number for each number of the parameter (`exp_avg`)
    numbers/<key>/<parameter>      of the optimizer, a single number (`step`); plain/...: one that is no tensor
    others/<key>/<parameter>       of the optimizer, of another shape, which is kept

With tensor parallelism, which cuts layers, `<parameter>` is `part-000-of-002/<parameter>`, and shapes/<parameter> is
the part's.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as read
from torch.distributed.checkpoint.state_dict_saver import save as write

from espalier.models.in_parts import whole_shape

FOLDER = "pieces"
FILE_BYTES = 16 * 2**20  # of one file, which is put together in memory, or a 64th of what a rank writes
OPTIMIZER = ("moments/", "numbers/", "plain/", "others/")
PLAIN = {bool: torch.bool, int: torch.int64, float: torch.float64}


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


@dataclass(frozen=True)
class Span:
    """`length` numbers of the parameter `name`, from `start` of its `whole` on (flattened); `offset`: where they lie in
    the tensor that the optimizer steps."""

    name: str
    offset: int
    start: int
    length: int
    whole: int


@dataclass(frozen=True)
class Held:
    """A tensor that the optimizer steps, and the parameters, or pieces of them, that it consists of."""

    tensor: torch.Tensor
    spans: Sequence[Span]

    def pieces(self, of: torch.Tensor) -> Iterator[tuple[Span, Piece]]:
        """Give the pieces of a tensor that has a number for each of this one's."""
        flat = of.detach().reshape(-1)
        for span in self.spans:
            yield span, Piece(flat.narrow(0, span.offset, span.length), (span.start,), (span.whole,))


def held_whole(model: torch.nn.Module) -> list[Held]:
    """Return the trained parameters of a network that no rank holds cut."""
    named = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    return [Held(value, [Span(name, 0, 0, value.numel(), value.numel())]) for name, value in named]


def trained_sizes(model: torch.nn.Module) -> dict[str, int]:
    """Return how many numbers each trained parameter has, on all ranks together."""
    named = model.named_parameters()
    return {name: whole_shape(value).numel() for name, value in named if value.requires_grad}


def persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that belong to a model's state."""
    kept = model.state_dict(keep_vars=True).keys()
    return {name: value for name, value in model.named_buffers(remove_duplicate=False) if name in kept}


@dataclass(frozen=True)
class State:
    """The state of one network and its optimizer, as far as this rank holds it.

    `held`: what the optimizer steps. `sizes`: how many numbers each trained parameter has, on whatever rank. `buffers`:
    the persistent ones, alike on every rank. `part`: of a network whose layers are cut, which: `part-000-of-002/`, and
    then `shapes` of the parameters in this part.
    """

    held: Sequence[Held]
    optimizer: torch.optim.Optimizer
    sizes: Mapping[str, int]
    buffers: Mapping[str, torch.Tensor]
    part: str = ""
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def _own(self) -> dict[str, Piece]:
        """Return all pieces of this rank by name; what several ranks have belongs to the one with the first number."""
        found: dict[str, Piece] = {}
        for held in self.held:
            found |= {f"weights/{self.part}{span.name}": piece for span, piece in held.pieces(held.tensor)}
            for key, value in self.optimizer.state.get(held.tensor, {}).items():
                for kind, span, piece in _optimizer_pieces(held, key, value):
                    found[f"{kind}/{key}/{self.part}{span.name}"] = piece
        return found

    def save(self, folder: Path, rank: int, *, has_buffers: bool = True) -> None:
        """Write this rank's pieces; of ranks that have the same buffers one `has_buffers` to write, and shapes."""
        pieces = self._own()
        if has_buffers:
            pieces |= {f"buffers/{self.part}{name}": _flat(value) for name, value in self.buffers.items()}
            pieces |= {
                f"shapes/{self.part}{name}": whole_piece(torch.tensor(list(shape)))
                for name, shape in self.shapes.items()
            }
        _write(folder / FOLDER, pieces, rank)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Read what ranks wrote over what this rank holds, bit for bit. Raises BadCheckpoint, before anything is
        changed, where that was of another network, or of one that was cut into other parts."""
        stored = stored_tensors(folder)
        self._check(stored, folder)
        pieces, copies = dict[str, Piece](), list[tuple[torch.Tensor, torch.Tensor]]()

        def place(tensor: torch.Tensor) -> torch.Tensor:
            """Return where it is read to: its own numbers, in their order, or a copy of them."""
            if tensor.is_contiguous():
                return tensor.detach()
            copies.append((tensor.detach(), tensor.detach().contiguous()))
            return copies[-1][1]

        for name, value in self.buffers.items():
            pieces[f"buffers/{self.part}{name}"] = _flat(place(value))
        for held in self.held:
            for span, piece in held.pieces(place(held.tensor)):
                pieces[f"weights/{self.part}{span.name}"] = piece
        kept = dict[str, list[tuple[str, str]]]()  # by parameter: what the optimizer keeps of it
        for kind, key, name in (row.split("/", 2) for row in stored if row.startswith(OPTIMIZER)):
            kept.setdefault(name, []).append((kind, key))
        states = [self._targets(held, kept, stored, pieces) for held in self.held]
        _read(folder / FOLDER, pieces)
        for tensor, copy in copies:
            tensor.copy_(copy)
        for held, state in zip(self.held, states, strict=True):
            if state:
                values = {key: self._as_kept(held, kind, key, value) for key, (kind, value) in state.items()}
                self.optimizer.state[held.tensor] = values

    def _targets(
        self, held: Held, kept: Mapping[str, Sequence[tuple[str, str]]], stored: Mapping[str, TensorStorageMetadata],
        pieces: dict[str, Piece],
    ) -> dict[str, tuple[str, torch.Tensor]]:  # fmt: skip
        """Return where what the optimizer keeps of `held` is read to, by key, with its kind, and add it to `pieces`. Of
        a parameter that the optimizer knew nothing of yet moments are 0."""
        self.optimizer.state.pop(held.tensor, None)  # before there are two of them
        found = dict[str, tuple[str, torch.Tensor]]()
        for span in held.spans:
            name = f"{self.part}{span.name}"
            for kind, key in kept.get(name, ()):
                row = stored[f"{kind}/{key}/{name}"]
                if key not in found:
                    size, place = (held.tensor.shape, held.tensor.device) if kind == "moments" else (row.size, "cpu")
                    found[key] = kind, torch.zeros(size, dtype=row.properties.dtype, device=place)
                    if kind != "moments":
                        pieces[f"{kind}/{key}/{name}"] = whole_piece(found[key][1])
                if kind == "moments":
                    flat = found[key][1].view(-1).narrow(0, span.offset, span.length)
                    pieces[f"{kind}/{key}/{name}"] = Piece(flat, (span.start,), (span.whole,))
        return found

    def _as_kept(self, held: Held, kind: str, key: str, value: torch.Tensor) -> Any:
        """Return what was read as the optimizer has it, where torch's own `load_state_dict` puts it."""
        if kind == "plain":
            return value.item()
        if kind == "moments":
            is_alike = held.tensor.is_contiguous()
            return value if is_alike else torch.empty_like(held.tensor, dtype=value.dtype).copy_(value)
        value = value[0] if kind == "numbers" else value
        groups = self.optimizer.param_groups
        is_beside = key == "step" and not any(group.get("capturable") or group.get("fused") for group in groups)
        return value if is_beside else value.to(held.tensor.device)

    def _check(self, stored: Mapping[str, TensorStorageMetadata], folder: Path) -> None:
        sizes = {f"weights/{self.part}{name}": size for name, size in self.sizes.items()}
        sizes |= {f"buffers/{self.part}{name}": value.numel() for name, value in self.buffers.items()}
        found = {name: row.size.numel() for name, row in stored.items() if name.startswith(("weights/", "buffers/"))}
        theirs = {part_of(name) for name in found}
        if self.part not in theirs and (self.part or theirs != {""}) and found:
            raise BadCheckpoint(f"{folder} has layers {_cut(theirs)}, this run {_cut({self.part})}: set "
                                "deepspeed.tensor_parallel as it was")  # fmt: skip
        found = {name: size for name, size in found.items() if part_of(name) == self.part}
        odd = [name for name in {**sizes, **found} if sizes.get(name) != found.get(name)]
        if odd:
            raise BadCheckpoint(f"{folder} is of another model: {odd[0].split('/', 1)[1]} does not fit: choose another "
                                "output_dir")  # fmt: skip


def part_of(name: str) -> str:
    """Return the part of a layer that a stored tensor is of; "" where layers are whole."""
    words = name.split("/", 2)
    return words[1] + "/" if words[1].startswith("part-") and len(words) == 3 else ""


def _cut(parts: set[str]) -> str:
    number = max(parts).strip("/").rpartition("-")[2]
    return f"cut into {number}" if number else "whole"


def _flat(tensor: torch.Tensor) -> Piece:
    return whole_piece(tensor.detach().reshape(-1))


def _optimizer_pieces(held: Held, key: str, value: Any) -> Iterator[tuple[str, Span, Piece]]:
    """Give (kind, span, piece) of what the optimizer keeps of `held` as `key`."""
    is_number = isinstance(value, torch.Tensor) and value.dim() == 0 and (held.tensor.dim() > 0 or key == "step")
    if isinstance(value, torch.Tensor) and value.shape == held.tensor.shape and not is_number:
        yield from (("moments", span, piece) for span, piece in held.pieces(value))
        return
    if is_number:
        kind, piece = "numbers", _flat(value)
    elif type(value) in PLAIN:
        kind, piece = "plain", _flat(torch.tensor(value, dtype=PLAIN[type(value)]))
    elif isinstance(value, torch.Tensor) and len(held.spans) == 1 and held.spans[0].length == held.spans[0].whole:
        kind, piece = "others", whole_piece(value.detach().contiguous())
    else:
        raise BadCheckpoint(f"{key} of {held.spans[0].name} ({type(value).__name__}), which the optimizer keeps, "
                            "cannot be written: choose one that keeps numbers for each of a parameter")  # fmt: skip
    for span in held.spans:
        if span.start == 0:
            yield kind, span, replace(piece, values=piece.values.clone())  # files hold no memory twice


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

    def __init__(self, folder: Path, files: dict[str, int], rank: int):
        super().__init__(str(folder), files, save_distributed=True)
        self.shard = rank + 1
        self.sync_files = False  # who has it written waits for the disk, once (`runtime.manifest`)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        told = {"fqn_to_index_mapping": self.fqn_to_index_mapping, "shard_index": self.shard}
        return [replace(plan, storage_data=told) for plan in plans]


def _write(folder: Path, pieces: dict[str, Piece], rank: int) -> None:
    files, filled = dict[str, int](), 0
    limit = max(FILE_BYTES, sum(piece.values.nbytes for piece in pieces.values()) // 64)
    for name, piece in pieces.items():
        filled += piece.values.nbytes
        files[name] = filled // limit
    numbers = {old: new for new, old in enumerate(sorted(set(files.values())), start=1)}
    files = {name: numbers[old] for name, old in files.items()}
    folder.mkdir(parents=True, exist_ok=True)
    if pieces:
        with _alone(folder):
            values = {name: piece.values for name, piece in pieces.items()}
            write(values, storage_writer=_Writer(folder, files, rank), planner=_SavePlanner(pieces), no_dist=True)


def _read(folder: Path, pieces: dict[str, Piece]) -> None:
    with _alone(folder):
        values: dict[str, Any] = {name: piece.values for name, piece in pieces.items()}
        read(values, storage_reader=HuggingFaceStorageReader(str(folder)), planner=_LoadPlanner(pieces), no_dist=True)


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


def stored_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Return what a checkpoint holds: whole sizes, flattened, and the pieces they are in. Raises BadCheckpoint where
    a piece is missing or there are none."""
    if not (folder / FOLDER).is_dir():
        raise BadCheckpoint(f"{folder} has no {FOLDER}: another version wrote it: go on with that one, or elsewhere")
    rows = HuggingFaceStorageReader(str(folder / FOLDER)).read_metadata().state_dict_metadata
    found = {name: cast(TensorStorageMetadata, row) for name, row in rows.items()}
    for name, row in found.items():
        if sum(chunk.sizes.numel() for chunk in row.chunks) != row.size.numel():
            raise BadCheckpoint(f"{folder} has not all of {name}: choose another checkpoint")
    return found


def stored_weights(folder: Path, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
    """Return the trained weights and the buffers of a checkpoint, whole, on the CPU. `shapes` are those of the model's
    weights, by name."""
    stored = {
        name: row
        for name, row in stored_tensors(folder).items()
        if name.startswith(("weights/", "buffers/", "shapes/"))
    }
    read = {name: torch.empty(row.size, dtype=row.properties.dtype) for name, row in stored.items()}
    _read(folder / FOLDER, {name: whole_piece(value) for name, value in read.items()})
    parts = dict[str, list[torch.Tensor]]()
    for name in sorted(read):
        kind, _, rest = name.partition("/")
        if kind == "shapes":
            continue
        plain = rest.removeprefix(part_of(name))
        shape = read.get(f"shapes/{rest}")
        size = shapes.get(plain) if shape is None else shape.tolist()
        is_fit = size is not None and prod(size) == read[name].numel()
        parts.setdefault(plain, []).append(read[name].reshape(size) if is_fit and size is not None else read[name])
    return {name: _joined(values, shapes.get(name)) for name, values in parts.items()}


def _joined(parts: list[torch.Tensor], shape: torch.Size | None) -> torch.Tensor:
    """Return a weight from its parts: cut along the one dimension that is shorter than in `shape`."""
    if shape is None or parts[0].shape == shape:
        return parts[0]
    short = [place for place, (mine, whole) in enumerate(zip(parts[0].shape, shape, strict=False)) if mine != whole]
    return torch.cat(parts, dim=short[0]) if short else parts[0]
