"""How verifiers are asked and their verdicts read, by hand."""

from typing import Any

import pytest

from espalier.data.jsonl import write_records
from espalier.data.records import AnnotatedSolution, BadInput, Problem
from espalier.data.solutions_to_verify import Question, Solution, questions_about, read_solutions, with_task_truth
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.data.verification import VerifierFormat

SOLUTION = VerifierFormat("solution", "Is the solution right (Yes/No)?", "Let us check.")
STEP = VerifierFormat("step", "Right so far (Yes/No)?", "Let us check.")
Q = SOLUTION.question


def test_a_direct_verdict_stands_behind_the_question_and_one_with_a_rationale_behind_both() -> None:
    steps = ["2 + 2 = 4\n", "#### 4\n"]
    assert SOLUTION.ask("How many?\n", steps, has_rationale=False) == f"How many?\n2 + 2 = 4\n#### 4\n{Q}"
    assert SOLUTION.ask("How many?\n", steps, has_rationale=True) == "How many?\n2 + 2 = 4\n#### 4\nLet us check.\n"
    assert SOLUTION.answer(True) == " Yes"
    assert SOLUTION.answer(False, "2 + 2 is 5.\n") == f"2 + 2 is 5.\n{Q} No"


@pytest.mark.parametrize(
    ("text", "is_yes", "before"),
    [
        (f"It is.\n{Q} Yes", True, f"It is.\n{Q}"),
        (f"It is.\n{Q} No.", False, f"It is.\n{Q}"),
        (f"It is.\n{Q} Yes**", True, f"It is.\n{Q}"),  # the marks close behind the verdict
        (f"It is.\n**{Q} No**", False, f"It is.\n**{Q}"),
        (f"It is.\n{Q} **Yes**", True, f"It is.\n{Q} **"),  # they open between both: read behind them
        (f"It is.\n**{Q}** No\n", False, f"It is.\n**{Q}**"),
        (f"It is.\n{Q}\nYes", True, f"It is.\n{Q}\n"),
        (f"It is.\n{Q}Yes", True, f"It is.\n{Q}"),
        (f"{Q} Yes\nNo: 2 + 2 is 4.\n{Q} No", False, f"{Q} Yes\nNo: 2 + 2 is 4.\n{Q}"),  # the last one counts
    ],
)
def test_the_verdict_is_the_word_behind_the_last_question(text: str, is_yes: bool, before: str) -> None:
    verdict = SOLUTION.read(text)
    assert verdict is not None
    assert (verdict.is_yes, verdict.before) == (is_yes, before)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Yes",  # of which question?
        Q,  # "(Yes/No)" in it is no verdict
        f"{Q} Not",
        f"{Q} Yesterday",
        f"{Q} Yes/No",
        f"{Q} Maybe. Yes",
        f"{Q} No. Yes, I am sure.",
        f"{Q} No doubt: it is right.",
        f"{Q}\n\nNo error was found, so Yes.",
        f"{Q} yes",  # not one of the spellings
        f"{Q} Yes\nNo, once more: {Q}",  # it began anew and was not finished
    ],
)
def test_without_a_word_behind_the_last_question_there_is_no_verdict(text: str) -> None:
    assert SOLUTION.read(text) is None


def test_what_was_written_is_read_back() -> None:
    for is_yes in (True, False):
        verdict = SOLUTION.read(SOLUTION.answer(is_yes, "a\nb"))
        assert verdict is not None
        assert (verdict.is_yes, verdict.rationale) == (is_yes, "a\nb")
        assert not SOLUTION.asks_twice(verdict)
    twice = SOLUTION.read(f"{Q} Yes\n{Q} No")
    assert twice is not None
    assert SOLUTION.asks_twice(twice)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"unit": "word"}, "verifier.unit"),
        ({"question": " "}, "verifier.question is empty"),
        ({"question": "Right? "}, "white space"),
        ({"yes": ["Yes"], "no": [" Yes"]}, "none the same"),
        ({"no": []}, "must hold words"),
    ],
)
def test_a_format_that_cannot_work_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said.replace("(", "\\(")):
        VerifierFormat(**{"unit": "solution", "question": "Right?", "request": "Check.", **settings})


def test_a_question_about_steps_shows_the_solution_up_to_each() -> None:
    row = Solution("p/0", "p", "How many?\n", ["a\n", "b\n"], False, [True, False])
    asked = questions_about([row], STEP)
    assert [(one.id, one.steps, one.is_right) for one in asked] == [
        ("p/0#1", ["a\n"], True),
        ("p/0#2", ["a\n", "b\n"], False),
    ]
    assert questions_about([row], SOLUTION) == [Question("p/0", row, 2, False)]


def test_a_labelled_solution_is_right_up_to_its_first_error(tmp_path: Any) -> None:
    path = str(tmp_path / "labelled.jsonl")
    info = {"separator": "\n\n"}
    rows = [
        AnnotatedSolution("a", "a", "Q?", ["x", "y", "z"], [None, None, None], 1, True, info=info),
        AnnotatedSolution("b", "b", "Q?", ["x", "y"], [1.0, None], None, True, info=info),
    ]
    write_records(path, rows)
    first, second = read_solutions(path, "labelled")
    assert (first.is_right, first.steps_right) == (False, [True, False, False])  # a right answer does not help
    assert (second.is_right, second.steps_right) == (True, [True, None])
    assert SOLUTION.ask(first.prompt, first.steps, has_rationale=False) == f"Q?\nx\n\ny\n\nz\n{Q}"
    with pytest.raises(BadInput, match="kind must be"):
        read_solutions(path, "labels")


def test_the_task_says_which_steps_are_right() -> None:
    task = WordArithmetic(num_train=1)
    problem = Problem("p", "Mia has 4 pens. Mia doubles the pens. Mia buys 1 more. How many pens now?", "9",
                      {"start": 4, "operations": [["doubles", 0], ["buys", 1]]})  # fmt: skip

    class OneProblem:
        def problems(self, split: str) -> list[Problem]:
            return [problem]

        position, split_steps = task.position, task.split_steps

    steps = ["doubles: 4 + 2 = 6\n", "buys: 6 + 1 = 7\n", "#### 7"]
    row = Solution("p/0", "p", problem.question + "\n", steps, False, [None] * 3, gold="9")
    assert with_task_truth([row], OneProblem(), "train")[0].steps_right == [False, False, False]
    good = Solution("p/1", "p", problem.question + "\n", ["doubles: 4 * 2 = 8\n"], False, [None], gold="9")
    assert with_task_truth([good], OneProblem(), "train")[0].steps_right == [True]
    whole = Solution("p/2", "p", problem.question + "\n", ["doubles: 4 * ", "2 = 8\n"], False, [None] * 2, gold="9")
    with pytest.raises(BadInput, match="'p/2' is not cut into steps as the task cuts it"):
        with_task_truth([whole], OneProblem(), "train")
    with pytest.raises(BadInput, match="answers no problem"):
        with_task_truth([Solution("q/0", "q", "?", [], False, [])], OneProblem(), "train")
    with pytest.raises(BadInput, match="nobody knows"):
        with_task_truth([row], None, "train")
