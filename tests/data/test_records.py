"""Records on disk: round trips, refusals that name the place, torn tails, atomic writes."""

import json
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.data.jsonl import cut_torn_tail, iter_rows, read_records, to_line, write_json, write_records
from espalier.data.records import (
    AnnotatedSolution,
    BadInput,
    Completion,
    Demonstration,
    PreferencePair,
    Problem,
    SampledRollout,
    State,
    StepScores,
    StepValues,
    Trajectory,
    parse_record,
)

TRAJECTORY = Trajectory(
    "p/0", "p", "2 + 3?\n", "2 + 3 = 5\n#### 5", ["2 + 3 = 5\n", "#### 5"], [7, 8], [1, 2, 3], [2, 3],
    "stop", "5", "5", True,
)  # fmt: skip
RECORDS = [
    Problem("p", "2 + 3?", "5", {"start": 2, "operations": [["buys", 3]]}),
    Problem("q", "Who?", ["Ann", "A. B."], {}, "A passage.", ["x", "y"]),
    AnnotatedSolution("p/0", "p", "2 + 3?", ["2 + 3 = 6\n", "6"], [0.0, None], 0, False, "5", {"rating": -1}),
    Demonstration("p/teacher-0", "2 + 3?\n", "#### 5"),
    TRAJECTORY,
    replace(TRAJECTORY, id="p/1", answer=None, is_correct=False),
    replace(TRAJECTORY, id="p/2", logprobs=[-0.5, 0, -1.25]),
    State("p/0#1", "p", "p/0", 1, "2 + 3?\n", "2 + 3 = 5\n", [7, 8], [1, 2], "5"),
    Completion("p/0#1/0", "p/0#1", "p", "#### 5", [3], "stop", "5", True),
    StepValues("p/0", "p", "2 + 3?\n", ["a\n", "b"], [7], [1, 2], [1, 2], [0.25, 1.0], [1, 1], [4, 1], True),
    StepScores("p/0", "p", [0.25, 1]),
    SampledRollout(
        "p/0",
        "p",
        1,
        0,
        "2 + 3?\n",
        ["a\n", "b"],
        [0.5, 1.0],
        [0.1, -0.1],
        [],
        1.0,
        {"outcome": 1.0},
        2,
        "stop",
        "5",
        "5",
        True,
        reward_answers={"5": 0.75},
    ),
    PreferencePair("p/0>p/1", "p", "step", "2 + 3?\n", "a", "b", [7], [1], [2], 1.0, 0.0),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: f"{type(record).__name__}-{record.id}")
def test_every_kind_survives_the_round_trip(record: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert write_records(path, [record]) == 1
    assert read_records(type(record), path) == [record]


def test_every_kind_of_the_module_is_among_the_round_trips() -> None:
    from espalier.data import records

    kinds = {
        kind for kind in vars(records).values() if isinstance(kind, type) and hasattr(kind, "__dataclass_fields__")
    }
    assert {type(record) for record in RECORDS} == kinds


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: f"{type(record).__name__}-{record.id}")
def test_every_required_field_is_missed_by_its_name(record: Any) -> None:
    row = asdict(record)
    optional = {f.name for f in fields(record) if f.default is not MISSING or f.default_factory is not MISSING}
    for name in row.keys() - optional:
        short = {key: value for key, value in row.items() if key != name}
        with pytest.raises(BadInput, match=f"^f:1: {type(record).__name__} lacks the field '{name}': correct"):
            parse_record(type(record), short, "f:1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"corect": True}, "Trajectory has no field 'corect'"),
        ({"gold": 42}, "gold must be .*str.*, got '42'"),
        ({"gold": None}, "gold must be .*str.*, got 'None'"),
        ({"logprobs": [-1.0, "0", -2.0]}, "logprobs must be"),
        ({"logprobs": [-1.0, True, -2.0]}, "logprobs must be"),
        ({"is_correct": 1}, "is_correct must be bool, got '1'"),
        ({"is_correct": "true"}, "is_correct must be bool, got 'true'"),
        ({"answer": 5}, r"answer must be str \| None, got '5'"),
        ({"steps": "2 + 3 = 5"}, r"steps must be list\[str\], got"),
        ({"steps": [1]}, r"steps must be list\[str\], got"),
        ({"step_ends": [2.0, 3.0]}, r"step_ends must be list\[int\], got"),
        ({"step_ends": [True, 3]}, r"step_ends must be list\[int\], got"),
        ({"response_ids": {"0": 1}}, r"response_ids must be list\[int\], got"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_refused_with_file_line_and_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(to_line(TRAJECTORY) + "\n" + to_line({**asdict(TRAJECTORY), "id": "p/1", **changes}))
    with pytest.raises(BadInput, match=f"^{path}:3: {message}"):
        read_records(Trajectory, path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"id": "a"', "not a JSON object"),
        (b"{'id': 'a'}", "not a JSON object"),
        (b"\xff\xfe\x00", "not a JSON object"),
        (b"\x00\x00\x00\x00", "not a JSON object"),
        (b'{"id": "a\xc3"}', "not a JSON object"),
        (b"[" * 100_000, "not a JSON object"),
        (b'["a"]', "must be a JSON object, got list"),
        (b"null", "must be a JSON object, got NoneType"),
        (b'"text"', "must be a JSON object, got str"),
        (b'{"id": "p/0", "problem_id": "p", "scores": [NaN]}', "not a JSON object .*NaN"),
        (b'{"id": "p/0", "problem_id": "p", "scores": [-Infinity]}', "not a JSON object .*-Infinity"),
        (
            b'{"id": "p/0", "problem_id": "p", "id": "p/1", "scores": []}',
            "not a JSON object .*'id' stands twice",
        ),
    ],
    ids=range(12),
)
def test_a_line_that_is_not_an_object_is_refused_with_file_and_line(line: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "scores.jsonl"
    path.write_bytes(to_line(StepScores("p/9", "p", [1.0])).encode() + line + b"\n")
    with pytest.raises(BadInput, match=f"^{path}:2: .*{message}"):
        read_records(StepScores, path)


def test_a_score_that_is_not_a_number_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_records(tmp_path / "scores.jsonl", [StepScores("p/0", "p", [float("nan")])])


def test_a_byte_order_mark_is_not_part_of_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + to_line(TRAJECTORY).encode())
    assert read_records(Trajectory, path) == [TRAJECTORY]


def test_an_id_that_stands_twice_is_refused_with_both_places(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_records(path, [TRAJECTORY, replace(TRAJECTORY, id="p/1"), TRAJECTORY])
    with pytest.raises(BadInput, match=f"^{path}:3: id 'p/0' stands already at {path}:1"):
        read_records(Trajectory, path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"gone.jsonl: no such file"):
        read_records(Trajectory, tmp_path / "gone.jsonl")


def test_an_integer_is_a_float_and_a_missing_default_is_filled() -> None:
    assert parse_record(StepScores, {"id": "a", "problem_id": "p", "scores": [1, 0.5]}, "f:1").scores == [
        1,
        0.5,
    ]
    assert parse_record(Problem, {"id": "a", "question": "q", "gold": "1"}, "f:1").info == {}


@pytest.mark.parametrize(
    "text",
    [
        "a\u2028b\u2029c\x85d",
        "nul \0 inside",
        "lone \ud800 high",
        "lone \udfff low",
        "\r\n\x0b\x0c\x1c",
        "🙂é",
    ],
)
def test_any_text_survives_the_round_trip(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    record = Demonstration("d", text, text + "\n")
    write_records(path, [record])
    assert path.read_bytes().count(b"\n") == 1
    assert read_records(Demonstration, path) == [record]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.lists(st.text(), min_size=1, max_size=4))
def test_a_file_cut_at_any_byte_keeps_exactly_its_whole_lines(data: st.DataObject, texts: list[str]) -> None:
    import tempfile

    records = [Demonstration(str(number), text, "c") for number, text in enumerate(texts)]
    lines = [to_line(record).encode() for record in records]
    whole = b"".join(lines)
    cut = data.draw(st.integers(0, len(whole)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_bytes(whole[:cut])
        removed = cut_torn_tail(path)
        kept = path.read_bytes()
        assert kept == whole[: cut - removed]
        assert kept == b"".join(lines[: whole[:cut].count(b"\n")])
        assert read_records(Demonstration, path) == records[: kept.count(b"\n")]


def test_a_torn_tail_longer_than_a_block_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"{}\n" + b"x" * 200_000)
    assert cut_torn_tail(path) == 200_000
    assert path.read_bytes() == b"{}\n"


def test_a_file_that_is_all_torn_is_emptied(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"x" * 70_000)
    assert cut_torn_tail(path) == 70_000
    assert path.read_bytes() == b""


def test_an_exception_while_writing_leaves_nothing_behind(tmp_path: Path) -> None:
    def rows() -> Any:
        yield TRAJECTORY
        raise RuntimeError("the stage failed")

    with pytest.raises(RuntimeError, match="the stage failed"):
        write_records(tmp_path / "rows.jsonl", rows())
    assert list(tmp_path.iterdir()) == []


def test_an_exception_while_writing_leaves_the_old_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


def test_a_file_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"

    def rows() -> Any:
        for number in range(3):
            assert not path.exists()
            yield replace(TRAJECTORY, id=f"p/{number}")

    assert write_records(path, rows()) == 3
    assert len(read_records(Trajectory, path)) == 3


def test_folders_of_an_output_are_made(tmp_path: Path) -> None:
    write_records(tmp_path / "a" / "b" / "rows.jsonl", [TRAJECTORY])
    assert len(list(iter_rows(tmp_path / "a" / "b" / "rows.jsonl"))) == 1
