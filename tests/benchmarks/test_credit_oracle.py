"""The measures of the credit benchmark, by hand; every estimator of conf/advantage/ has its row."""

import math

import pytest
import torch

from benchmarks.credit.credit_oracle import CONFIGS, read_rows
from benchmarks.credit.measures import (
    StepCredit,
    bias_and_variance,
    cosine,
    rank_correlation,
    ranks,
    sign_error,
    step_estimates,
)


def test_a_constant_error_is_bias_and_no_variance() -> None:
    steps = [StepCredit("d", 0.5, 0.7), StepCredit("d", 0.5, 0.7), StepCredit("alone", 0.0, 9.0)]
    assert bias_and_variance(steps) == pytest.approx((0.2, 0.0))


def test_an_error_without_a_mean_is_variance_and_no_bias() -> None:
    """Estimates 0.4 and 0.6 of 0.5: variance 0.02, mean right; another decision, 1 and 2 of 0, moves both.

    Squared bias: (2 (0 - 0.01) + 2 (2.25 - 0.25)) / 4 = 0.995; variance (2 x 0.02 + 2 x 0.5) / 4 = 0.26.
    """
    steps = [StepCredit("d", 0.5, 0.4), StepCredit("d", 0.5, 0.6)]
    assert bias_and_variance(steps) == pytest.approx((0.0, 0.02))
    steps += [StepCredit("e", 0.0, 1.0), StepCredit("e", 0.0, 2.0)]
    assert bias_and_variance(steps) == pytest.approx((math.sqrt(0.995), 0.26))


def test_no_decision_taken_twice_gives_no_number() -> None:
    assert all(math.isnan(value) for value in bias_and_variance([StepCredit("d", 0.5, 0.4)]))


def test_signs_count_beyond_the_margin_and_no_credit_is_half_wrong() -> None:
    rows = [(0.5, 0.1), (0.5, -0.1), (-0.5, 0.0), (0.01, -1.0)]
    share, num = sign_error([StepCredit(0, exact, estimate) for exact, estimate in rows])
    assert (share, num) == (0.5, 3)


def test_rank_correlation_by_hand() -> None:
    assert ranks([3.0, 1.0, 3.0]) == [2.5, 1.0, 2.5]
    assert rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert rank_correlation([1, 2, 3], [1, 3, 2]) == pytest.approx(0.5)
    assert rank_correlation([1, 2, 3], [5, 5, 5]) == 0.0


def test_the_cosine_of_gradients() -> None:
    assert cosine(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])) == pytest.approx(math.sqrt(0.5))
    assert cosine(torch.tensor([1.0, 0.0]), torch.zeros(2)) == 0.0


def test_a_steps_estimate_is_the_mean_over_its_credited_tokens() -> None:
    assert step_estimates([1.0, 1.0, 0.0, 3.0, 0.0], [2, 4, 5]) == [1.0, 3.0, 0.0]


def test_every_estimator_has_a_row_and_two_rows_differ_in_name() -> None:
    rows = read_rows()
    assert {row.advantage for row in rows} == {path.stem for path in CONFIGS.glob("*.yaml")}
    assert len({row.name for row in rows}) == len(rows)
