"""Published rows: what is read of a row and what is only kept, and keys that depend on the content alone."""

import hashlib
import json
import typing
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from espalier.data.records import BadInput, parse_record
from espalier.data.tables import open_rows

R = TypeVar("R")
JsonRow = dict[str, Any]


def iter_published(path: str | Path, **hub: str) -> Iterator[tuple[str, JsonRow]]:
    """Return (place, object) of every row, JSON lines and Parquet one by one; blank lines are passed over. Without a
    path, `hub` and `config`, `split`, `revision` are those of `data.tables.open_rows`.

    Raises BadInput on a file that cannot be read and on the first row that is not a JSON object.
    """
    for row in open_rows(str(path), **hub)[1]:
        if row.error:
            raise BadInput(f"{row.place}: {row.error}: correct or remove this row")
        yield row.place, dict(row.fields)


def take_known(kind: type[R], row: Mapping[str, Any], place: str) -> tuple[R, JsonRow]:
    """Return the fields of the dataclass `kind`, validated, and all other columns of the row as they stand.

    A field with a default may be absent; for one that must be written back as it was, look at it with a `kind`
    of its own and leave it among the others. Raises BadInput on a missing or ill-typed field, in the names of the
    published format.
    """
    names = {field.name for field in fields(typing.cast(Any, kind))}
    known = parse_record(kind, {name: value for name, value in row.items() if name in names}, place)
    return known, {name: value for name, value in row.items() if name not in names}


def content_key(value: Any) -> str:
    """16 hex digits that depend on the JSON value alone, not on the order of its fields: the same row has the
    same key in every file."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def problem_key(question: str) -> str:
    """Return `problem-` and 16 hex digits of the question, whatever its white space: one problem has one id in all
    formats, and so falls on one side of every split."""
    return f"problem-{content_key(' '.join(question.split()))}"
