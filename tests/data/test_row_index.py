"""Rows by problem, wherever they stand, and an order that is kept."""

import json
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest

from espalier.data.jsonl import write_records
from espalier.data.records import BadInput, StepScores
from espalier.data.row_index import ProblemRows
from espalier.runtime.errors import exit_code_of

ROWS = [StepScores(f"p{n}/{k}", f"p{n}", [0.1 * k, n / 3]) for n in range(5) for k in range(3)]


def files(folder: Path, *parts: list[StepScores]) -> ProblemRows:
    rows = ProblemRows(folder / "out.jsonl")
    for number, part in enumerate(parts):
        write_records(folder / f"f{number}.jsonl", part)
        assert rows.add(StepScores, str(folder / f"f{number}.jsonl")) == len(part)
    return rows


def test_the_rows_of_a_problem_come_together_from_all_files_in_their_order(tmp_path: Path) -> None:
    mixed = random.Random(1).sample(ROWS, len(ROWS))
    other = [replace(row, id=f"{row.id}x") for row in mixed[::-1]] + [StepScores("q/0", "q", [])]
    rows = files(tmp_path, mixed, other)
    seen = []
    for problem in rows.problems():
        groups = [rows.rows(number, problem) for number in (0, 1)]
        (name,) = {row.problem_id for group in groups for row in group}
        seen.append(name)
        for group, part in zip(groups, (mixed, other), strict=True):
            assert group == [row for row in part if row.problem_id == name]
        assert [mixed[place] for place in rows.places(0, problem)] == groups[0]
    assert seen == list(dict.fromkeys(row.problem_id for row in [*mixed, *other]))
    assert not rows.stands_together
    rows.close()
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".rows"] == []


def test_records_are_found_by_their_ids_and_come_in_file_order(tmp_path: Path) -> None:
    mixed = random.Random(3).sample(ROWS, len(ROWS))
    write_records(tmp_path / "f.jsonl", mixed)
    with ProblemRows(tmp_path / "out.jsonl") as rows:
        rows.add(StepScores, str(tmp_path / "f.jsonl"), finds_ids=True)
        assert list(rows.in_order(0)) == mixed
        assert [rows.by_id(0, row.id) for row in ROWS] == ROWS
        assert rows.by_id(0, "p9/0") is None


@pytest.mark.parametrize("is_mixed", [False, True])
def test_what_is_made_of_problems_comes_in_the_order_of_the_first_file(is_mixed: bool, tmp_path: Path) -> None:
    part = random.Random(2).sample(ROWS, len(ROWS)) if is_mixed else ROWS
    rows = files(tmp_path, part)
    assert rows.stands_together == (not is_mixed)
    made = (one for problem in rows.problems()
            for one in zip(rows.places(0, problem), rows.rows(0, problem), strict=True))  # fmt: skip
    assert list(rows.in_file_order(made)) == part


def test_problems_come_in_the_order_of_their_ids_as_often_as_they_are_asked_for(tmp_path: Path) -> None:
    rows = files(tmp_path, ROWS[::-1], [StepScores("p/0", "p", [])])
    for _ in range(2):
        groups = [rows.rows(0, problem) or rows.rows(1, problem) for problem in rows.problems_by_id(str.encode)]
        assert [group[0].problem_id for group in groups] == ["p", "p0", "p1", "p2", "p3", "p4"]


def test_an_id_of_two_files_that_is_of_two_problems_is_found(tmp_path: Path) -> None:
    moved = replace(ROWS[4], problem_id="other")
    rows = files(tmp_path, ROWS, [*ROWS[:3], moved], ROWS)
    assert rows.elsewhere(0, 1) == (ROWS[4], moved)
    assert rows.elsewhere(0, 2) is None


def test_an_id_that_stands_twice_and_a_bad_row_are_named_with_their_places(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    lines = [json.dumps(asdict(row)) for row in [*ROWS[:4], ROWS[1]]]
    path.write_text("\n\n".join(lines) + "\n")
    with pytest.raises(BadInput, match=r"f.jsonl:9: id 'p0/1' stands already at .*f.jsonl:3: ids must be unique"):
        ProblemRows(tmp_path / "out").add(StepScores, str(path))
    path.write_text("\n".join([*lines[:2], '{"id": "a"}']) + "\n")
    with pytest.raises(BadInput, match=r"f.jsonl:3: StepScores lacks the field 'problem_id'"):
        ProblemRows(tmp_path / "out").add(StepScores, str(path))


@dataclass(frozen=True)
class ReplacesItsFile(StepScores):
    """Its last row is read when another program puts another file in the place of this one."""

    def __post_init__(self) -> None:
        path, other = Path(self.problem_id), Path(f"{self.problem_id}.new")
        if self.id == "last" and other.exists():
            other.replace(path)


def test_a_file_that_another_one_takes_the_place_of_while_it_is_read_is_refused(tmp_path: Path) -> None:
    """Rows of equal length would be found where those of the old file were, and nobody would know."""
    path = tmp_path / "f.jsonl"
    write_records(path, [StepScores(name, str(path), [0.1]) for name in ("a", "last")])
    write_records(f"{path}.new", [StepScores(name, str(path), [0.9]) for name in ("a", "last")])
    rows = ProblemRows(tmp_path / "out")
    rows.add(ReplacesItsFile, str(path))
    with pytest.raises(BadInput, match=r"f.jsonl: was written over while it was read: start again"):
        rows.rows(0, next(rows.problems()))


def test_rows_that_are_written_over_while_they_are_read_are_refused(tmp_path: Path) -> None:
    rows = files(tmp_path, ROWS)
    (problem, *_) = rows.problems()
    path = tmp_path / "f0.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    for text in ("".join([*lines[1:3], lines[0], *lines[3:]]), "x" * path.stat().st_size, "".join(lines[:1])):
        path.write_text(text)
        with pytest.raises(BadInput, match=r"f0.jsonl: was written over while it was read: start again"):
            rows.rows(0, problem)


def test_a_disk_that_fills_up_under_the_index_is_one_line(tmp_path: Path) -> None:
    many = [StepScores(f"p{n}/0", f"p{n}", []) for n in range(40_000)]
    write_records(tmp_path / "f.jsonl", many)
    rows = ProblemRows(tmp_path / "out.jsonl")
    with files_up_to(100_000), pytest.raises(OSError, match="No space left") as error:
        rows.add(StepScores, str(tmp_path / "f.jsonl"))
    assert exit_code_of(error.value) == 4


def test_a_disk_that_is_full_from_the_first_is_one_line_and_nothing_is_left(tmp_path: Path) -> None:
    with files_up_to(1_000), pytest.raises(OSError, match="No space left") as error:
        ProblemRows(tmp_path / "out.jsonl")
    assert exit_code_of(error.value) == 4
    assert list(tmp_path.iterdir()) == []


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
