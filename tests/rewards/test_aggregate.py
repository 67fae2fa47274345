"""Step scores → one score, by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.rewards.aggregate import AGGREGATES, BadAggregate, aggregate, logistic


@pytest.mark.parametrize(
    ("how", "score"),
    [
        ("product", 0.1),
        ("minimum", 0.25),
        ("last", 0.5),
        ("mean", 1.55 / 3),
        ("geometric_mean", 0.1 ** (1 / 3)),
        ("sum", 1.55),
        ("log_odds", math.log(4 / 3)),  # ln(4) - ln(3) + ln(1)
    ],
)
def test_three_scores_by_hand(how: str, score: float) -> None:
    assert aggregate([0.8, 0.25, 0.5], how) == pytest.approx(score)


def test_every_aggregate_of_one_score_but_log_odds_is_that_score() -> None:
    assert {how: round(aggregate([0.75], how), 12) for how in AGGREGATES if how != "log_odds"} == {
        how: 0.75 for how in AGGREGATES if how != "log_odds"
    }
    assert logistic(aggregate([0.75], "log_odds")) == pytest.approx(0.75)


@pytest.mark.parametrize("how", AGGREGATES)
def test_a_trajectory_without_steps_scores_lowest(how: str) -> None:
    assert aggregate([], how) <= aggregate([0.0, 0.0, 0.0], how)


def test_certain_scores_stay_finite_and_opposite_ones_cancel() -> None:
    assert aggregate([1.0], "log_odds") == pytest.approx(math.log(999_999))
    assert aggregate([1.0, 0.0], "log_odds") == pytest.approx(0.0, abs=1e-9)
    assert aggregate([0.0, 0.9], "geometric_mean") == 0.0


def test_many_good_steps_outweigh_one_doubtful_one_in_log_odds_alone() -> None:
    long, short = [0.9] * 8 + [0.4], [0.6]
    assert aggregate(long, "log_odds") > aggregate(short, "log_odds")
    assert all(aggregate(long, how) < aggregate(short, how) for how in ("product", "minimum", "last"))


@pytest.mark.parametrize("how", ["log_odds", "geometric_mean"])
@pytest.mark.parametrize("score", [-0.1, 1.5, math.nan])
def test_what_is_no_share_is_refused(how: str, score: float) -> None:
    with pytest.raises(BadAggregate, match=rf"{how} needs scores in \[0, 1\]"):
        aggregate([0.5, score], how)


def test_an_unknown_aggregate_names_those_there_are() -> None:
    with pytest.raises(BadAggregate, match="no aggregate 'median': there are product, minimum, last"):
        aggregate([], "median")


@given(st.floats(-1e6, 1e6))
def test_the_logistic_never_overflows_and_is_symmetric(value: float) -> None:
    assert 0 <= logistic(value) <= 1
    assert logistic(value) + logistic(-value) == pytest.approx(1)


def test_the_logistic_of_the_lowest_score_is_zero() -> None:
    assert (logistic(-math.inf), logistic(0.0), logistic(math.inf)) == (0.0, 0.5, 1.0)
