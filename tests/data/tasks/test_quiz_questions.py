"""SciQ, BioASQ and Jeopardy in their published layouts, on invented rows."""

import json
from pathlib import Path

import pytest

from espalier.data.records import BadInput
from espalier.data.tasks.layouts import tasks_that_take
from espalier.data.tasks.quiz_questions import BioASQ, Jeopardy, SciQ, accepted_answers

SCIQ = [{"question": "What do plants take in?", "distractor1": "sand", "distractor2": "gold", "distractor3": "milk",
         "correct_answer": "light", "support": "Plants take in light."}]  # fmt: skip
BIOASQ = {"questions": [
    {"id": "b1", "type": "factoid", "body": "Which gene is it?", "exact_answer": [["ABC1", "A1"], ["B2"]]},
    {"id": "b2", "type": "yesno", "body": "Is it?", "exact_answer": "yes"},
    {"id": "b3", "type": "factoid", "body": "Which drug is it?", "exact_answer": ["X", "X"]},
]}  # fmt: skip
JEOPARDY = [{"category": "RIVERS", "air_date": "2000-01-01", "question": "'It flows through Cairo'", "value": "$200",
             "answer": "the Nile (or the Blue Nile)", "round": "Jeopardy!", "show_number": "1"}]  # fmt: skip


def test_sciq_is_read_without_its_options(tmp_path: Path) -> None:
    (tmp_path / "valid.json").write_text(json.dumps(SCIQ))
    (problem,) = SciQ(str(tmp_path)).problems("dev")
    assert (problem.question, problem.gold, problem.options) == ("What do plants take in?", ["light"], [])
    assert problem.info["incorrect_answers"] == ["sand", "gold", "milk"]


def test_bioasq_reads_factoids_with_all_their_names(tmp_path: Path) -> None:
    (tmp_path / "training12b_new.json").write_text(json.dumps(BIOASQ))
    first, second = BioASQ(str(tmp_path)).problems("train")
    assert (first.id, first.gold) == ("bioasq-train-b1", ["ABC1", "A1", "B2"])
    assert second.gold == ["X"]
    (tmp_path / "training12b_new.json").write_text(
        json.dumps({"questions": [{**BIOASQ["questions"][0], "exact_answer": []}]})
    )
    with pytest.raises(BadInput, match="exact_answer"):
        BioASQ(str(tmp_path)).problems("train")


def test_jeopardy_clues_lose_their_apostrophes_and_answers_their_brackets(tmp_path: Path) -> None:
    (tmp_path / "JEOPARDY_QUESTIONS1.json").write_text(json.dumps(JEOPARDY))
    (problem,) = Jeopardy(str(tmp_path)).problems("test")
    assert problem.question == "It flows through Cairo"
    assert problem.gold == ["the Nile", "the Blue Nile"]
    assert problem.info["subject"] == "RIVERS"
    assert accepted_answers("(John) Keats") == ["Keats", "John Keats"]
    assert Jeopardy().grade(problem.gold, "blue nile").is_correct


@pytest.mark.parametrize(("name", "rows"), [("sciq", SCIQ), ("bioasq", BIOASQ), ("jeopardy", JEOPARDY)])
def test_each_layout_is_recognised(tmp_path: Path, name: str, rows: object) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    assert name in tasks_that_take(tmp_path / "rows.json")
