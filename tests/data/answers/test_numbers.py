"""Grading answers that are numbers after `####`: right ones, wrong ones, and what is no answer at all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.data.answers.numbers import extract_marked_number, grade_marked_number, is_equal_number


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("so it is 7\n#### 7", "7"),
        ("####7", "7"),
        ("####\t 7  ", "7"),
        ("#### 7.", "7"),
        ("#### 7.50", "7.50"),
        ("#### .5", ".5"),
        ("#### 0.5.", "0.5"),
        ("#### -7", "-7"),
        ("#### $7", "7"),
        ("#### -$7", "-7"),
        ("#### $-7", "-7"),
        ("#### $7$", "7"),
        ("#### 7%", "7"),
        ("#### 7 %.", "7"),
        ("#### 1,234,567.8", "1234567.8"),
        ("#### 1,080", "1080"),
        ("#### 5\nwait\n#### 7", "7"),
        ("#### 7\nand so on", "7"),
        ("#### 7\r\n", "7"),
        ("#### 007", "007"),
    ],
)
def test_the_number_after_the_last_marker_is_the_answer(response: str, answer: str) -> None:
    assert extract_marked_number(response) == answer


@pytest.mark.parametrize(
    "response",
    [
        "",
        "the answer is 7",
        "### 7",
        "####",
        "####\n7",
        "#### 7\n####",
        "#### 7\n#### seven",
        "#### 12 or 13",
        "#### 12, 13",
        "#### 1,2",
        "#### 12,",
        "#### 1,0800",
        "#### 1$2",
        "#### 12 apples",
        "#### 7 (I think)",
        "#### = 7",
        "#### 3 + 4",
        "#### 7/2",
        "#### 1e3",
        "#### 1.2.3",
        "#### --7",
        "#### nan",
        "#### infinity",
        "##### 7",
    ],
)
def test_anything_but_one_number_is_no_answer(response: str) -> None:
    assert extract_marked_number(response) is None


@pytest.mark.parametrize(("one", "other"), [("7", "7.0"), ("7", "007"), ("-0", "0"), ("1,000", "1000"), (".5", "0.50")])
def test_equal_numbers_are_equal_however_written(one: str, other: str) -> None:
    assert is_equal_number(one, other)
    assert is_equal_number(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [("7", "-7"), ("7", "7.0001"), ("7", "70"), ("7", "0.07"), ("7", "seven"), ("", ""), ("nan", "nan")],
)
def test_other_numbers_and_no_numbers_are_not_equal(one: str, other: str) -> None:
    assert not is_equal_number(one, other)


def test_numbers_beyond_floats_are_compared_exactly() -> None:
    assert not is_equal_number("10000000000000000", "10000000000000001")
    assert not is_equal_number("9" * 5000, "9" * 4999 + "8")


def test_a_grade_says_what_was_read() -> None:
    grade = grade_marked_number("1080", "#### $1,080.")
    assert (grade.answer, grade.is_correct) == ("1080", True)
    grade = grade_marked_number("12", "#### 12 or 13")
    assert (grade.answer, grade.is_correct) == (None, False)
    grade = grade_marked_number("12", "#### 13")
    assert (grade.answer, grade.is_correct) == ("13", False)


@given(st.text() | st.text(alphabet="#0123456789,.$%- \n", max_size=40))
def test_no_response_breaks_the_grader(response: str) -> None:
    grade = grade_marked_number("7", response)
    assert grade.answer is not None or not grade.is_correct


@given(st.integers(-(10**12), 10**12))
def test_every_integer_is_right_with_and_without_commas(number: int) -> None:
    for written in (f"{number}", f"{number:,}", f"${number:,}.00"):
        assert grade_marked_number(str(number), f"#### {written}").is_correct
    assert not grade_marked_number(str(number), f"#### {number + 1}").is_correct
