"""Files of problems of one's own, in the layouts that such files have."""

import json
from pathlib import Path
from typing import Any

import pytest

from espalier.data.records import BadInput, Problem
from espalier.data.tasks.layouts import tasks_that_take
from espalier.data.tasks.problem_file import ProblemFile

PENS = "Ada has 2 pens and buys 3. How many?"


def read(folder: Path, *rows: dict[str, Any], kind: str = "response_math") -> list[Problem]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ProblemFile(str(path), kind=kind).problems("train")


@pytest.mark.parametrize(("row", "gold"), [
    ({"gold": "7"}, "7"),
    ({"gold": 7}, "7"),
    ({"gold": 7.5}, "7.5"),
    ({"answer": "7"}, "7"),
    ({"ground_truth": 7}, "7"),
    ({"answer": "3 + 4 = 7\n#### 7"}, "7"),
    ({"answer": ["7", "seven"]}, ["7", "seven"]),
    ({"gold": ""}, ""),
])  # fmt: skip
@pytest.mark.parametrize("column", ["question", "problem", "prompt"])
def test_a_row_asks_in_one_of_three_columns_and_answers_in_one_of_three(
    column: str, row: dict[str, Any], gold: str | list[str], tmp_path: Path
) -> None:
    (problem,) = read(tmp_path, {column: PENS, "id": "p-1", **row})
    assert problem == Problem("p-1", PENS, gold)


def test_rows_without_an_id_are_called_by_their_number_and_numbers_are_ids(tmp_path: Path) -> None:
    problems = read(tmp_path, *({"question": PENS, "gold": "5", **more} for more in ({}, {"id": 17}, {"id": ""})))
    assert [problem.id for problem in problems] == ["problem_file-train-0", "17", "problem_file-train-2"]


def test_columns_that_are_none_of_a_problem_s_are_named_once_and_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"problem": PENS, "answer": "5", "level": 1, "subject": "sums"}
    caplog.set_level("INFO")
    problems = read(tmp_path, row, row)
    assert [(problem.question, problem.gold, problem.info) for problem in problems] == [(PENS, "5", {})] * 2
    (line,) = [record.message for record in caplog.records if "not read" in record.message]
    assert line.startswith("problem_file/train: the columns level, subject are not read")


@pytest.mark.parametrize(("row", "message"), [
    ({"question": PENS, "gld": "5"}, "the row has no answer: it needs one of ground_truth, gold, answer"),
    ({"question": PENS, "gold": None}, "the row has no answer"),
    ({"question": PENS, "gold": {"value": 5}}, "the answer must be a text, a number or a list of texts"),
    ({"question": PENS, "gold": True}, "the answer must be a text, a number or a list of texts"),
    ({"question": 5, "gold": "5"}, "question must be a string, got 5"),
    ({"question": " ", "gold": "5"}, "question is empty"),
    ({"query": PENS, "gold": "5"}, "the row asks nothing: it needs one of question, prompt, problem"),
])  # fmt: skip
def test_a_row_of_no_problem_says_what_it_lacks_and_names_no_task_that_would_lose_its_answers(
    row: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        read(tmp_path, row)
    assert "choose task=" not in str(caught.value)
    assert "a line needs a question and its answer, or a prompt" in str(caught.value)


def test_one_s_own_file_is_a_published_set_s_where_that_reads_it(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"choose task=folio$"):
        read(tmp_path, {"premises": ["P."], "conclusion": "Q.", "label": "True"})
    path = tmp_path / "rows.jsonl"
    for row, names in (
        ({"question": PENS, "answer": "2 + 3 = 5\n#### 5"}, ["gsm8k"]),
        ({"question": PENS, "answer": "5"}, ["problem_file"]),
        ({"question": PENS, "id": "1"}, []),
    ):
        path.write_text(json.dumps(row) + "\n")
        assert tasks_that_take(path) == names
