"""JSON lines on disk: read and validate, append, write atomically, find what is finished.

Files are read as bytes and split at `\\n` alone (`str.splitlines` also splits at U+2028) and written with
`ensure_ascii`, so that any text a model can produce survives the round trip.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from espalier.data.records import BadInput, parse_record

R = TypeVar("R")


def to_line(record: Any) -> str:
    """Return one record (a dataclass instance or a dict) as a JSON line with its newline."""
    row = record if isinstance(record, dict) else vars(record)  # records are flat: no need for a deep copy
    return json.dumps(row, separators=(",", ":"), allow_nan=False) + "\n"


def refuse_constant(name: str) -> None:
    """Raise ValueError: NaN and Infinity are not JSON."""
    raise ValueError(f"{name} is not a number")


def refuse_doubled(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of its fields. Raises ValueError where one is there twice."""
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the field {next(n for n in names if names.count(n) > 1)!r} stands twice")
    return row


def strict_json(text: str | bytes) -> Any:
    """Return the value that is the whole text. Raises ValueError where it is none, where NaN or Infinity or a field
    twice is in it, RecursionError where it is too deep."""
    return json.loads(text, parse_constant=refuse_constant, object_pairs_hook=refuse_doubled)


def parse_line(line: bytes, place: str) -> dict[str, Any]:
    """Return the object of a line; `place` (`file:line`) opens the message. Raises BadInput where it holds none."""
    try:
        row = strict_json(line)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{place}: not a JSON object ({error}): correct or remove this line") from None
    if not isinstance(row, dict):
        raise BadInput(f"{place}: a line must be a JSON object, got {type(row).__name__}")
    return row


def iter_rows(path: str | Path, leaves_torn: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """(`file:line`, object) of every line that is not blank; `leaves_torn`: but for a last one without its end, which
    somebody may be writing. Raises BadInput on a missing file."""
    for number, _, line in iter_lines(path):
        if not (leaves_torn and not line.endswith(b"\n")):
            place = f"{path}:{number}"
            yield place, parse_line(line, place)


def iter_lines(path: str | Path) -> Iterator[tuple[int, int, bytes]]:
    """(Number from 1, first byte, line with its end) of every line that is not blank. Raises BadInput on a missing
    file."""
    if not str(path):
        raise BadInput("the file to read is not named: add input=FILE, or the setting that is empty")
    path = Path(path)
    if not path.is_file():
        if path.is_dir():
            raise BadInput(f"{path}: is a folder: name one file in it")
        raise BadInput(f"{path}: no such file: check the path, or run the stage that writes it")
    with path.open("rb") as file:
        if file.peek(2)[:2] == b"\x1f\x8b":
            raise BadInput(f"{path}: is a gzip file: unpack it first (gunzip)")
        start = 0
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, start, line
            start += len(line)


def read_records(kind: type[R], path: str | Path) -> list[R]:
    """Return every line of the file as a `kind`. Raises BadInput on a bad line or on an id that stands twice."""
    records: list[R] = []
    places: dict[str, str] = {}
    for place, row in iter_rows(path):
        record = parse_record(kind, row, place)
        key: str = record.id  # type: ignore[attr-defined]
        if key in places:
            raise BadInput(f"{place}: id '{key}' stands already at {places[key]}: ids must be unique")
        places[key] = place
        records.append(record)
    return records


@contextmanager
def open_atomic(path: str | Path, encoding: str = "ascii") -> Iterator[IO[str]]:
    """Give a file open for writing under a temporary name; fsynced and renamed at the end of the block.

    A file that exists is complete: where the block raises, nothing is left and an old file stays.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w", encoding=encoding) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # a full disk, said without its place
            error.filename = str(path)
        raise


def write_records(path: str | Path, records: Iterable[Any]) -> int:
    """Write all records atomically; returns their number."""
    count = 0
    with open_atomic(path) as file:
        for record in records:
            file.write(to_line(record))
            count += 1
    return count


def write_json(path: str | Path, value: Any) -> None:
    """Write one indented JSON document atomically."""
    with open_atomic(path) as file:
        file.write(json.dumps(value, indent=1) + "\n")


def cut_torn_tail(path: Path) -> int:
    """Cut what follows the last newline, left by a process that died while writing; bytes cut."""
    if not path.is_file():
        return 0
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        end, block = size, 1 << 16
        while end > 0:
            start = max(0, end - block)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            file.truncate(end)
        return size - end


def file_sha256(path: str | Path) -> str:
    """Return SHA-256 of a file's bytes, in hex."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
