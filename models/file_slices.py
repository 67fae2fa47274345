"""Weights of safetensors files that are read in part, where a rank keeps no more than a part of them.

transformers opens files by `safe_open`, takes a slice object for each weight and asks it for the whole when the
weight's turn comes. Within `read_in_parts` it is given a tensor that nothing was read of yet (`Unread`), which whoever
registers the weight can read a stretch of. A weight that is computed with before (experts that are joined, kinds that
are turned) is read whole at that moment, and so is each where transformers opens files in another way than today.
"""

import math
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.utils._pytree import tree_map_only
from transformers import modeling_utils

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NUM_SAMPLES, _SAMPLE = 64, 1 << 14
_SAME = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


class Unread(torch.Tensor):
    """A weight of a file: its shape and kind of numbers, and where to read them. What is computed with it is computed
    with the numbers."""

    source: Any
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, source: Any, dtype: torch.dtype) -> "Unread":
        """`source`: safetensors' slice object; `dtype`: what its numbers are turned into."""
        new: Unread = torch.Tensor._make_wrapper_subclass(cls, source.get_shape(), dtype=dtype)  # type: ignore[attr-defined]
        new.source = source
        return new

    def numbers(self, start: int, stop: int) -> torch.Tensor:
        """Return those elements of the flattened weight: [stop - start]; rows around them may be read, no more."""
        if start == stop:
            return torch.empty(0, dtype=self.dtype)
        box, before = box_around(self.shape, start, stop)
        return self.source[box].reshape(-1)[start - before : stop - before].to(self.dtype)  # type: ignore[no-any-return]

    def whole(self) -> torch.Tensor:
        """Return all of it."""
        return self.source[...].to(self.dtype)  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Read nothing where it stays what it is, but for the first change of its kind of numbers."""
        kwargs = kwargs or {}
        if func in _SAME:
            return cls(args[0].source, args[0].dtype)
        if func is torch.ops.aten._to_copy.default and args[0].dtype == _FLOATS[args[0].source.get_dtype()]:
            others = {name for name, value in kwargs.items() if value is not None} - {"dtype", "device"}
            if not others and torch.device(kwargs.get("device") or "cpu").type == "cpu":
                return cls(args[0].source, kwargs.get("dtype") or args[0].dtype)
        if func._schema.is_mutable:
            raise TypeError(f"{func}: a weight that was not read yet cannot be written to")
        args, kwargs = tree_map_only(Unread, Unread.whole, (args, kwargs))
        return func(*args, **kwargs)


def box_around(shape: Sequence[int], start: int, stop: int) -> tuple[tuple[slice, ...], int]:
    """Return (index, before): the smallest index of a tensor of this shape, rows of one dimension, that holds elements
    `start` to `stop` (more than none) of it flattened, and how many elements come before it."""
    index, before, row = [], 0, math.prod(shape)
    for size in shape:
        row //= size
        first, end = (start - before) // row, -(-(stop - before) // row)
        index.append(slice(first, end))
        before += first * row
        if end - first > 1:
            break
    return tuple(index), before


def with_only(numbers: torch.Tensor, start: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor that holds these numbers from element `start` on, flattened, and takes no memory for others:
    addresses whose pages were never written to have none."""
    room = mmap.mmap(-1, shape.numel() * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    flat = torch.frombuffer(room, dtype=dtype)
    flat[start : start + len(numbers)] = numbers
    return flat.view(shape)


def sample_of_files(folder: str) -> str:
    """Return a hash of the names and sizes of a folder's safetensors files, and of what stands at their begin and at
    places spread over them."""
    found = xxhash.xxh3_64()
    for path in sorted(Path(folder).glob("*.safetensors")):
        size = path.stat().st_size
        found.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for number in range(_NUM_SAMPLES):
                file.seek(size * number // _NUM_SAMPLES)
                found.update(file.read(_SAMPLE))
    return found.hexdigest()


class _Weight:
    """safetensors' slice object, whose whole is not read when it is asked for."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def __getitem__(self, index: Any) -> Any:
        dtype = _FLOATS.get(self._source.get_dtype())
        if index is not ... or dtype is None or not math.prod(self._source.get_shape()):
            return self._source[index]
        return Unread(self._source, dtype)


class _File:
    """safetensors' open file, of such weights."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "_File":
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._file.__exit__(*error)

    def get_slice(self, name: str) -> _Weight:
        """Return a weight by its name in the file."""
        return _Weight(self._file.get_slice(name))


@contextmanager
def read_in_parts() -> Iterator[None]:
    """Have transformers be given weights unread within."""
    before = getattr(modeling_utils, "safe_open", None)
    if before is None:
        yield
        return
    modeling_utils.safe_open = lambda *args, **options: _File(before(*args, **options))
    try:
        yield
    finally:
        modeling_utils.safe_open = before
