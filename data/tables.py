"""Rows of published tables: CSV, tab-separated text, and data sets of the Hugging Face hub; see `data.sources`."""

import csv
import io
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from espalier.data.records import BadInput
from espalier.data.sources import Row, read_text


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
    """Return the rows of one split of a dataset, through the `datasets` library.

    `hub` is a name on the Hugging Face hub, or a folder written by `save_to_disk` (a single table there is whatever
    split is asked for) or that `load_dataset` can read.
    `config` is the published configuration, several joined by `+` are read one after another; `revision` pins a
    commit. Raises BadInput with the library's own reason.
    """
    import datasets

    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)  # its retries: the error says enough
    rows: list[Row] = []
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
                f"{name}: cannot be loaded ({reason}): check task.hub, or give the files by task.path"
            ) from None
        rows += table_rows(table, name)
    if not rows:
        raise BadInput(f"{hub}: the split '{split}' has no row")
    return rows


def read_parquet_rows(path: str | Path) -> list[Row]:
    """Return the rows of a Parquet file, counted from 1. Raises BadInput where it cannot be read or has no row."""
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(
            f"{path}: no Parquet file that can be read ({reason}): check the path, or fetch it again"
        ) from None
    if not table.num_rows:
        raise BadInput(f"{path}: a header and no row: fetch it again")
    return table_rows(table.to_pylist(), str(path))
