"""Votes, best of n and pass@k: by hand, and against counting every subset."""

import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.data.records import Trajectory
from espalier.rewards import votes
from espalier.rewards.votes import (
    answer_classes,
    best_of,
    majority_answer,
    majority_vote,
    pass_at_k,
    sizes_up_to,
    vote_key,
    weighted_vote,
    winning_answer,
)
from espalier.rewards.votes_by_n import votes_by_n


def samples(*answers: str | None, gold: str = "7") -> list[Trajectory]:
    return [
        Trajectory(f"p/{k}", "p", "Q\n", "x", ["x"], [1], [2], [1], "stop", gold, answer,
                   answer is not None and vote_key(answer) == vote_key(gold))
        for k, answer in enumerate(answers)
    ]  # fmt: skip


# --- equal answers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [("7", "7.0"), ("7", "007"), ("7", "+7"), ("7", "7."), ("-.5", "-0.50"), ("1,250", "1250.0"), ("0", "-0"),
     ("1/2", "0.5"), ("\\frac{1}{2}", "2/4"), ("-\\dfrac{6}{3}", "-2"), ("red  fox", " red\nfox"), ("A", " A ")],
)  # fmt: skip
def test_equal_answers_are_one_vote(one: str, other: str) -> None:
    assert vote_key(one) == vote_key(other)
    assert hash(vote_key(one)) == hash(vote_key(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [("7", "7%"), ("7", "-7"), ("12", "1,2"), ("1/0", "2/0"), ("A", "a"), ("7", "x=7"), ("1e2", "100"),
     ("nan", "NaN"), ("inf", "Infinity"), ("", "0"), ("0.1", "0.10000000000000001"), ("٧", "7")],
)  # fmt: skip
def test_other_answers_are_not(one: str, other: str) -> None:
    assert vote_key(one) != vote_key(other)


@given(st.text())
def test_every_text_has_a_key(text: str) -> None:
    assert vote_key(text) == vote_key(f" {text}\n")


def test_a_very_long_number_is_a_text() -> None:
    assert vote_key("9" * 100_000) == "9" * 100_000


# --- answers that say the same ------------------------------------------------------------------------------


def classes(*answers: str) -> list[set[str]]:
    """The answers by class, in the order of their leaders' first sample."""
    rows = samples(*answers)
    leaders = answer_classes(rows).leaders
    found: dict[Any, set[str]] = {}
    for answer in answers:
        found.setdefault(leaders[vote_key(answer)], set()).add(answer)
    return list(found.values())


def test_equal_mathematics_votes_together() -> None:
    """Two of 8, three of 7 in three spellings; sums in two orders, which the symbolic pool compares."""
    rows = samples("8", "8", "x=7", "$7", "7.0")
    assert majority_answer(rows) == "7.0", "the leader is the most frequent, then the shortest"
    assert majority_vote(rows) == 1.0
    assert weighted_vote(rows, [0.4, 0.4, 0.3, 0.3, 0.3]) == 1.0
    assert weighted_vote(rows, [0.5, 0.5, 0.3, 0.3, 0.3]) == 0.0
    assert classes("\\frac12", "0.5", "50\\%") == [{"\\frac12", "0.5", "50\\%"}]
    assert classes("x+1", "1+x", "x+2") == [{"x+1", "1+x"}, {"x+2"}]


@pytest.mark.parametrize(
    "answers",
    [
        ("7", "7%"),
        ("A", "B"),
        ("A", "a"),
        ("red", "blue"),
        ("0.33", "1/3"),
        ("(1,2)", "[1,2]"),
        ("7", "7, 8"),
        ("", "7"),
    ],
)
def test_answers_that_say_something_else_vote_apart(answers: tuple[str, ...]) -> None:
    assert len(classes(*answers)) == len(answers)


def test_plain_numbers_and_words_are_never_asked_of_the_grader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(votes, "is_same_answer", lambda one, other: pytest.fail(f"{one} and {other} were compared"))
    votes._classes.cache_clear()
    assert len(classes("1", "2", "0.5", "1/2", "A", "B", "red", "1/3")) == 7


def test_nobody_is_drawn_into_a_class_by_another_member() -> None:
    """7 cm is 7, and 7 is 7 m: who leads decides. The most frequent leads; the others are compared with it alone."""
    leaders = answer_classes(samples("7 cm", "7 cm", "7", "8 m")).leaders
    assert leaders[Fraction(7)] == "7 cm"
    assert leaders["8 m"] == "8 m"


@settings(max_examples=60)
@given(st.permutations(["7 cm", "7 cm", "7", "7.0", "x=7", "8", "8 m", "A", "9", "y = 9"]))
def test_which_answers_vote_together_does_not_depend_on_their_order(answers: list[str]) -> None:
    assert sorted(map(sorted, classes(*answers))) == [
        ["7", "7 cm", "7.0", "x=7"], ["8", "8 m"], ["9", "y = 9"], ["A"]]  # fmt: skip
    assert majority_vote(samples(*answers)) == 1.0


def test_a_joined_answer_is_right_as_its_leader_is_graded() -> None:
    """`7 cm` was graded wrong twice, `7` right once: the answer that is given is `7 cm`."""
    rows = samples("7 cm", "7 cm", "7")
    assert (majority_answer(rows), majority_vote(rows)) == ("7 cm", 0.0)


def test_comparisons_are_bounded_and_what_is_left_apart_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 different formulas are 190 pairs. 16 are 120 of them, the 17th meets 8 leaders, the last three none."""
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(votes, "is_same_answer", lambda one, other: bool(asked.append((one, other))))
    votes._classes.cache_clear()
    found = answer_classes(samples(*[f"x^{k}" for k in range(10, 30)]))
    votes._classes.cache_clear()
    assert len(asked) == votes.MAX_COMPARISONS == 128
    assert found.num_apart == 4
    assert len(set(found.leaders.values())) == 20


# --- votes --------------------------------------------------------------------------------------------------


def test_answers_of_one_value_outvote_two_of_another() -> None:
    rows = samples("8", "8", "7", "7.0", "007")
    assert (majority_answer(rows), majority_vote(rows)) == ("7", 1.0)


@pytest.mark.parametrize("size", [1.0, 1e-10, 1e-250])
def test_how_small_scores_are_says_nothing_of_a_tie(size: float) -> None:
    """A product over 25 steps near 0.4 is about 1e-10."""
    rows = samples("8", "7", "7", "9")
    assert winning_answer(rows, [size, 0.9 * size, 0.9 * size, size]) == "7"
    assert winning_answer(rows, [size, 0.5 * size, 0.5 * size, size]) == "8"
    (shares,) = votes_by_n(rows, [[size, 0.9 * size, 0.9 * size, size]], [4])
    assert shares == [1.0]


def test_a_tie_of_merged_answers_goes_to_the_one_sampled_first() -> None:
    assert majority_answer(samples("8.0", "7", "7.0", "8")) == "8.0"
    assert majority_answer(samples(None, "7", "8")) == "7"
    assert majority_answer(samples(None, None)) is None


def test_a_majority_is_right_if_any_trajectory_of_that_value_was_graded_right() -> None:
    cut, whole = samples("7", "7.0")
    object.__setattr__(cut, "is_correct", False)
    assert majority_vote([cut, whole]) == 1.0


@pytest.mark.parametrize(
    ("answers", "weights", "winner"),
    [
        (["8", "8", "7"], [0.3, 0.3, 0.9], "7"),
        (["8", "8", "7"], [0.5, 0.5, 0.9], "8"),
        (["7.0", "8", "7"], [0.3, 0.5, 0.3], "7.0"),
        (["7", "8", "8", "8"], [0.3, 0.1, 0.1, 0.1], "7"),  # 0.1 + 0.1 + 0.1 is above 0.3 by rounding alone
        (["8", "7", "7", "7"], [0.3, 0.1, 0.1, 0.1], "8"),
        ([None, "8"], [0.9, 0.0], "8"),
        (["8", "7"], [0.0, 0.0], "8"),
        ([None, None], [0.5, 0.5], None),
        ([], [], None),
    ],
)
def test_the_largest_sum_of_weights_wins(answers: list[str | None], weights: list[float], winner: str | None) -> None:
    assert winning_answer(samples(*answers), weights) == winner
    assert weighted_vote(samples(*answers), weights) == float(winner in ("7", "7.0"))


@given(st.lists(st.sampled_from(["7", "7.0", "8", "9", None]), max_size=9))
def test_equal_weights_are_the_majority(answers: list[str | None]) -> None:
    rows = samples(*answers)
    assert winning_answer(rows, [0.3] * len(rows)) == majority_answer(rows)


def test_weights_and_trajectories_must_match() -> None:
    with pytest.raises(ValueError, match="zip"):
        winning_answer(samples("7"), [])


def test_the_best_of_n_is_the_trajectory_not_its_answers_sum() -> None:
    assert best_of(samples("8", "8", "7"), [0.6, 0.6, 0.9]) == 1.0
    assert best_of(samples("8", "8", "7"), [0.9, 0.1, 0.9]) == 0.0


# --- pass@k -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n: int) -> None:
    for right, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([i < right for i in range(n)], k))
        assert pass_at_k(n, right, k) == sum(map(any, subsets)) / len(subsets)


def test_pass_at_k_equals_the_published_product_and_keeps_its_digits() -> None:
    for n, right, k in ((200, 3, 10), (200, 199, 100), (1000, 1, 1), (100, 50, 3)):
        product = 1 - math.prod(1 - k / i for i in range(n - right + 1, n + 1))
        assert pass_at_k(n, right, k) == pytest.approx(product, rel=1e-9)
    assert pass_at_k(10**6, 1, 1) == 1e-6
    assert pass_at_k(10_000, 5_000, 5_000) == 1.0


@pytest.mark.parametrize(("n", "right", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5), (0, 0, 1)])
def test_pass_at_k_that_is_not_defined_is_refused(n: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match="is not defined"):
        pass_at_k(n, right, k)


def test_sizes_double_up_to_the_number_of_samples() -> None:
    assert [sizes_up_to(n) for n in (1, 2, 3, 8, 12)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 12]]
