"""Rows that name their verifiers become problems, or a line that says what is wrong with them."""

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from espalier.data.records import BadInput
from espalier.data.sources import Row
from espalier.data.tasks.gold_check import check_golds
from espalier.data.tasks.problem_file import ProblemFile
from espalier.data.tasks.verifiable import VerifiableProblems, read_checks, read_question
from espalier.data.verifiers.verify import Check, write_checks

USER = {"role": "user", "content": "1 + 1?"}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_each_form_of_a_row_becomes_a_problem(tmp_path: Path) -> None:
    one = [{"name": "gsm8k", "ground_truth": "2"}]
    path = write(
        tmp_path / "train.jsonl",
        {"question": "1 + 1?", "verifiers": one},
        {"prompt": "1 + 1?", "verifiers": json.dumps(one)},
        {"messages": [USER, {"role": "assistant", "content": "2"}], "dataset": "GSM8K", "ground_truth": "2"},
        {"prompt": [USER], "dataset": ["gsm8k"], "ground_truth": ["2"]},
    )
    problems = VerifiableProblems(str(path)).problems("train")
    assert {problem.question for problem in problems} == {"1 + 1?"}
    assert {problem.gold for problem in problems} == {write_checks([Check("gsm8k", "2")])}
    assert [problem.id for problem in problems] == [f"verifiable-train-{k}" for k in range(4)]
    assert problems[0].info == {"subject": "gsm8k"}


def test_a_row_with_several_verifiers_keeps_their_order_and_weights() -> None:
    row = Row("f", 1, {"dataset": ["math", "max_length"], "ground_truth": ["2", 40]})
    assert read_checks(row) == [Check("math", "2"), Check("max_length", 40)]
    weighted = {"verifiers": [{"name": "math", "ground_truth": "2", "weight": 0.5}]}
    assert read_checks(Row("f", 1, weighted)) == [Check("math", "2", 0.5)]


def test_one_verifier_for_all_rows_and_names_that_are_renamed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"id": "a", "question": "?", "answer": "2"},
                 {"id": "b", "question": "?", "dataset": "old", "ground_truth": "3"})  # fmt: skip
    task = VerifiableProblems(str(path), verifier="gsm8k", rename={"old": "flan"})
    first, second = task.problems("train")
    assert (first.id, json.loads(first.gold)[0]["name"], json.loads(second.gold)[0]["name"]) == ("a", "gsm8k", "flan")
    assert task.grade(first.gold, "it is 2").is_correct
    assert not task.grade("", "it is 2").is_correct


def test_a_name_to_rename_is_found_in_any_case_and_one_that_no_row_has_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.jsonl", {"question": "?", "dataset": "IFEval_Old", "ground_truth": "3"})
    task = VerifiableProblems(str(path), rename={"IFEval_Old": "flan", "gsm8k_zs": "gsm8k"})
    (problem,) = task.problems("train")
    assert json.loads(problem.gold)[0]["name"] == "flan"
    assert "task.rename names verifiers that no row has: gsm8k_zs (rows have ifeval_old)" in caplog.text


def test_a_parquet_file_is_read_as_the_same_rows(tmp_path: Path) -> None:
    rows = [{"messages": [USER], "dataset": "gsm8k", "ground_truth": "2"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    write(tmp_path / "rows.jsonl", *rows)
    of_table = VerifiableProblems(str(tmp_path)).problems("train")
    assert of_table == VerifiableProblems(str(tmp_path / "rows.jsonl")).problems("train")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(BadInput, match="no Parquet file that can be read"):
        VerifiableProblems(str(tmp_path / "bad.parquet")).problems("train")


def test_problems_that_were_written_out_are_read_by_both_tasks(tmp_path: Path) -> None:
    gold = write_checks([Check("gsm8k", "2"), Check("format", "")])
    path = write(tmp_path / "a.jsonl", {"id": "x", "question": "?", "gold": gold})
    (one,), (two,) = (
        VerifiableProblems(str(path)).problems("train"),
        ProblemFile(str(path), kind="verifiers").problems("train"),
    )
    assert one.gold == two.gold == gold
    assert one.id == two.id == "x"


@pytest.mark.parametrize(("row", "message"), [
    ({"question": "?", "dataset": "gsm9k", "ground_truth": "1"}, "a.jsonl:2: there is no verifier 'gsm9k'"),
    ({"question": "?", "dataset": ["gsm8k", "math"], "ground_truth": "1"},
     "dataset has 2 names and ground_truth 1 values"),
    ({"question": "?", "ground_truth": "1"}, "the row names no verifier"),
    ({"question": "?", "verifiers": []}, "verifiers must be a list of at least one"),
    ({"question": "?", "verifiers": [{"name": "math"}]}, "verifier math: the ground truth must be a text"),
    ({"dataset": "gsm8k", "ground_truth": "1"}, "the row asks nothing"),
    ({"messages": [USER, {"role": "assistant", "content": "."}, USER], "dataset": "gsm8k", "ground_truth": "1"},
     "has the turns user, assistant, user: one of the user is read"),
    ({"id": "0", "question": "?", "dataset": "gsm8k", "ground_truth": "1"}, "the id '0' is that of another row"),
])  # fmt: skip
def test_a_row_that_cannot_be_verified_ends_the_program_in_one_line(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / "a.jsonl", {"id": "0", "question": "?", "dataset": "gsm8k", "ground_truth": "1"}, row)
    with pytest.raises(BadInput, match=message):
        VerifiableProblems(str(path)).problems("train")


def test_rows_that_no_text_can_answer_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "a.jsonl", {"question": "?", "dataset": "max_length", "ground_truth": 8})
    with caplog.at_level(logging.WARNING):
        VerifiableProblems(str(path)).problems("train")
    assert "1 of 1 rows have no verifier of a weight above 0 that judges a text" in caplog.text


def test_the_turn_of_the_user_is_the_question() -> None:
    assert read_question(Row("f", 1, {"messages": [USER]})) == "1 + 1?"


def test_the_doctor_tries_the_golds_of_single_answer_verifiers(tmp_path: Path) -> None:
    names = ["gsm8k", "math", "strict_math", "flan", "string_matcher", "puzzle", "string_f1"]
    rows = [{"question": "?", "dataset": name, "ground_truth": "12"} for name in names]
    more = {"question": "?", "dataset": "ifeval", "ground_truth": {"func_name": "validate_no_commas"}}
    task = VerifiableProblems(str(write(tmp_path / "a.jsonl", *rows, more)))
    found = check_golds(task, task.problems("train"))
    assert (found.labelled, found.accepted, found.rejected, found.untried, found.unlabelled) == (7, 7, 7, 1, 0)
    assert found.is_sound
    assert "1 rows have verifiers that no gold answers" in found.line
