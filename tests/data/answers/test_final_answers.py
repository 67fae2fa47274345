"""Where the answer behind a phrase, or behind `####`, begins and ends."""

import pytest

from espalier.data.answers.final_answer import final_answer
from espalier.data.answers.grading import grade_answer
from espalier.data.verifiers.verify import Check, verify, write_checks


def is_right(kind: str, prediction: str, gold: str) -> bool:
    return grade_answer(prediction=prediction, gold=gold, kind=kind).is_correct


# --- periods within names, adverbs ------------------------------------------------------------------------------

NAMES = [
    "J. K. Rowling", "J. R. R. Tolkien", "St. Louis", "Dr. Seuss", "Washington, D.C.", "U.S. Virgin Islands",
    "Ulysses S. Grant", "Mount St. Helens", "Mr. & Mrs. Smith", "Vol. 2", "Brown v. Board of Education",
    "Justice League", "Just Dance", "Thusnelda Segestes", "J. Edgar Hoover", "3.5 million",
    "Now That I Have You, I Can Fly", "Martin Luther King Jr. Day",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_name_with_periods_is_read_in_full(name: str) -> None:
    for form in ("The answer is {}.", "Answer: {}\nConfidence: 60%", "So the final answer is: {}", "**Answer:** {}"):
        assert is_right("short_answer", form.format(name), name)
        assert not is_right("short_answer", form.format(name), name.split()[-1])


def test_wrong_names_with_one_initial_are_different_answers() -> None:
    names = ("J. K. Rowling", "J. R. R. Tolkien", "J. D. Salinger")
    answers = [
        grade_answer(prediction=f"The answer is {name}.", gold="Poe", kind="short_answer").answer for name in names
    ]
    assert answers == list(names)


@pytest.mark.parametrize(("response", "answer"), [
    ("The answer is 5 ft. Adding more is wrong.", "5 ft"), ("The answer is B. Dogs bark.", "B"),
    ("The answer is 5. Then we stop.", "5"), ("The answer is case A. Then B.", "case A"),
    ("The answer is Washington, D.C. The rest is wrong.", "Washington, D.C"),
    ("The answer is 3 V. Ohm says so.", "3 V"),
    ("The answer is Option B. Dogs bark.", "Option B"), ("The answer is just 5.", "5"),
    ("The answer is 3.5. Good.", "3.5"),
])  # fmt: skip
def test_a_sentence_ends_the_answer(response: str, answer: str) -> None:
    assert final_answer(response).text == answer


def test_a_name_before_the_number_is_passed_over() -> None:
    for kind in ("number", "response_number"):
        assert is_right(kind, "Final answer: Mr. Smith earns $1,200.", "1200")
        assert not is_right(kind, "Final answer: Mr. Smith earns $1,200 or $300.", "1200")


# --- signs in words and dashes ----------------------------------------------------------------------------------

NEGATIVE = [
    "The answer is –5.", "The answer is —5.", "The answer is −5.", "The answer is − 5.", "The answer is minus 5.",
    "The answer is negative 5.", "The answer is negative $5.", "So x = –5", "So x = − 5", "minus 5", "negative 5",
    "The total is negative 5 dollars.", "**Answer:** minus 5",
    "The answer is $–5$.",
]  # fmt: skip
POSITIVE = [
    "The result, 7 minus 2, is 5.", "It is 10 – 5", "There are 3–5", "There are 3 – 5", "10 − 5", "The eggs minus 5",
    "pages 4—5", "It is $3$–$5$", "a non-negative 5", "The answer — 5.", "It was 9 minus 5",
]  # fmt: skip


@pytest.mark.parametrize("response", NEGATIVE)
def test_a_minus_is_read_as_a_dash_and_as_a_word(response: str) -> None:
    for kind in ("number", "response_number"):
        assert is_right(kind, response, "-5")
        assert not is_right(kind, response, "5")


@pytest.mark.parametrize("response", POSITIVE)
def test_a_range_and_a_difference_hold_no_negative_number(response: str) -> None:
    for kind in ("number", "response_number"):
        assert not is_right(kind, response, "-5")


def test_the_verifier_of_the_last_number_reads_the_sign() -> None:
    for text in ("The loss is minus 5", "x = –5"):
        assert verify(text, write_checks([Check("gsm8k", "-5")]))[0].result.score == 1
        assert verify(text, write_checks([Check("gsm8k", "5")]))[0].result.score == 0


# --- headings ---------------------------------------------------------------------------------------------------

STEPS = "#### Step 1: Count\n6 eggs\n\n#### Step 2: Add\n6 + 12 = 18\n\n"


@pytest.mark.parametrize("response", [
    STEPS + "The answer is 18.", STEPS + "#### Final Answer\n18", STEPS + "#### 18", STEPS + "##### Answer\n18",
    STEPS + "#### **Final Answer:**\n\nThe final answer is 18.", STEPS, "#### 2. Add\n6 + 12 = 18",
    "#### 18\n\nI hope the answer is correct.", "#### 18\n", "#### Find 2 numbers\nThe answer is 18",
    "#### 18 eggs", "#### $18$\nDone.", "#### Conclusion\nThe answer is 18", "#### 2\nNo, the answer is 18.",
])  # fmt: skip
def test_a_heading_is_no_final_answer(response: str) -> None:
    for gold, right in (("18", True), ("2", False), ("12", False)):
        assert is_right("response_number", response, gold) is right
    if "answer" in response.lower() or "#### 18" in response:
        assert is_right("response_math", response, "18")
    for wrong in ("1", "2", "6"):
        assert not is_right("response_math", response, wrong)


def test_a_word_behind_the_last_marker_is_an_answer_where_nothing_follows_it() -> None:
    assert is_right("response_math", "So it is so.\n#### Yes", "yes")
    assert not is_right("response_math", "#### Yes\nBut let us see: no.", "yes")


# --- long reasoning ---------------------------------------------------------------------------------------------

THOUGHT = "So 2 + 3 = 5. " * 4000


def test_a_long_thought_that_was_closed_is_valid_and_one_left_open_is_no_answer() -> None:
    closed, left_open = f"<think>{THOUGHT}</think>The answer is 5.", f"<think>{THOUGHT}So the answer is 5."
    assert is_right("think_format", closed, "")
    assert not is_right("think_format", left_open, "")
    assert not is_right("think_format", f"<think>{THOUGHT}</think><think>{THOUGHT}</think>5", "")
    for kind, gold in (("response_math", "5"), ("short_answer", "5"), ("response_number", "5")):
        assert is_right(kind, closed, gold)
        assert not is_right(kind, left_open, gold)
    assert not is_right("choice", f"<think>{THOUGHT}The answer is B", "B")
    assert not is_right("boolean3", f"<think>{THOUGHT}The answer is True", "True")
    assert is_right("response_math", THOUGHT + "The answer is 6.", "6")
    assert is_right("marked_number", f"{THOUGHT}\n#### 5", "5")
