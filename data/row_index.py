"""The rows of files by problem, found on disk: a stage works problem by problem, however long its files are.

Every file is read once from top to bottom, each row checked, and what is noted of it (the hash of its problem and of
its id, where it begins, a checksum) goes into a SQLite file that has no name and is gone with the process. Then the
rows of one problem are read where they lie, from all files. Rows of a problem need not stand together: a sampler writes
them as answers come. Memory does not depend on the number of rows: what SQLite holds of the index, and of what it
sorts, is bounded by its cache.
"""

import errno
import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self
from zlib import crc32

from espalier.data.jsonl import R, iter_lines, iter_rows, parse_line
from espalier.data.records import BadInput, parse_record

FILE = 1 << 40  # more rows than a file has: FILE * number + place is a row's place among those of all files
_WHERE = "start, size, checksum"
_CACHE_KIB = 4 * 1024  # of pages, and as much again of a sort before it goes on on disk


def hash_of(text: str) -> int:
    """Return the 64 bits, with a sign, that a problem or an id is known by."""
    return int.from_bytes(
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big", signed=True
    )


def by_text(name: str) -> bytes:
    """Return what texts are in order by: that of their characters."""
    return name.encode("utf-8", "surrogatepass")


@contextmanager
def on_disk(place: str) -> Iterator[None]:
    """Raise OSError, with the place, where SQLite says that a disk is full."""
    try:
        yield
    except sqlite3.Error as error:
        if "full" in str(error) or "disk I/O" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), place) from None
        raise


class NamelessBase:
    """A SQLite base with these `tables` in the folder of `beside`. Its file has no name there once it is open, and is
    gone with the process. Raises OSError where the disk is full."""

    def __init__(self, beside: Path, tables: str):
        beside.parent.mkdir(parents=True, exist_ok=True)
        self._name = str(beside.with_name(f".{beside.name}.{os.getpid()}.rows"))
        self._base = sqlite3.connect(self._name, isolation_level=None)
        try:
            with self._on_disk():
                self._base.executescript(
                    f"PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA cache_size=-{_CACHE_KIB}; "
                    f"PRAGMA locking_mode=EXCLUSIVE; {tables}"
                )
        finally:
            Path(self._name).unlink(missing_ok=True)  # it stays open

    def close(self) -> None:
        """Let it go."""
        self._base.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _on_disk(self) -> AbstractContextManager[None]:
        return on_disk(self._name)


class SeenIds(NamelessBase):
    """How often each id of a file came so far, and where first."""

    def __init__(self, beside: Path):
        table = "CREATE TABLE ids (id BLOB PRIMARY KEY, times INTEGER, place TEXT) WITHOUT ROWID; BEGIN;"
        super().__init__(beside, table)

    def add(self, name: str, place: str = "") -> tuple[int, str]:
        """Count an id; return how often it came, this time with it, and the place where it came first."""
        key = by_text(name)
        with self._on_disk():
            self._base.execute(
                "INSERT INTO ids VALUES (?, 1, ?) ON CONFLICT DO UPDATE SET times = times + 1", (key, place)
            )
            found: tuple[int, str] = self._base.execute("SELECT times, place FROM ids WHERE id = ?", (key,)).fetchone()
        return found


def stream_records(kind: type[R], path: str, beside: Path) -> Iterator[R]:
    """Yield every line of the file as a `kind`, as `data.jsonl.read_records` returns them, without holding them: their
    ids lie on disk, in the folder of `beside`. Raises BadInput on a bad line or on an id that stands twice."""
    with SeenIds(beside) as ids:
        for place, row in iter_rows(path):
            record = parse_record(kind, row, place)
            name: str = record.id  # type: ignore[attr-defined]
            times, earlier = ids.add(name, place)
            if times > 1:
                raise BadInput(f"{place}: id '{name}' stands already at {earlier}: ids must be unique")
            yield record


class ProblemRows(NamelessBase):
    """Files of records with an `id` and a `problem_id`, or another field that their rows are grouped by. Files are
    numbered in the order they are added in."""

    def __init__(self, beside: Path):
        """The index lies in the folder of `beside`, the file that is being made."""
        super().__init__(
            beside,
            "CREATE TABLE results (place INTEGER PRIMARY KEY, line TEXT); "
            "CREATE TABLE names (name BLOB, problem INTEGER);",
        )
        self._files: list[tuple[type, IO[bytes], str]] = []
        self._open = ExitStack()

    @property
    def num_files(self) -> int:
        """How many were added; the number of the next one."""
        return len(self._files)

    def close(self) -> None:
        """Let the files and the index go."""
        super().close()
        self._open.close()

    def add(self, kind: type, path: str, finds_ids: bool = False, group: str = "problem_id") -> int:
        """Read a file; its number of rows. `finds_ids`: they are looked up by their ids (`by_id`); `group`: the field
        that says what rows belong together. Raises BadInput on a bad row and on an id that stands twice."""
        number = len(self._files)
        table = f"rows{number}"
        with self._on_disk():
            self._base.execute(f"CREATE TABLE {table} (place INTEGER PRIMARY KEY, line INTEGER, problem INTEGER, "
                               "name INTEGER, start INTEGER, size INTEGER, checksum INTEGER)")  # fmt: skip
            self._base.execute("BEGIN")
            self._base.executemany(f"INSERT INTO {table} VALUES (?, ?, ?, ?, ?, ?, ?)", _noted(kind, path, group))
            self._base.execute("COMMIT")
            self._base.execute(f"CREATE INDEX {table}_problem ON {table} (problem)")
            if finds_ids:
                self._base.execute(f"CREATE INDEX {table}_name ON {table} (name)")
            count: int = self._base.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        file = self._open.enter_context(Path(path).open("rb"))  # noqa: SIM115
        self._files.append((kind, file, path))
        with self._on_disk():
            self._check_ids(number)
        return count

    def _check_ids(self, number: int) -> None:
        table = f"rows{number}"
        twice = f"SELECT name FROM {table} GROUP BY name HAVING count(*) > 1 ORDER BY max(place)"
        for (name,) in list(self._base.execute(twice)):
            places: dict[str, int] = {}
            rows = f"SELECT line, {_WHERE} FROM {table} WHERE name = ? ORDER BY place"
            for line, *place in list(self._base.execute(rows, (name,))):
                key = self._row(number, *place)["id"]
                if key in places:
                    path = self._files[number][2]
                    raise BadInput(f"{path}:{line}: id '{key}' stands already at {path}:{places[key]}: ids must be "
                                   "unique")  # fmt: skip
                places[key] = line

    def _row(self, number: int, start: int, size: int, checksum: int) -> dict[str, Any]:
        """Read a row again. Raises BadInput where it is not what it was."""
        _, file, path = self._files[number]
        file.seek(start)
        line = file.read(size)
        if crc32(line) != checksum:
            raise BadInput(f"{path}: was written over while it was read: start again")
        row: dict[str, Any] = json.loads(line)
        return row

    def num_problems(self, number: int) -> int:
        """Return how many problems the rows of one file are of."""
        found: int = self._base.execute(f"SELECT count(DISTINCT problem) FROM rows{number}").fetchone()[0]
        return found

    def problems(self) -> Iterator[int]:
        """Yield every problem, in the order of its first row in the first file, those of later files alone behind."""
        parts = " UNION ALL ".join(f"SELECT problem, place + {number * FILE} AS place FROM rows{number}"
                                   for number in range(len(self._files)))  # fmt: skip
        with self._on_disk():
            for (problem,) in self._base.execute(f"SELECT problem FROM ({parts}) GROUP BY problem ORDER BY min(place)"):
                yield problem

    def problems_by_id(self, order: Callable[[str], bytes] = by_text) -> Iterator[int]:
        """Yield every problem of any file, in the order of what `order` makes of its id; by itself that of the ids."""
        with self._on_disk():
            self._base.execute("DELETE FROM names")
            self._base.execute("BEGIN")
            for problem in self.problems():
                first = next(row for number in range(len(self._files)) for row in self._first(number, problem))
                self._base.execute("INSERT INTO names VALUES (?, ?)", (order(first["problem_id"]), problem))
            self._base.execute("COMMIT")
            for (problem,) in self._base.execute("SELECT problem FROM names ORDER BY name"):
                yield problem

    def _first(self, number: int, problem: int) -> Iterator[dict[str, Any]]:
        where = f"SELECT {_WHERE} FROM rows{number} WHERE problem = ? ORDER BY place LIMIT 1"
        for place in self._base.execute(where, (problem,)):
            yield self._row(number, *place)

    def elsewhere(self, number: int, other: int) -> tuple[Any, Any] | None:
        """Return two records of one id in two files that are of different problems, None where there are none."""
        both = ("SELECT a.start, a.size, a.checksum, b.start, b.size, b.checksum "
                f"FROM rows{number} a JOIN rows{other} b ON a.name = b.name "
                "WHERE a.problem <> b.problem ORDER BY a.place LIMIT 1")  # fmt: skip
        with self._on_disk():
            found = self._base.execute(both).fetchone()
        if found is None:
            return None
        kinds = self._files[number][0], self._files[other][0]
        return kinds[0](**self._row(number, *found[:3])), kinds[1](**self._row(other, *found[3:]))

    def rows(self, number: int, problem: int) -> list[Any]:
        """Return a problem's records in one file, in file order."""
        where = f"SELECT {_WHERE} FROM rows{number} WHERE problem = ? ORDER BY place"
        kind = self._files[number][0]
        return [kind(**self._row(number, *place)) for place in self._base.execute(where, (problem,)).fetchall()]

    def in_order(self, number: int) -> Iterator[Any]:
        """Yield the records of one file in file order."""
        kind = self._files[number][0]
        with self._on_disk():
            for place in self._base.execute(f"SELECT {_WHERE} FROM rows{number} ORDER BY place"):
                yield kind(**self._row(number, *place))

    def by_id(self, number: int, name: str) -> Any:
        """Return the record of this id in one file that was added with `finds_ids`, None where it has none."""
        kind = self._files[number][0]
        found = self._base.execute(f"SELECT {_WHERE} FROM rows{number} WHERE name = ?", (hash_of(name),)).fetchall()
        return next((kind(**row) for row in (self._row(number, *place) for place in found) if row["id"] == name), None)

    def places(self, number: int, problem: int) -> list[int]:
        """Return where a problem's records stand in one file, in file order, from 0."""
        where = f"SELECT place FROM rows{number} WHERE problem = ? ORDER BY place"
        return [place for (place,) in self._base.execute(where, (problem,))]

    @property
    def stands_together(self) -> bool:
        """Whether the rows of every problem follow one another in the first file."""
        apart = "SELECT 1 FROM rows0 GROUP BY problem HAVING max(place) - min(place) >= count(*) LIMIT 1"
        return self._base.execute(apart).fetchone() is None

    def in_file_order(self, results: Iterator[tuple[int, Any]]) -> Iterator[Any]:
        """Yield records in the order of the places they come with, by way of the disk where that is another one."""
        if self.stands_together:
            yield from (record for _, record in results)
        else:
            yield from self.sorted_on_disk(results)

    def sorted_on_disk(self, results: Iterator[tuple[int, Any]]) -> Iterator[Any]:
        """Yield records of one kind in the order of the numbers they come with, no two of which are equal."""
        kind: type | None = None
        with self._on_disk():
            self._base.execute("BEGIN")
            for place, record in results:
                kind = type(record)
                self._base.execute("INSERT INTO results VALUES (?, ?)", (place, json.dumps(vars(record))))
            self._base.execute("COMMIT")
            for (line,) in self._base.execute("SELECT line FROM results ORDER BY place"):
                yield kind(**json.loads(line))  # type: ignore[misc]


def _noted(kind: type, path: str, group: str) -> Iterator[tuple[int, ...]]:
    for place, (number, start, line) in enumerate(iter_lines(path)):
        where = f"{path}:{number}"
        record: Any = parse_record(kind, parse_line(line, where), where)
        yield place, number, hash_of(getattr(record, group)), hash_of(record.id), start, len(line), crc32(line)
