"""The grader's self-test on a task's golds: sound for every task with its own kind, and not with another."""

from pathlib import Path
from typing import Any

import pytest

from espalier.data.answers.grade import Gold, Grade
from espalier.data.records import Problem
from espalier.data.tasks.gold_check import changed, check_golds
from espalier.data.tasks.problem_file import ProblemFile
from espalier.data.tasks.qa_world import QAWorld
from espalier.data.tasks.rule_logic import RuleLogic
from espalier.data.tasks.shopping_notes import ShoppingNotes
from espalier.data.tasks.word_arithmetic import WordArithmetic

GOLDS = {
    "marked_number": ["72", "1,080", "3.5", "-4"],
    "response_number": ["72", "1080", "0.5"],
    "response_math": ["\\frac{1}{2}", "(1,2)", "x^2+1", "[0,3)", "\\text{even}", "12", "1,2,3", "204_5"],
    "choice": ["A", "D", "B"],
    "boolean3": ["True", "False", "Unknown"],
    "short_answer": ["Paris", "the blue whale", "1969"],
}


def problem_file(kind: str, golds: list[str]) -> tuple[ProblemFile, list[Problem]]:
    """A task of that kind and problems with those golds; four options each where it is a choice."""
    options = ["one", "two", "three", "four"] if kind == "choice" else []
    problems = [Problem(f"p{i}", "why?", gold, options=options) for i, gold in enumerate(golds)]
    return ProblemFile("unused.jsonl", kind=kind), problems


@pytest.mark.parametrize("kind", GOLDS)
def test_golds_of_the_right_kind_are_all_known(kind: str) -> None:
    found = check_golds(*problem_file(kind, GOLDS[kind]))
    assert found.is_sound, found.line
    assert (found.labelled, found.accepted, found.rejected) == (len(GOLDS[kind]),) * 3


@pytest.mark.parametrize(
    ("kind", "golds", "known"),
    [
        ("choice", ["72", "1080"], 0),
        ("boolean3", ["A", "B"], 0),
        ("marked_number", ["12", "\\frac{1}{2}", "(1,2)"], 1),
        ("response_number", ["12", "B"], 1),
        ("response_math", ["12", ""], 1),
    ],
)
def test_a_kind_that_does_not_fit_the_golds_is_caught(kind: str, golds: list[str], known: int) -> None:
    found = check_golds(*problem_file(kind, golds))
    assert found.accepted == known
    if "" not in golds:
        assert not found.is_sound
        assert "first refused: p" in found.line
    else:
        assert found.unlabelled == 1


def test_a_letter_beyond_the_options_is_refused() -> None:
    found = check_golds(*problem_file("choice", ["A", "E"]))
    assert (found.accepted, found.is_sound) == (1, False)
    assert "first refused: p1: gold 'E'" in found.line


class AcceptsAll:
    """A grader that knows no wrong answer."""

    def grade(self, gold: Gold, response: str, num_options: int = 0) -> Grade:
        return Grade(response, True, "")


def test_a_grader_that_accepts_anything_is_caught() -> None:
    found = check_golds(AcceptsAll(), [Problem("p0", "why?", "12")])  # type: ignore[arg-type]
    assert (found.accepted, found.rejected, found.is_sound) == (1, 0, False)
    assert found.first_passed == "first passed: p0: '29' is right for gold '12'"
    task, problems = problem_file("think_format", ["12"])
    assert not check_golds(task, problems).is_sound


def test_without_a_gold_nothing_is_sound() -> None:
    found = check_golds(*problem_file("response_math", ["", ""]))
    assert not found.is_sound
    assert found.line == "none of 2 problems has a gold answer: nothing can be graded"


@pytest.mark.parametrize("task", [RuleLogic(), WordArithmetic(), QAWorld(), QAWorld(form="paragraph"), ShoppingNotes()])
def test_tasks_with_graders_of_their_own_are_sound(task: Any) -> None:
    found = check_golds(task, task.problems("dev"), 20)
    assert found.is_sound, found.line
    assert found.labelled == 20


def test_a_changed_answer_has_the_form_of_the_gold() -> None:
    assert [changed(gold, 4) for gold in ("D", "A", "12", "1/2", "True")] == ["A", "B", "29", "35/2", "False"]
    assert changed("x^2") == "x^2 + 17"


def test_the_published_sets_that_are_there_are_sound(datasets_dir: Path) -> None:
    from espalier.data.tasks.gsm8k import GSM8K
    from espalier.data.tasks.math import MATH

    for task in (GSM8K(str(datasets_dir)), MATH(str(datasets_dir))):
        found = check_golds(task, task.problems("train"), 40)
        assert found.is_sound, found.line
