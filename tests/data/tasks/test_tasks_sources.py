"""Reading rows: every kind of file, and what is wrong with one told in one line."""

import gzip
import json
import os
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from espalier.data.records import BadInput
from espalier.data.sources import BadRow, Row, open_json_lines, read_json_folder, read_json_rows, read_text
from espalier.data.tables import open_parquet, read_csv_rows

THREE = [{"q": "one"}, {"q": "two \u2028 still two"}, {"q": "drei ü"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in THREE).encode()


def written(folder: Path, data: bytes, name: str = "rows.jsonl") -> Path:
    (folder / name).write_bytes(data)
    return folder / name


@pytest.mark.parametrize(
    "data",
    [
        LINES,
        b"\xef\xbb\xbf" + LINES,
        LINES.replace(b"\n", b"\r\n"),
        LINES.rstrip(b"\n"),
        LINES.replace(b"\n", b"\n\n"),
        gzip.compress(LINES, mtime=0),
        gzip.compress(b"\xef\xbb\xbf" + LINES, mtime=0),
        json.dumps(THREE).encode(),
        json.dumps(THREE, indent=4).encode(),
    ],
    ids=["plain", "BOM", "CRLF", "no last newline", "blank lines", "gzip", "gzip with BOM", "array", "indented array"],
)
def test_every_form_of_the_same_rows_reads_the_same(tmp_path: Path, data: bytes) -> None:
    rows = read_json_rows(written(tmp_path, data))
    assert [row.fields for row in rows] == THREE


def test_rows_of_lines_and_of_arrays_know_where_they_begin(tmp_path: Path) -> None:
    lines = read_json_rows(written(tmp_path, b'{"q": 1}\n\n{"q": 2}\n'))
    array = read_json_rows(written(tmp_path, b'[\n {"q":\n 1},\n {"q": 2}, {"q": 3}\n]\n', "a.json"))
    assert [row.line for row in lines] == [1, 3]
    assert [row.line for row in array] == [2, 4, 4]
    assert array[0].place == f"{tmp_path}/a.json:2"


def test_an_array_under_a_name_is_read_from_an_object(tmp_path: Path) -> None:
    path = written(tmp_path, b'{\n"Domain": "Data",\n"Data": [{"q": 1},\n{"q": 2}], "Version": 1.0}')
    assert [(row.line, row.fields["q"]) for row in read_json_rows(path, under="Data")] == [(3, 1), (4, 2)]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the file is empty"),
        (b" \r\n\n", "the file is empty"),
        (b"\xef\xbb\xbf", "the file is empty"),
        (b"[]", "the array has no row"),
        (b'[{"q": 1}', r"jsonl:1: no ',' or '\]' after a row: the file is cut off"),
        (b'[{"q": 1},\n{"q": 2},\n', "jsonl:3: the array has no end"),
        (b'[{"q": 1},\n{"q": "tw', "jsonl:2: not JSON"),
        (b'[{"q": 1},]', "not JSON"),
        (b'[{"q": 1}] [', "does not end as JSON should"),
        (gzip.compress(LINES, mtime=0)[:-9], "a damaged gzip file"),
        (b"\x1f\x8b" + b"no gzip at all", "a damaged gzip file"),
        (gzip.compress(b"", mtime=0), "the file is empty"),
        (LINES + b'{"q": "\xff"}\n', "jsonl:4: not UTF-8"),
        ("{}".encode("utf-16"), "is UTF-16"),
        (b"PK\x03\x04rest", "is a zip archive"),
        (b"PAR1rest", "is a Parquet file"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, data: bytes, reason: str) -> None:
    path = written(tmp_path, data)
    with pytest.raises(BadInput, match=reason) as error:
        read_json_rows(path)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_a_folder_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is a folder where a file is expected"):
        read_text(tmp_path)
    with pytest.raises(BadInput, match="no such file"):
        read_text(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"q": "cut', "not a JSON object"),
        ('{"q": NaN}', "NaN is not a number"),
        ('{"q": 1, "q": 2}', "'q' stands twice"),
        ('"text"', "must be a JSON object, got 'text'"),
        ("[" * 100_000, "not a JSON object"),
    ],
)
def test_a_bad_line_is_a_row_with_an_error_and_the_others_are_read(tmp_path: Path, line: str, reason: str) -> None:
    rows = read_json_rows(written(tmp_path, b'{"q": 0}\n' + line.encode() + b'\n{"q": 3}\n'))
    assert [row.line for row in rows] == [1, 2, 3]
    assert reason in rows[1].error
    assert [row.error for row in (rows[0], rows[2])] == ["", ""]


def test_the_getters_of_a_row_say_what_is_wrong() -> None:
    row = Row("f", 1, {"a": " x ", "empty": " ", "n": None, "i": 3, "b": True, "l": ["p ", "q"], "bad": ["p", 2]})
    assert (row.text("a"), row.text("n", default=""), row.text("empty", default="d")) == ("x", "", "")
    assert (row.integer("i"), row.texts("l")) == (3, ["p", "q"])
    for call, reason in (
        (lambda: row.text("none"), "the field 'none' is missing"),
        (lambda: row.text("n"), "the field 'n' is null"),
        (lambda: row.text("i"), "i must be a string, got 3"),
        (lambda: row.text("empty"), "empty is empty"),
        (lambda: row.integer("b"), "b must be an int, got True"),
        (lambda: row.texts("bad"), r"bad must be a list of strings, got \['p', 2\]"),
        (lambda: row.texts("a"), "a must be a list of strings"),
    ):
        with pytest.raises(BadRow, match=reason):
            call()


def test_csv_with_a_byte_order_mark_crlf_and_quoted_newlines_is_read(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbfA,B\r\n1,"two\r\nlines"\r\n"x, ""y""",\r\nshort\r\n'
    rows = read_csv_rows(written(tmp_path, data, "t.csv"))
    assert [row.fields for row in rows[:2]] == [{"A": "1", "B": "two\r\nlines"}, {"A": 'x, "y"', "B": ""}]
    assert [row.line for row in rows] == [2, 4, 5]
    assert "1 cells where the header has 2" in rows[2].error


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"A,B\n", "a header and no row"),
        (b'A,B\n1,"open\n', "csv:2: not CSV"),
        (b"A,A\n1,2\n", "a column stands twice"),
    ],
)
def test_a_damaged_csv_is_refused(tmp_path: Path, data: bytes, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        read_csv_rows(written(tmp_path, data, "t.csv"))


def test_a_folder_of_objects_is_read_in_order_of_its_numbers(tmp_path: Path) -> None:
    for name in ("b/2", "b/10", "a/1"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.json").write_text(json.dumps({"name": name}, indent=1))
    (tmp_path / "b" / "3.json").write_text("")
    rows = read_json_folder(tmp_path)
    assert [row.key for row in rows] == ["a/1", "b/2", "b/3", "b/10"]
    assert "the file is empty" in rows[2].error
    with pytest.raises(BadInput, match=r"no <subject>/<n>\.json below it"):
        read_json_folder(tmp_path / "a")


@pytest.mark.parametrize(
    "data",
    [
        b'{"q": 1}\n\n{"q": 2}\n',
        b'\xef\xbb\xbf{"q": 1}\r\n \t\r\n{"q": "\xe2\x80\xa8"}',
        b'\n\xc2\xa0\n{"q": 1}\nno json\n[1]\n{"q": NaN}\n{"q": 1, "q": 2}\n3\n{"q": 4',
        b"\xc2\xa0[\n1]\n",
    ],
)
def test_json_lines_are_the_same_rows_one_by_one(data: bytes, tmp_path: Path) -> None:
    path = written(tmp_path, data)
    opened = open_json_lines(path)
    assert opened is not None
    rows = list(opened[1])
    assert rows == read_json_rows(path)
    assert len(rows) == opened[0]


@pytest.mark.parametrize(
    "data", [b"", b" \n", b"\n [{}]", b"\xef\xbb\xbf[{}]", b'{"q": 1}\n\xff\n', b"PAR1", b"\x1f\x8b"]
)
def test_what_is_no_plain_file_of_json_lines_is_read_whole_or_refused(data: bytes, tmp_path: Path) -> None:
    assert open_json_lines(written(tmp_path, data)) is None
    assert open_json_lines(tmp_path / "gone.jsonl") is None


@pytest.mark.parametrize("change", ["rewritten", "appended", "cut", "not UTF-8", "replaced", "removed"])
def test_a_file_that_changes_while_it_is_read_is_refused(change: str, tmp_path: Path) -> None:
    """It is longer than what is read at once, so that a mixture would be read."""
    data = b"".join(b'{"q": %d}\n' % number for number in range(5_000))
    path = written(tmp_path, data)
    opened = open_json_lines(path)
    assert opened is not None
    first = next(opened[1])
    if change == "appended":
        path.write_bytes(data + b'{"q": 0}\n')
    elif change == "removed":
        path.unlink()
    elif change == "replaced":
        os.replace(written(tmp_path, data, "other.jsonl"), path)
    else:
        path.write_bytes({"cut": data[:100], "not UTF-8": b"\xff" * len(data)}.get(change, data.replace(b"q", b"r")))
        os.utime(path, ns=(1, 1))  # the clock of files is coarse
    with pytest.raises(BadInput, match=r"rows.jsonl: was written over while it was read: run the command again"):
        list(opened[1])
    assert first.fields == {"q": 0}


def test_a_parquet_file_that_is_replaced_while_it_is_read_is_refused(tmp_path: Path) -> None:
    for name in ("rows.parquet", "other.parquet"):
        parquet.write_table(pyarrow.Table.from_pylist(THREE), tmp_path / name)
    number, rows = open_parquet(tmp_path / "rows.parquet")
    first = next(rows)
    os.replace(tmp_path / "other.parquet", tmp_path / "rows.parquet")
    with pytest.raises(BadInput, match=r"rows.parquet: was written over while it was read: run the command again"):
        list(rows)
    assert (number, first.fields) == (3, THREE[0])
