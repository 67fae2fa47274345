"""The links between a state's exact value and a reward model's score: what each knows, by hand on three solutions."""

from statistics import fmean

import numpy as np
import pytest

from benchmarks.credit.signal_links import (
    Solutions,
    best_of_8,
    drawn,
    hard,
    labelled,
    row_of,
    shares,
    smoothed,
    solvable,
    states_behind,
    within_index,
)
from espalier.data.records import Trajectory
from espalier.values.monte_carlo import state_key


def solution(number: int, ids: list[int], is_correct: bool) -> Trajectory:
    """Three steps of one token each: two inner states."""
    return Trajectory(
        f"p/{number}", "p", "q", "abc", ["a", "b", "c"], [9], ids, [1, 2, 3], "stop", "1", "1", is_correct
    )


RIGHT, LATE, WRONG = solution(0, [1, 2, 3], True), solution(1, [1, 4, 3], False), solution(2, [5, 6, 3], False)
VALUES = {(1,): 0.8, (1, 2): 0.9, (1, 4): 0.3, (5,): 0.4, (5, 6): 0.1}
SOLUTIONS = Solutions(
    [RIGHT, LATE, WRONG],
    {"p": 0.7},
    {state_key("p", ids): value for ids, value in VALUES.items()},
    {state_key("p", ids): ids in ((1,), (1, 2)) for ids in VALUES},
    {state_key("p", ids): len(ids) for ids in VALUES},
)


def test_states_are_those_behind_inner_steps() -> None:
    assert states_behind(LATE) == [("p", (1,)), ("p", (1, 4))]


def test_what_a_link_knows_is_counted_over_pairs_of_states_and_within_a_steps_index() -> None:
    row = row_of(SOLUTIONS, [SOLUTIONS.values])
    assert row["auc"] == 1.0  # 0.8 and 0.9 above 0.3, 0.4, 0.1
    mixed = SOLUTIONS.values | {("p", (1,)): 0.35}
    row = row_of(SOLUTIONS, [mixed])
    assert row["auc"] == pytest.approx(5 / 6, abs=1e-5)  # 0.35 is above 0.3 and 0.1, and not above 0.4
    assert row["within"] == pytest.approx((0 * 1 + 1 * 2) / 3)  # one pair of first steps, two of second ones
    assert row_of(SOLUTIONS, [SOLUTIONS.values, mixed])["auc"] == pytest.approx(11 / 12, abs=1e-5)
    index = {key: float(number == 1) for key, number in SOLUTIONS.step.items()}
    assert row_of(SOLUTIONS, [index])["within"] == 0.5


def test_a_step_index_where_all_are_right_has_no_part() -> None:
    steps = [
        {"step": 1, "auc": None, "right_share": 1.0, "num": 9},
        {"step": 2, "auc": 0.7, "right_share": 0.5, "num": 4},
    ]
    assert within_index(steps) == pytest.approx(0.7)


def test_best_of_8_takes_the_highest_of_the_lowest_or_mean_inner_scores_and_ties_by_halves() -> None:
    assert best_of_8(SOLUTIONS, SOLUTIONS.values, min) == 1.0  # 0.8, 0.3, 0.1
    assert best_of_8(SOLUTIONS, SOLUTIONS.values | {("p", (1, 4)): 0.8}, min) == 0.5
    assert best_of_8(SOLUTIONS, SOLUTIONS.values | {("p", (1, 4)): 0.8}, fmean) == 1.0  # 0.85 and 0.8
    assert best_of_8(SOLUTIONS, dict.fromkeys(SOLUTIONS.values, 0.5), min) == pytest.approx(1 / 3)
    assert solvable(SOLUTIONS) == 1.0


def test_completions_are_drawn_by_the_value_and_labels_are_shares_of_them() -> None:
    rng = np.random.default_rng(0)
    many = [shares(drawn(SOLUTIONS.values, 4, rng)) for _ in range(2000)]
    for key, value in SOLUTIONS.values.items():
        found = [one[key] for one in many]
        assert set(found) <= {0.0, 0.25, 0.5, 0.75, 1.0}
        assert np.mean(found) == pytest.approx(value, abs=0.02)
        assert np.var(found) == pytest.approx(value * (1 - value) / 4, abs=0.01)


def test_hard_labels_are_of_the_prompts_value() -> None:
    assert list(hard(SOLUTIONS.values, SOLUTIONS.prompts).values()) == [1.0, 1.0, 0.0, 1.0, 0.0]  # 0.35 and more
    assert set(hard(dict.fromkeys(SOLUTIONS.values, 0.0), {"p": 0.0}).values()) == {0.0}
    values, prompts = smoothed(SOLUTIONS, drawn(SOLUTIONS.values, 50, np.random.default_rng(0)))
    assert values.keys() == SOLUTIONS.values.keys()
    assert set(prompts) == {"p"}


def test_examples_carry_the_labels_of_inner_steps_and_the_outcome() -> None:
    rows = labelled(SOLUTIONS, SOLUTIONS.values)
    assert [row.labels for row in rows] == [[0.8, 0.9, 1.0], [0.8, 0.3, 0.0], [0.4, 0.1, 0.0]]
    assert [row.num_completions for row in rows] == [[4, 4, 1]] * 3
