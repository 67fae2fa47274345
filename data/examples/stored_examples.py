"""Token examples on disk as an Arrow table that is mapped into memory: read where they are asked for, never all.

A folder of them holds `examples.arrow` (a stream that `datasets.Dataset.from_file` opens: one column a field),
`facts.bin` (`data.examples.example_facts`) and, written last, `examples.json`: kind, number, fingerprint and the size
of every file. A folder whose files have other sizes is not read.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np

from espalier.data.examples.example_facts import FACTS, Facts, facts
from espalier.data.examples.token_examples import (
    OutcomeExample,
    PairExample,
    StepExample,
    TokenExample,
    examples_fingerprint,
)
from espalier.data.records import BadInput

_KINDS = {kind.__name__: kind for kind in (TokenExample, StepExample, OutcomeExample, PairExample)}
_TABLE, _FACTS, ABOUT = "examples.arrow", "facts.bin", "examples.json"
_ROWS = 1000  # of one Arrow batch, and read at once


def _schema(kind: type) -> Any:
    """Return the Arrow schema of a kind of example: ids and places as int32, numbers as float64."""
    import pyarrow

    types = {str: pyarrow.string(), int: pyarrow.int32(), float: pyarrow.float64(), bool: pyarrow.bool_(),
             list[int]: pyarrow.list_(pyarrow.int32()), list[float]: pyarrow.list_(pyarrow.float64())}  # fmt: skip
    return pyarrow.schema([(one.name, types[one.type]) for one in fields(kind)])  # type: ignore[index]


def write_examples(folder: Path, examples: Sequence[Any], **about: Any) -> None:
    """Write examples of one kind into a folder that is there, with `about` beside what they are. Raises BadInput on an
    id beyond 31 bits."""
    import pyarrow

    kind = type(examples[0])
    schema = _schema(kind)
    with (folder / _FACTS).open("wb") as file:
        for start in range(0, len(examples), _ROWS):
            part = facts(examples[start : start + _ROWS])
            if part["greatest_id"].max() >= 1 << 31 or part["least_id"].min() < -(1 << 31):
                raise BadInput(f"{about.get('paths')}: holds ids of more than 31 bits, which no model reads")
            file.write(part.tobytes())
    with (folder / _TABLE).open("wb") as table, pyarrow.ipc.new_stream(table, schema) as stream:
        for start in range(0, len(examples), _ROWS):
            rows = examples[start : start + _ROWS]
            columns = {name: [getattr(example, name) for example in rows] for name in schema.names}
            stream.write_batch(pyarrow.record_batch(columns, schema=schema))
    sizes = {name: (folder / name).stat().st_size for name in (_TABLE, _FACTS)}
    rest = {"kind": kind.__name__, "number": len(examples), "fingerprint": examples_fingerprint(examples)}
    (folder / ABOUT).write_text(json.dumps({**rest, "sizes": sizes, **about}) + "\n")


def read_about(folder: Path) -> dict[str, Any] | None:
    """Return what `write_examples` wrote down; None where the folder is not there, or not as it was written."""
    try:
        about: dict[str, Any] = json.loads((folder / ABOUT).read_text())
        is_whole = all((folder / name).stat().st_size == size for name, size in about["sizes"].items())
    except (OSError, ValueError, KeyError):
        return None
    return about if is_whole and about["number"] * FACTS.itemsize == about["sizes"][_FACTS] else None


@dataclass(frozen=True)
class StoredExamples(Sequence[Any]):
    """The examples of a folder, as a list of them would be; `kind` and `fingerprint` are known without reading one."""

    folder: Path
    kind: type
    fingerprint: str

    @cached_property
    def _table(self) -> Any:
        import datasets

        return datasets.Dataset.from_file(str(self.folder / _TABLE))

    @cached_property
    def facts(self) -> Facts:
        """One row of `FACTS` an example, mapped into memory."""
        return np.asarray(np.memmap(self.folder / _FACTS, FACTS, mode="r"))

    def __len__(self) -> int:
        return len(self.facts)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self.take(range(len(self))[index])
        return self.take([range(len(self))[index]])[0]

    def take(self, indices: Sequence[int]) -> list[Any]:
        """Return the examples of some places, in that order."""
        return self._examples(self._table[list(indices)]) if indices else []

    def _examples(self, columns: dict[str, list[Any]]) -> list[Any]:
        names = [one.name for one in fields(self.kind)]
        rows = zip(*(columns[name] for name in names), strict=True)
        return [self.kind(**dict(zip(names, row, strict=True))) for row in rows]

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self), _ROWS):
            yield from self._examples(self._table[start : start + _ROWS])

    def column(self, name: str) -> Iterator[Any]:
        """Yield one field of every example without reading the others."""
        column = self._table.select_columns([name])
        for start in range(0, len(self), _ROWS):
            yield from column[start : start + _ROWS][name]


def open_examples(folder: Path, about: dict[str, Any]) -> StoredExamples:
    """Return the examples of a whole folder, `about` being what `read_about` returned."""
    return StoredExamples(folder, _KINDS[about["kind"]], about["fingerprint"])


def facts_of(examples: Sequence[Any]) -> Facts:
    """Return the facts of examples, stored or listed."""
    return examples.facts if isinstance(examples, StoredExamples) else facts(examples)


def longest_of(*sets: Sequence[Any]) -> int:
    """Return tokens of the longest example of all sets, 0 where there is none."""
    return max(int(facts_of(examples)["length"].max(initial=0)) for examples in sets)


def fingerprint_of(examples: Sequence[Any]) -> str:
    """Return the fingerprint of examples, stored or listed (`examples_fingerprint`)."""
    return examples.fingerprint if isinstance(examples, StoredExamples) else examples_fingerprint(examples)


def column_of(examples: Sequence[Any], name: str, default: Any = None) -> Iterator[Any]:
    """Yield one field of every example, stored or listed; `default` of those whose kind has none."""
    if isinstance(examples, StoredExamples):
        has_one = any(one.name == name for one in fields(examples.kind))
        return examples.column(name) if has_one else iter([default] * len(examples))
    return (getattr(example, name, default) for example in examples)
