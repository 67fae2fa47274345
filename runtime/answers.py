"""Objects that travel from rank 0 to the others: pickles in which long lists of numbers are arrays.

A token id takes 4 bytes in place of 3 to 5, a log-prob that an engine computed in float32 4 bytes in place of 9. What
arrives is equal, number by number. Ids that are equal are then one Python object: 8 bytes per token in place of 40.

What both ends have alike does not travel: it is `held`, in one order, and named by its place. A network that is not
held is refused: it would arrive as a copy, which nobody trains.
"""

import io
import pickle
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

_FEWEST = 16
"""A shorter list is pickled as it is."""
_PLAIN = (torch.float32, torch.float64, torch.int32, torch.int64, torch.bool, torch.uint8)
_LARGEST_SHARED = 2**20
"""Ids below this share their objects."""
_INTS, _FLOATS, _DOUBLES = "i4", "f4", "f8"

Place = tuple[str, int, int, bool]  # of a list of numbers: type, first, end in all numbers of that type; is an array


def _as_numbers(numbers: Any) -> np.ndarray | None:
    """Return a list of int or of float, or an array of doubles, in the fewest bytes that keep every number; None for
    anything else."""
    kind = float if type(numbers) is array else type(numbers[0])
    try:
        if kind is int:
            return np.frombuffer(array("i", numbers), dtype=np.int32)
        if kind is not float:
            return None
        doubles = np.frombuffer(array("d", numbers), dtype=np.float64)
    except (TypeError, OverflowError):  # not numbers alone, or larger ones
        return None
    with np.errstate(over="ignore"):
        singles = doubles.astype(np.float32)
    return singles if np.array_equal(singles.astype(np.float64).view(np.int64), doubles.view(np.int64)) else doubles


class _Writer(pickle.Pickler):
    """Sets the numbers of lists apart."""

    def __init__(self, file: io.BytesIO, held: Sequence[Any]):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.held = {id(one): place for place, one in enumerate(held) if one is not None}
        self.parts: dict[str, list[np.ndarray]] = {_INTS: [], _FLOATS: [], _DOUBLES: []}
        self.sizes = dict.fromkeys(self.parts, 0)
        self.places: dict[int, tuple[Any, Place | None]] = {}  # by id; the object is kept, so that no other gets its id

    def persistent_id(self, obj: Any) -> Place | int | None:
        """Return where the numbers of a list stand, or a held object; None for what is pickled as it is."""
        if id(obj) in self.held:
            return self.held[id(obj)]
        if isinstance(obj, torch.nn.Module):
            raise TypeError(f"a network ({type(obj).__name__}) would come to other ranks as a copy: have it called by "
                            "a method of the estimator, filter or reward that holds it")  # fmt: skip
        is_array = type(obj) is array and obj.typecode == "d"
        if not (is_array or type(obj) is list) or len(obj) < _FEWEST:
            return None
        if id(obj) not in self.places:
            self.places[id(obj)] = (obj, self._place(obj, is_array))
        return self.places[id(obj)][1]

    def reducer_override(self, obj: Any) -> Any:
        """Write the numbers of a tensor on the CPU, and nothing of the memory that it is a view of."""
        if type(obj) is not torch.Tensor or obj.device.type != "cpu" or obj.requires_grad or obj.dtype not in _PLAIN:
            return NotImplemented
        return torch.from_numpy, (obj.contiguous().numpy(),)

    def _place(self, numbers: Any, is_array: bool) -> Place | None:
        found = _as_numbers(numbers)
        if found is None:
            return None
        kind = found.dtype.str[1:]
        first = self.sizes[kind]
        self.sizes[kind] = first + len(found)
        self.parts[kind].append(found)
        return kind, first, self.sizes[kind], is_array


class _Reader(pickle.Unpickler):
    """Puts the numbers back; a list that stood at several places is one list again."""

    def __init__(self, file: io.BytesIO, numbers: dict[str, np.ndarray], held: Sequence[Any]):
        super().__init__(file)
        self.numbers, self.held = numbers, held
        self.found: dict[Place, Any] = {}
        ids = numbers[_INTS]
        fits = len(ids) > 0 and int(ids.min()) >= 0 and int(ids.max()) < _LARGEST_SHARED
        self.shared = np.array(range(int(ids.max()) + 1), dtype=object) if fits else None

    def persistent_load(self, place: Place | int) -> Any:
        """Return the list or array that stood there, or what is held."""
        if isinstance(place, int):
            return self.held[place]
        if place not in self.found:
            kind, first, end, is_array = place
            part = self.numbers[kind][first:end]
            if is_array:
                self.found[place] = array("d", part.astype(np.float64).tobytes())
            elif kind == _INTS and self.shared is not None:
                self.found[place] = self.shared[part].tolist()
            else:
                self.found[place] = part.tolist()
        return self.found[place]


def packed(answer: Any, held: Sequence[Any] = ()) -> bytes:
    """Pickle `answer`; `unpacked` gives back what is equal to it. Raises TypeError on a network that is not held."""
    file = io.BytesIO()
    writer = _Writer(file, held)
    writer.dump(answer)
    numbers = {kind: np.concatenate(parts) for kind, parts in writer.parts.items() if parts}
    return pickle.dumps((file.getvalue(), numbers), protocol=pickle.HIGHEST_PROTOCOL)


def unpacked(content: bytes, held: Sequence[Any] = ()) -> Any:
    """Return what `packed` was given, with this end's own of what is held."""
    objects, numbers = pickle.loads(content)
    none = {_INTS: np.zeros(0, np.int32), _FLOATS: np.zeros(0, np.float32), _DOUBLES: np.zeros(0)}
    return _Reader(io.BytesIO(objects), none | numbers, held).load()
