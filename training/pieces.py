"""What a resume needs of a network and its optimizer, by parameter, so that any number of ranks can go on from it.

Each rank writes the pieces that it holds (`training.piece_files`) and reads those that it is to hold.
`<checkpoint>/pieces/` has, flattened,

    weights/<parameter>            what is trained
    buffers/<name>                 persistent ones
    moments/<key>/<parameter>      of the optimizer, a number for each number of the parameter (`exp_avg`)
    numbers/<key>/<parameter>      of the optimizer, a single number (`step`)
    others/<key>/<parameter>       of the optimizer, of another shape, which is kept

and `layout.json`: the shapes, and whether the optimizer stepped flat tensors of many parameters, as ZeRO's does. With
tensor parallelism, which cuts layers, `<parameter>` is `part-000-of-002/<parameter>`, and each part has a layout.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from espalier.models.in_parts import whole_shape
from espalier.training.piece_files import (
    BadCheckpoint,
    Piece,
    PieceReader,
    flat_piece,
    lacks_pieces,
    whole_piece,
    write_pieces,
)

FOLDER = "pieces"
OPTIMIZER = ("moments/", "numbers/", "others/")
NUMBERS = ("step", "mu_product", "eta", "mu")  # of torch's optimizers, also of a parameter that is one number
# What these keep, and how they step, is by the shape of a matrix, which a flat tensor has not.
BY_SHAPE = ("Adafactor", "Muon")


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


def trained_shapes(model: torch.nn.Module) -> dict[str, list[int]]:
    """Return the shape of each trained parameter, of all ranks' pieces together."""
    return {name: list(whole_shape(value)) for name, value in model.named_parameters() if value.requires_grad}


def persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that belong to a model's state."""
    kept = model.state_dict(keep_vars=True).keys()
    return {name: value for name, value in model.named_buffers(remove_duplicate=False) if name in kept}


@dataclass(frozen=True)
class State:
    """The state of one network and its optimizer, as far as this rank holds it.

    `held`: what the optimizer steps; `is_flat` where these are no parameters but made of them. `shapes`: of all trained
    parameters, on whatever rank. `buffers`: the persistent ones, alike on every rank. `part`: of a network whose layers
    are cut, which: `part-000-of-002/`.
    """

    held: Sequence[Held]
    optimizer: torch.optim.Optimizer
    shapes: Mapping[str, Sequence[int]]
    buffers: Mapping[str, torch.Tensor]
    part: str = ""
    is_flat: bool = False

    def _own(self) -> dict[str, Piece]:
        """Return all pieces of this rank by name; what several ranks have belongs to the one with the first number."""
        found: dict[str, Piece] = {}
        for held in self.held:
            found |= {f"weights/{self.part}{span.name}": piece for span, piece in held.pieces(held.tensor)}
            for key, value in self.optimizer.state.get(held.tensor, {}).items():
                for kind, span, piece in _optimizer_pieces(held, key, value):
                    found[f"{kind}/{key}/{self.part}{span.name}"] = piece
        return found

    def _shapes(self) -> dict[str, list[int]]:
        """Return the shapes of what is stored under a name of the model."""
        return {name: list(shape) for name, shape in self.shapes.items()} | {
            name: list(value.shape) for name, value in self.buffers.items()
        }

    def save(self, folder: Path, rank: int, *, has_buffers: bool = True) -> None:
        """Write this rank's pieces; of ranks that have the same buffers one `has_buffers` to write, and the layout."""
        pieces = self._own()
        place = folder / FOLDER
        place.mkdir(parents=True, exist_ok=True)
        if has_buffers:  # a copy: two names may share one buffer, which a file may not
            pieces |= {f"buffers/{self.part}{name}": flat_piece(value.clone()) for name, value in self.buffers.items()}
            layout = {"is_flat": self.is_flat, "shapes": self._shapes()}
            _layout_file(place, self.part).write_text(json.dumps(layout) + "\n")
        write_pieces(place, pieces, rank)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Read what ranks wrote over what this rank holds, bit for bit. Raises BadCheckpoint, before anything is
        changed, where that was of another network, or of one that was cut into other parts."""
        layouts = read_layouts(folder)
        reader = PieceReader(folder / FOLDER)
        stored = reader.stored
        self._check(stored, layouts, folder)
        pieces, copies = dict[str, Piece](), list[tuple[torch.Tensor, torch.Tensor]]()

        def place(tensor: torch.Tensor) -> torch.Tensor:
            """Return where it is read to: its own numbers, in their order, or a copy of them."""
            if tensor.is_contiguous():
                return tensor.detach()
            copies.append((tensor.detach(), tensor.detach().contiguous()))
            return copies[-1][1]

        for name, value in self.buffers.items():
            pieces[f"buffers/{self.part}{name}"] = flat_piece(place(value))
        for held in self.held:
            for span, piece in held.pieces(place(held.tensor)):
                pieces[f"weights/{self.part}{span.name}"] = piece
        kept = dict[str, list[tuple[str, str]]]()  # by parameter: what the optimizer keeps of it
        for kind, key, name in (row.split("/", 2) for row in stored if row.startswith(OPTIMIZER)):
            kept.setdefault(name, []).append((kind, key))
        states = [self._targets(held, kept, stored, pieces) for held in self.held]
        reader.read_into(pieces)
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
        a parameter that the optimizer knew nothing of yet moments are 0; of parameters that become one flat tensor the
        first one's numbers (`step`) count."""
        self.optimizer.state.pop(held.tensor, None)  # before there are two of them
        found = dict[str, tuple[str, torch.Tensor]]()
        for span in held.spans:
            name = f"{self.part}{span.name}"
            for kind, key in kept.get(name, ()):
                row, is_moment = stored[f"{kind}/{key}/{name}"], kind == "moments"
                is_new = key not in found
                if is_new:
                    size, place = (held.tensor.shape, held.tensor.device) if is_moment else (row.size, "cpu")
                    found[key] = kind, torch.zeros(size, dtype=row.properties.dtype, device=place)
                value = found[key][1]
                if is_moment:
                    flat = value.view(-1).narrow(0, span.offset, span.length)
                    pieces[f"{kind}/{key}/{name}"] = Piece(flat, (span.start,), (span.whole,))
                elif is_new:
                    pieces[f"{kind}/{key}/{name}"] = whole_piece(value)
        return found

    def _as_kept(self, held: Held, kind: str, key: str, value: torch.Tensor) -> Any:
        """Return what was read as the optimizer has it, where torch's own `load_state_dict` puts it."""
        if kind == "moments":
            is_alike = held.tensor.is_contiguous()
            return value if is_alike else torch.empty_like(held.tensor, dtype=value.dtype).copy_(value)
        value = value[0] if kind == "numbers" else value
        groups = self.optimizer.param_groups
        is_beside = key == "step" and not any(group.get("capturable") or group.get("fused") for group in groups)
        return value if is_beside else value.to(held.tensor.device)

    def _check(
        self, stored: Mapping[str, TensorStorageMetadata], layouts: Mapping[str, Mapping[str, Any]], folder: Path
    ) -> None:
        """Raise BadCheckpoint where what is stored is not of this network, or not all of it."""
        if self.part not in layouts:
            raise BadCheckpoint(f"{folder} has layers {_cut(max(layouts))}, this run {_cut(self.part)}: set "
                                "deepspeed.tensor_parallel as it was")  # fmt: skip
        mine, theirs = self._shapes(), layouts[self.part]["shapes"]
        odd = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
        if odd:
            raise BadCheckpoint(f"{folder} is of another model: {odd[0]} does not fit: choose another output_dir")
        kind = type(self.optimizer).__name__
        if kind in BY_SHAPE and layouts[self.part]["is_flat"] != self.is_flat:
            raise BadCheckpoint(f"{folder}: {kind} keeps other numbers of matrices than of what ZeRO makes of them: "
                                "set deepspeed as it was")  # fmt: skip
        sizes = {f"{self.part}{name}": prod(shape) for name, shape in mine.items()}
        for row, tensor in stored.items():
            is_moment = row.startswith("moments/") and part_of(row) == self.part
            if is_moment and tensor.size.numel() != sizes.get(row.split("/", 2)[2]):
                raise lacks_pieces(folder / FOLDER, row)
        for name, size in sizes.items():
            here = "buffers/" if name.removeprefix(self.part) in self.buffers else "weights/"
            if size and (here + name not in stored or stored[here + name].size.numel() != size):
                raise lacks_pieces(folder / FOLDER, here + name)


def _layout_file(place: Path, part: str) -> Path:
    return place / (f"layout-{part.strip('/')}.json" if part else "layout.json")


def read_layouts(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the layout of each part of a checkpoint's network ("": of one whose layers are whole). Raises
    BadCheckpoint where there is none."""
    found = {}
    for path in sorted((folder / FOLDER).glob("layout*.json")):
        part = f"{path.stem.removeprefix('layout-')}/" if "-" in path.stem else ""
        try:
            layout = json.loads(path.read_text())
            found[part] = {"is_flat": bool(layout["is_flat"]), "shapes": dict(layout["shapes"])}
        except (ValueError, KeyError, TypeError) as error:
            raise BadCheckpoint(
                f"{path}: not a layout of pieces ({error!r}): choose checkpoints.resume=step-N"
            ) from None
    if not found:
        raise BadCheckpoint(f"{folder} has no {FOLDER}: another version wrote it: go on with that version, or choose "
                            "another output_dir")  # fmt: skip
    return found


def part_of(name: str) -> str:
    """Return the part of a layer that a stored tensor is of; "" where layers are whole."""
    words = [word for word in name.split("/") if word.startswith("part-")]
    return words[0] + "/" if words else ""


def _cut(part: str) -> str:
    return f"cut into {int(part.strip('/').rpartition('-')[2])}" if part else "whole"


def _optimizer_pieces(held: Held, key: str, value: Any) -> Iterator[tuple[str, Span, Piece]]:
    """Give (kind, span, piece) of what the optimizer keeps of `held` as `key`."""
    is_number = isinstance(value, torch.Tensor) and value.dim() == 0 and (held.tensor.dim() > 0 or key in NUMBERS)
    if isinstance(value, torch.Tensor) and value.shape == held.tensor.shape and not is_number:
        yield from (("moments", span, piece) for span, piece in held.pieces(value))
        return
    if is_number:
        kind, piece = "numbers", flat_piece(value)
    elif isinstance(value, torch.Tensor) and len(held.spans) == 1 and held.spans[0].length == held.spans[0].whole:
        kind, piece = "others", whole_piece(value.detach().contiguous())
    else:
        raise BadCheckpoint(f"{key} of {held.spans[0].name} ({type(value).__name__}), which the optimizer keeps, "
                            "cannot be written: choose one that keeps numbers for each of a parameter")  # fmt: skip
    for span in held.spans:
        if span.start == 0:
            yield kind, span, replace(piece, values=piece.values.clone())  # files hold no memory twice


def stored_weights(folder: Path, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
    """Return the trained weights and the buffers of a checkpoint, whole, on the CPU. `shapes` are those of the model's
    weights, by name: parts of layers are joined to these."""
    layouts = read_layouts(folder)
    reader = PieceReader(folder / FOLDER)
    rows = {name: row for name, row in reader.stored.items() if name.startswith(("weights/", "buffers/"))}
    values = {name: torch.empty(row.size, dtype=row.properties.dtype) for name, row in rows.items()}
    reader.read_into({name: whole_piece(value) for name, value in values.items()})
    parts = dict[str, list[torch.Tensor]]()
    for part, layout in layouts.items():
        for name, shape in layout["shapes"].items():
            found = [values[key] for kind in ("weights", "buffers") if (key := f"{kind}/{part}{name}") in values]
            if prod(shape) and (not found or found[0].numel() != prod(shape)):
                raise lacks_pieces(folder / FOLDER, name)
            parts.setdefault(name, []).append(found[0].reshape(shape) if found else torch.zeros(shape))
    return {name: _joined(found, shapes.get(name)) for name, found in parts.items()}


def _joined(parts: list[torch.Tensor], shape: torch.Size | None) -> torch.Tensor:
    """Return a weight from its parts: cut along the one dimension that is shorter than in `shape`."""
    if shape is None or parts[0].shape == shape:
        return parts[0]
    short = [place for place, (mine, whole) in enumerate(zip(parts[0].shape, shape, strict=False)) if mine != whole]
    return torch.cat(parts, dim=short[0]) if short else parts[0]
