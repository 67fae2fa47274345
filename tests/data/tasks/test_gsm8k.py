"""The GSM8K task on invented rows in the published layout, and on the published file where it is there."""

import json
from pathlib import Path

import pytest

from espalier.data.records import BadInput
from espalier.data.tasks.gsm8k import GSM8K

ROWS = [
    {"question": "A cart has 4 wheels. How many wheels have 3 carts?", "answer": "It is 4*3=<<4*3=12>>12.\n#### 12"},
    {
        "question": "Ida owes 1,250 and pays 2,500. What is left?",
        "answer": "1250-2500=<<1250-2500=-1250>>-1,250\n#### -1,250",
    },
]


def write_rows(folder: Path, rows: list[dict[str, str]]) -> GSM8K:
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return GSM8K(str(folder))


def test_golds_lose_their_commas_and_keep_their_sign(tmp_path: Path) -> None:
    problems = write_rows(tmp_path, ROWS).problems("train")
    assert [problem.gold for problem in problems] == ["12", "-1250"]
    assert [problem.id for problem in problems] == ["gsm8k-train-0", "gsm8k-train-1"]


def test_demonstrations_have_no_calculator_notes_and_are_graded_right(tmp_path: Path) -> None:
    task = write_rows(tmp_path, ROWS)
    demonstrations = task.demonstrations("train")
    assert demonstrations[0].completion == "It is 4*3=12.\n#### 12"
    golds = [problem.gold for problem in task.problems("train")]
    assert all(task.grade(g, d.completion).is_correct for g, d in zip(golds, demonstrations, strict=True))


def test_a_row_without_a_marked_number_is_named(tmp_path: Path) -> None:
    task = write_rows(tmp_path, [*ROWS, {"question": "q", "answer": "no number here"}])
    with pytest.raises(BadInput, match=r"train\.jsonl:3: the answer has no"):
        task.problems("train")


def test_a_missing_folder_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"set task\.path=FOLDER"):
        GSM8K(str(tmp_path / "nowhere")).problems("train")


def test_notes_are_kept_on_purpose(tmp_path: Path) -> None:
    write_rows(tmp_path, ROWS)
    kept = GSM8K(str(tmp_path), keep_notes=True).demonstrations("train")[0]
    assert kept.completion == "It is 4*3=<<4*3=12>>12.\n#### 12"


def test_the_socratic_variant_has_files_and_steps_of_its_own(tmp_path: Path) -> None:
    row = {"question": "q?", "answer": "How many? ** It is 2*3=<<2*3=6>>6.\nAnd then? ** 6+1=<<6+1=7>>7\n#### 7"}
    (tmp_path / "train_socratic.jsonl").write_text(json.dumps(row) + "\n")
    task = GSM8K(str(tmp_path), variant="socratic")
    assert task.problems("train")[0].gold == "7"
    assert task.demonstrations("train")[0].completion == "How many? ** It is 2*3=6.\nAnd then? ** 6+1=7\n#### 7"
    with pytest.raises(BadInput, match=r"none of train\.jsonl"):
        GSM8K(str(tmp_path)).problems("train")
    with pytest.raises(BadInput, match=r"task\.variant must be main or socratic"):
        GSM8K(str(tmp_path), variant="main_socratic")


def test_every_published_training_row_is_read_and_graded_right(datasets_dir: Path) -> None:
    task = GSM8K(str(datasets_dir / "gsm8k"))
    problems, demonstrations = task.problems("train"), task.demonstrations("train")
    assert len(problems) == 7473
    assert sum("<<" in d.completion for d in demonstrations) == 0
    assert all(task.grade(p.gold, d.completion).is_correct for p, d in zip(problems, demonstrations, strict=True))
