"""Rows of published files: JSON lines, JSON arrays, folders of JSON objects; tables are read by `data.tables`.

Every reader gives `Row`s that know their file and line. What is wrong with one row (a torn line, a wrong type) is
kept in `Row.error` or raised as `BadRow` by the row's own getters, so that a loader can name it and go on; what is
wrong with a whole file (missing, a folder, empty, a corrupt gzip, an array without its end) raises BadInput at once.

Gzip is known by its first bytes and not by its name. UTF-8 only, with or without a byte-order mark; lines may end
in CRLF. JSON lines are split at `\\n` alone (`str.splitlines` also splits at U+2028).
"""

import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from espalier.data.jsonl import refuse_constant, refuse_doubled
from espalier.data.records import BadInput

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_DECODER = json.JSONDecoder(parse_constant=refuse_constant, object_pairs_hook=refuse_doubled)
_SPACE = re.compile(r"[ \t\r\n]*")
_FOREIGN = {
    b"PK\x03\x04": "a zip archive: unpack it",
    b"PAR1": "a Parquet file by another name: call it X.parquet, or name its folder as hub",
    b"\xff\xfe": "UTF-16: save it as UTF-8",
    b"\xfe\xff": "UTF-16: save it as UTF-8",
    b"BZh": "bzip2-compressed: unpack it",
    b"\xfd7zXZ": "xz-compressed: unpack it",
}


class BadRow(ValueError):
    """One row is wrong; the message says how, the reader knows where."""


@dataclass(frozen=True)
class RejectedRow:
    """A published row that could not be read."""

    file: str
    """the published file"""
    line: int
    """from 1"""
    reason: str
    """what is wrong with it"""


@dataclass(frozen=True)
class Row:
    """One published row. `line` is where it begins; `error` says why there are no fields; `key` is what the
    row is called by its place (the file's name in a folder of objects, a question's id in a passage)."""

    file: str
    line: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    key: str = ""

    @property
    def place(self) -> str:
        """`file:line`."""
        return f"{self.file}:{self.line}"

    def rejected(self, reason: str) -> RejectedRow:
        """Return this row as a rejected one, the reason on one line and not without end."""
        reason = " ".join((f"{self.key}: {reason}" if self.key else reason).split())
        return RejectedRow(self.file, self.line, reason if len(reason) <= 300 else reason[:297] + "...")

    def has(self, name: str) -> bool:
        """Say whether the row has the field; null counts as absent (a table has every column in every row)."""
        return self.fields.get(name) is not None

    def text(self, name: str, default: str | None = None) -> str:
        """Read a string without outer blanks; empty only where `default` is given.

        Raises BadRow where it is missing, empty or no string.
        """
        if not self.has(name) and default is not None:
            return default
        value = self._given(name)
        if not isinstance(value, str):
            raise BadRow(f"{name} must be a string, got {_short(value)}")
        if not value.strip() and default is None:
            raise BadRow(f"{name} is empty")
        return value.strip()

    def texts(self, name: str) -> list[str]:
        """Read a list of strings without outer blanks.

        Raises BadRow where it is missing, empty, holds an empty string or is no such list.
        """
        value = self._given(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise BadRow(f"{name} must be a list of strings, got {_short(value)}")
        if not value or not all(item.strip() for item in value):
            raise BadRow(f"{name} is empty" if not value else f"{name} holds an empty string")
        return [item.strip() for item in value]

    def integer(self, name: str) -> int:
        """Read an int. Raises BadRow where it is missing or of another type, also a bool or a float."""
        value = self._given(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise BadRow(f"{name} must be an int, got {_short(value)}")
        return value

    def _given(self, name: str) -> Any:
        if not self.has(name):
            state = "is null" if name in self.fields else "is missing"
            raise BadRow(f"the field '{name}' {state} (the row has {', '.join(self.fields) or 'none'})")
        return self.fields[name]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_text(path: str | Path) -> str:
    """Read the text of a file, gunzipped where it is gzip, without its byte-order mark.

    Raises BadInput where the file is missing, damaged, empty, of a kind that is not text, or not UTF-8.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except IsADirectoryError:
        raise BadInput(f"{path}: is a folder where a file is expected: name the file in it") from None
    except (FileNotFoundError, NotADirectoryError):
        raise BadInput(f"{path}: no such file: check the path") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror}): check the path and its rights") from None
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise BadInput(f"{path}: a damaged gzip file ({error}): fetch it again") from None
    for magic, name in _FOREIGN.items():
        if data.startswith(magic):
            raise BadInput(f"{path}: is {name}")
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BadInput(f"{path}:{line}: not UTF-8 (byte {data[error.start]:#04x}): save the file as UTF-8") from None
    if not text.strip():
        raise BadInput(f"{path}: the file is empty: fetch it again")
    return text


def read_json_rows(path: str | Path, under: str = "") -> list[Row]:
    """Read the rows of a file of JSON lines or of one JSON array, whichever it is; with `under`, of the array that the
    file's one object holds under that name, if it does.

    Raises BadInput where the file cannot be read, the object has no such array, or an array is damaged or empty.
    """
    text = read_text(path)
    start = _SPACE.match(text).end()  # type: ignore[union-attr]
    if under and text[start] == "{":
        match = re.search(rf'"{re.escape(under)}"\s*:\s*\[', text)
        if match is not None:
            return list(_array_rows(str(path), text, match.end(), "}"))
        if _object_row("", 1, text[start:].partition("\n")[0]).error:
            raise BadInput(f"{path}: the object has no array '{under}': is it the published file?")
    if text[start] == "[":
        return list(_array_rows(str(path), text, start + 1, ""))
    return list(_line_rows(str(path), text))


def open_json_lines(path: str | Path) -> tuple[int, Iterator[Row]] | None:
    """Return how many rows a plain file of JSON lines has, and the rows, which are read one by one: those of
    `read_json_rows`. None where that must read the whole file (an array, gzip) or refuses it. The rows end with
    BadInput where the file is no longer the one that was counted."""
    path = Path(path)
    if not path.is_file():
        return None
    rows = _count_and_rows(path)
    count = next(rows, 0)
    return (count, rows) if count else None


def file_stamp(file: Path | int) -> tuple[int, ...]:
    """Return what differs once a file, by its path or descriptor, is replaced or written to."""
    found = os.stat(file)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def refuse_written_over(path: Path, before: tuple[int, ...], *, is_whole: bool = True) -> None:
    """Raise BadInput where the file's stamp is no longer the one before, or what was read is not the whole."""
    try:
        is_same = is_whole and file_stamp(path) == before
    except OSError:
        is_same = False
    if not is_same:
        raise BadInput(f"{path}: was written over while it was read: run the command again")


def _count_and_rows(path: Path) -> Iterator[Any]:
    """Yield how many rows there are and then the rows, of one open file; nothing where it must be read whole."""
    with path.open("rb") as file:
        before = file_stamp(file.fileno())
        if not (count := _count_lines(file)):
            return
        yield count
        file.seek(0)
        num_read = 0
        try:
            for number, line in _text_lines(file):
                if line.strip():
                    num_read += 1
                    yield _object_row(str(path), number, line)
        except UnicodeDecodeError:
            refuse_written_over(path, before, is_whole=False)
        refuse_written_over(path, before, is_whole=num_read == count and file_stamp(file.fileno()) == before)


def _count_lines(file: BufferedReader) -> int:
    """Return how many rows an open plain file of JSON lines has; 0 where it is something else."""
    head = file.peek(8)
    if head.startswith((b"\x1f\x8b", *_FOREIGN)):
        return 0
    count, is_begun = 0, False
    try:
        for _, line in _text_lines(file):
            if not is_begun and (begun := line.lstrip(" \t\r\n")):
                is_begun = True
                if begun.startswith("["):
                    return 0
            count += bool(line.strip())
    except UnicodeDecodeError:
        return 0
    return count


def _text_lines(file: IO[bytes]) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(file, 1):
        yield number, (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).decode().removesuffix("\n")


def _line_rows(file: str, text: str) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _object_row(file, number, line)


def _object_row(file: str, number: int, text: str, key: str = "") -> Row:
    """Return a row of a text that is one JSON object."""
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        return Row(file, number, error=f"not a JSON object ({error})", key=key)
    return _row(file, number, value, key)


def _row(file: str, number: int, value: Any, key: str = "") -> Row:
    if not isinstance(value, dict):
        return Row(file, number, error=f"a row must be a JSON object, got {_short(value)}", key=key)
    return Row(file, number, value, key=key)


def _array_rows(file: str, text: str, start: int, tail: str) -> Iterator[Row]:
    """Return the objects of an array whose `[` ends before `start`; each knows the line on which it begins. What is
    left of the text must end with `tail`."""
    line, counted, has_rows = 1, 0, False
    place = _SPACE.match(text, start).end()  # type: ignore[union-attr]
    while has_rows or text[place : place + 1] != "]":
        line, counted = line + text.count("\n", counted, place), place
        try:
            value, place = _DECODER.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            reason = "the array has no end" if place == len(text) else f"not JSON ({error})"
            raise BadInput(f"{file}:{line}: {reason}: the file is damaged here, fetch it again") from None
        yield _row(file, line, value)
        has_rows = True
        place = _SPACE.match(text, place).end()  # type: ignore[union-attr]
        mark = text[place : place + 1]
        if mark == "]":
            break
        if mark != ",":
            line += text.count("\n", counted, place)
            raise BadInput(f"{file}:{line}: no ',' or ']' after a row: the file is cut off here, fetch it again")
        place = _SPACE.match(text, place + 1).end()  # type: ignore[union-attr]
    if not has_rows:
        raise BadInput(f"{file}: the array has no row: fetch it again")
    rest = text[place + 1 :].strip()
    if not rest.endswith(tail) or (rest and not tail):
        raise BadInput(f"{file}: the file does not end as JSON should ({_short(rest[-20:])}): fetch it again")


def read_json_folder(folder: Path) -> list[Row]:
    """Return one row for each `<subject>/<n>.json` below the folder, by subject and number; its key is `<subject>/<n>`.

    Raises BadInput where there is none.
    """

    def order(path: Path) -> tuple[str, bool, int, str]:
        is_number = path.stem.isdecimal()
        return path.parent.name, not is_number, int(path.stem) if is_number else 0, path.stem

    paths = sorted(folder.glob("*/*.json"), key=order)
    if not paths:
        raise BadInput(f"{folder}: no <subject>/<n>.json below it: unpack the archive here, or name its folder")
    rows = []
    for path in paths:
        key = f"{path.parent.name}/{path.stem}"
        try:
            rows.append(_object_row(str(path), 1, read_text(path), key))
        except BadInput as error:
            reason = str(error).removeprefix(str(path)).lstrip(":0123456789 ")
            rows.append(Row(str(path), 1, error=reason, key=key))
    return rows
