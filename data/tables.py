"""Rows of published tables: CSV, tab-separated text, and data sets of the Hugging Face hub; see `data.sources`."""

import csv
import io
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from espalier.data.records import BadInput
from espalier.data.sources import Row, file_stamp, open_json_lines, read_json_rows, read_text, refuse_written_over

_ROWS_AT_ONCE = 1_000  # of a Parquet file


def read_csv_rows(path: str | Path) -> list[Row]:
    """Read the rows of a CSV file with a header, as strings; an empty cell is an empty string.

    Raises BadInput where the file cannot be read or is not CSV, a column appears twice, or there is no row.
    """
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    rows: list[Row] = []
    header: list[str] = []
    line = 1
    try:
        for cells in reader:
            if not header:
                header = [name.strip() for name in cells]
                if len(set(header)) < len(header):
                    raise BadInput(f"{path}:1: a column stands twice in the header")
            elif len(cells) == len(header):
                rows.append(Row(str(path), line, dict(zip(header, cells, strict=True))))
            elif cells:
                reason = f"{len(cells)} cells where the header has {len(header)}: the line is cut off, or a quote is"
                rows.append(Row(str(path), line, error=reason))
            line = reader.line_num + 1
    except csv.Error as error:
        raise BadInput(f"{path}:{line}: not CSV ({error}): the file is damaged here, fetch it again") from None
    if not rows:
        raise BadInput(f"{path}: a header and no row: fetch it again")
    return rows


def read_tab_rows(path: str | Path) -> list[Row]:
    """Return the rows of a tab-separated file with a header, as strings; [] where the first line is no such header.

    Nothing is quoted in such a file, but for cells that a spreadsheet wrote: between quotation marks, with those
    inside doubled. Raises BadInput where the file cannot be read, a column appears twice, or there is no row.
    """
    lines = read_text(path).split("\n")
    header = [name.strip() for name in lines[0].rstrip("\r").split("\t")]
    if len(header) < 2 or lines[0].lstrip()[:1] in ("{", "["):
        return []
    if len(set(header)) < len(header):
        raise BadInput(f"{path}:1: a column stands twice in the header")
    rows = []
    for number, line in enumerate(lines[1:], 2):
        cells = [_unquoted(cell) for cell in line.rstrip("\r").split("\t")]
        if len(cells) == len(header):
            rows.append(Row(str(path), number, dict(zip(header, cells, strict=True))))
        elif line.strip():
            rows.append(Row(str(path), number, error=f"{len(cells)} cells where the header has {len(header)}"))
    if not rows:
        raise BadInput(f"{path}: a header and no row: fetch it again")
    return rows


def _unquoted(cell: str) -> str:
    inside = cell[1:-1]
    is_quoted = len(cell) > 1 and cell[0] == cell[-1] == '"' and '"' not in inside.replace('""', "")
    return inside.replace('""', '"') if is_quoted else cell


def table_rows(table: Iterable[Mapping[str, Any]], name: str) -> list[Row]:
    """Return the rows of a `datasets.Dataset`, or of anything that iterates over mappings; lines count its rows from
    1."""
    return [Row(name, number, dict(fields)) for number, fields in enumerate(table, 1)]


def read_hub_rows(hub: str, config: str, split: str, revision: str) -> list[Row]:
    """Return the rows of `hub_tables`. Raises BadInput as it does."""
    return [row for name, table in hub_tables(hub, config, split, revision) for row in table_rows(table, name)]


def hub_tables(hub: str, config: str, split: str, revision: str) -> list[tuple[str, Any]]:
    """Return the names and the tables of one split of a dataset, through the `datasets` library.

    `hub` is a name on the Hugging Face hub, or a folder written by `save_to_disk` (a single table there is whatever
    split is asked for) or that `load_dataset` can read.
    `config` is the published configuration, several joined by `+` are read one after another; `revision` pins a
    commit. Raises BadInput with the library's own reason.
    """
    import datasets

    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)  # its retries: the error says enough
    tables: list[tuple[str, Any]] = []
    for part in config.split("+"):
        name = "/".join(piece for piece in (hub, part, split) if piece)
        try:
            if (Path(hub) / "dataset_dict.json").is_file():
                table = datasets.load_from_disk(hub)[split]
            elif (Path(hub) / "state.json").is_file():
                table = datasets.load_from_disk(hub)
            else:
                table = datasets.load_dataset(hub, part or None, split=split, revision=revision or None)
        except Exception as error:  # the library and what it stands on raise dozens of kinds
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise BadInput(
                f"{name}: cannot be loaded ({reason}): check its name, split and revision, or name files in its place"
            ) from None
        tables.append((name, table))
    if not any(len(table) for _, table in tables):
        raise BadInput(f"{hub}: the split '{split}' has no row")
    return tables


def read_parquet_rows(path: str | Path) -> list[Row]:
    """Return the rows of a Parquet file, counted from 1. Raises BadInput where it cannot be read or has no row."""
    return list(open_parquet(path)[1])


def open_parquet(path: str | Path) -> tuple[int, Iterator[Row]]:
    """Return how many rows a Parquet file has, and the rows, some of which are in memory at a time. Raises BadInput
    where it cannot be read or has no row; the rows end with it where the file is no longer the one that was opened."""
    from pyarrow import parquet

    with _says_what_is_wrong(path):
        before = file_stamp(Path(path))
        file = parquet.ParquetFile(path)
    if not file.metadata.num_rows:
        raise BadInput(f"{path}: a header and no row: fetch it again")
    return file.metadata.num_rows, _parquet_rows(path, file, before)


def _parquet_rows(path: str | Path, file: Any, before: tuple[int, ...]) -> Iterator[Row]:
    number = 0
    with file, _says_what_is_wrong(path):
        for batch in file.iter_batches(_ROWS_AT_ONCE):
            for fields in batch.to_pylist():
                number += 1
                yield Row(str(path), number, fields)
        refuse_written_over(Path(path), before, is_whole=number == file.metadata.num_rows)


@contextmanager
def _says_what_is_wrong(path: str | Path) -> Iterator[None]:
    """Raise BadInput in the place of what pyarrow raises for a damaged or missing file."""
    import pyarrow

    try:
        yield
    except (OSError, pyarrow.ArrowException) as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(
            f"{path}: no Parquet file that can be read ({reason}): check the path, or fetch it again"
        ) from None


def open_rows(
    path: str, hub: str = "", config: str = "", split: str = "train", revision: str = ""
) -> tuple[int, Iterator[Row]]:
    """Return how many rows a file has (JSON lines, JSON or Parquet, by its name), or a data set of the hub where no
    file is named, and the rows, read as they are asked for: only a JSON array and a gzip file are held whole. Raises
    BadInput where neither is named, or both."""
    if bool(path) == bool(hub):
        raise BadInput("name one of the two: input=FILE, or stage.hub=NAME")
    if hub:
        tables = hub_tables(hub, config, split, revision)
        rows = (Row(name, number, dict(fields)) for name, table in tables for number, fields in enumerate(table, 1))
        return sum(len(table) for _, table in tables), rows
    if Path(path).suffix == ".parquet":
        return open_parquet(path)
    if opened := open_json_lines(path):
        return opened
    whole = read_json_rows(path)
    return len(whole), iter(whole)
