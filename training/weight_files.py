"""Files of weights put together from smaller ones, without their numbers ever being in memory.

safetensors (https://github.com/huggingface/safetensors): eight bytes that say how long the header is, the header in
JSON (name, dtype, shape and place of each tensor), the numbers. Its own writer orders tensors by dtype, the widest
first, and by name; a file that is put together here is the one that it would have written of the same tensors, bit for
bit.
"""

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_INDEX = "model.safetensors.index.json"
_COPIED = 4 * 2**20  # bytes at a time
# In the order in which the writer goes through them.
_DTYPES = ("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "F8_E8M0", "F8_E4M3",
           "F8_E5M2", "I8", "U8", "BOOL")  # fmt: skip


@dataclass(frozen=True)
class _Tensor:
    """`start`: of its numbers in the file `path`."""

    name: str
    dtype: str
    shape: list[int]
    path: Path
    start: int
    size: int


def read_header(path: Path) -> dict[str, Any]:
    """Return the header of a file of weights."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    return header


def _tensors(path: Path) -> tuple[dict[str, str], list[_Tensor]]:
    """Return (the file's own words about itself, its tensors)."""
    header = read_header(path)
    with path.open("rb") as file:
        begin = 8 + struct.unpack("<Q", file.read(8))[0]
    words = header.pop("__metadata__", {})
    return words, [
        _Tensor(name, row["dtype"], row["shape"], path, begin + row["data_offsets"][0],
                row["data_offsets"][1] - row["data_offsets"][0])
        for name, row in header.items()
    ]  # fmt: skip


def join_tensors(pieces: Sequence[Path], target: Path) -> None:
    """Write one file of weights from several that hold different ones, and remove these."""
    found = [_tensors(path) for path in pieces]
    tensors = sorted((row for _, rows in found for row in rows), key=lambda row: (_DTYPES.index(row.dtype), row.name))
    header: dict[str, Any] = {"__metadata__": found[0][0]} if found[0][0] else {}
    place = 0
    for row in tensors:
        header[row.name] = {"dtype": row.dtype, "shape": row.shape, "data_offsets": [place, place + row.size]}
        place += row.size
    with target.open("wb") as file:
        _write_header(file, header)
        for row in tensors:
            _copy(row, file)
    for path in pieces:
        path.unlink()


def _copy(row: _Tensor, file: Any) -> None:
    with row.path.open("rb") as source:
        source.seek(row.start)
        for done in range(0, row.size, _COPIED):
            file.write(source.read(min(_COPIED, row.size - done)))


@contextmanager
def grown(path: Path, shape: Sequence[int]) -> Iterator[Callable[[Any], object]]:
    """Replace a file of tensors of one number, the same one under several names perhaps, by one in which they have a
    shape: what is yielded takes the bytes of the tensor, in parts."""
    words, rows = _tensors(path)
    if not rows:  # transformers does not write it
        yield len
        return
    size = rows[0].size * math.prod(shape)
    header: dict[str, Any] = {"__metadata__": words} if words else {}
    for place, row in enumerate(rows):
        offsets = [place * size, (place + 1) * size]
        header[row.name] = {"dtype": row.dtype, "shape": list(shape), "data_offsets": offsets}
    with path.open("wb") as file:
        begin = _write_header(file, header)
        yield file.write
        if file.tell() != begin + size:
            raise ValueError(f"{path}: {file.tell() - begin} bytes came of a tensor of {size}")
        file.flush()
        for row in rows[1:]:
            _copy(_Tensor(row.name, row.dtype, list(shape), path, begin, size), file)


def _write_header(file: Any, header: Mapping[str, Any]) -> int:
    """Return where the numbers begin."""
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    return 8 + len(text)


def join_folders(parts: Sequence[Path], folder: Path) -> None:
    """Make one folder of several that each hold a model's files with some of its weights: their other files, which are
    the same, once, the weights in one file."""
    join_tensors([part / "model.safetensors" for part in parts], folder / "model.safetensors")
    for part in parts:
        _move_rest(part, folder)


def join_model(parts: Sequence[Path], folder: Path, total: int) -> None:
    """Make one standard folder of several, each with a file of weights, and an index of what is in which; `total`
    bytes."""
    places: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        (part / "model.safetensors").rename(folder / name)
        places |= {key: name for key in read_header(folder / name) if key != "__metadata__"}
        _move_rest(part, folder)
    index: Mapping[str, Any] = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _move_rest(part: Path, folder: Path) -> None:
    for path in part.iterdir():
        path.replace(folder / path.name)
    part.rmdir()
