"""Accuracies, intervals, and how well step scores predict values: by hand and against brute force."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.examples import is_held_out
from data.jsonl import write_records
from data.records import BadInput, StepScores, StepValues, Trajectory
from pipeline.evaluate import Evaluate, best_of, bootstrap_interval, majority_vote
from pipeline.evaluate_prm import EvaluateProcessReward, auc, calibration
from pipeline.stage import StageContext


def sample(number: int, answer: str | None, gold: str = "7", problem: str = "p") -> Trajectory:
    return Trajectory(f"{problem}/{number}", problem, "Q\n", "x", ["x"], [1], [2], [1], "stop", gold, answer,
                      answer == gold)  # fmt: skip


def samples(*answers: str | None) -> list[Trajectory]:
    return [sample(number, answer) for number, answer in enumerate(answers)]


def context() -> StageContext:
    return StageContext(None, Path("unused"), 10.0)


@pytest.mark.parametrize(
    ("answers", "value"),
    [
        (["7", "8", "7"], 1.0),
        (["7", "8", "8"], 0.0),
        (["7", "8"], 1.0),
        (["8", "7"], 0.0),
        (["8", "7", "7", "8"], 0.0),
        ([None, None, "7"], 1.0),
        ([None, None, None, "8", "7"], 0.0),
        ([None, None], 0.0),
        ([], 0.0),
    ],
)
def test_the_majority_wins_ties_go_to_the_first_and_no_answer_never_wins(
    answers: list[str | None], value: float
) -> None:
    assert majority_vote(samples(*answers)) == value


@pytest.mark.parametrize(
    ("scores", "value"),
    [([0.1, 0.9, 0.5], 0.0), ([0.9, 0.1, 0.5], 1.0), ([0.5, 0.5, 0.5], 1.0), ([0.4, 0.5, 0.5], 0.0)],
)
def test_the_highest_scored_counts_and_ties_go_to_the_first(scores: list[float], value: float) -> None:
    assert best_of(samples("7", "8", "8"), scores) == value


def test_the_bootstrap_interval_is_close_to_the_normal_one() -> None:
    rng = random.Random(0)
    values = [float(rng.random() < 0.3) for _ in range(1000)]
    mean = sum(values) / 1000
    half = 1.96 * (mean * (1 - mean) / 1000) ** 0.5
    found = bootstrap_interval(values)
    assert found == pytest.approx((mean, mean - half, mean + half), abs=0.002)


def test_the_bootstrap_interval_is_the_same_every_time_and_a_point_where_nothing_varies() -> None:
    assert bootstrap_interval([0.0, 1.0, 1.0]) == bootstrap_interval([0.0, 1.0, 1.0])
    assert bootstrap_interval([1.0, 1.0, 1.0]) == (1.0, 1.0, 1.0)


def brute_force_auc(scores: list[float], is_positive: list[bool]) -> float:
    rows = list(zip(scores, is_positive, strict=True))
    wins = [(p > n) + 0.5 * (p == n) for p, yes in rows if yes for n, no in rows if not no]
    return sum(wins) / len(wins)


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=40))
def test_auc_is_the_share_of_ordered_pairs(rows: list[tuple[int, bool]]) -> None:
    scores, positive = [score / 5 for score, _ in rows], [yes for _, yes in rows]
    if all(positive) or not any(positive):
        assert auc(scores, positive) is None
    else:
        assert auc(scores, positive) == pytest.approx(brute_force_auc(scores, positive))


def test_calibration_by_hand() -> None:
    bins = calibration([0.0, 0.05, 0.1, 0.95, 1.0], [0.0, 0.5, 1.0, 1.0, 0.0])
    assert bins == [
        {"score": 0.025, "value": 0.25, "count": 2},
        {"score": 0.1, "value": 1.0, "count": 1},
        {"score": 0.975, "value": 0.5, "count": 2},
    ]


def evaluated(tmp_path: Path, rows: list[Trajectory], greedy: list[Trajectory], scores: list[StepScores]) -> dict:
    paths = [str(tmp_path / f"{name}.jsonl") for name in ("samples", "greedy", "scores")]
    for path, records in zip(paths, (rows, greedy, scores), strict=True):
        write_records(path, records)
    return Evaluate(paths[1], paths[2] if scores else "").run(paths[0], context())


ROWS = [
    *samples("7", "8", "8"),
    *(replace(row, id=f"q/{number}", problem_id="q") for number, row in enumerate(samples("7", None, "7"))),
]
GREEDY = [sample(0, "7"), sample(0, "8", problem="q")]
SCORES = [StepScores(row.id, row.problem_id, [score]) for row, score in zip(ROWS, [3, 1, 2, 1, 3, 2], strict=True)]


def test_every_accuracy_of_two_problems_by_hand(tmp_path: Path) -> None:
    result = evaluated(tmp_path, ROWS, GREEDY, SCORES)
    assert result["problems"] == ["p", "q"]
    assert result["per_problem"] == {
        "greedy": [1.0, 0.0],
        "mean": [1 / 3, 2 / 3],
        "majority_3": [0.0, 1.0],
        "best_of_3_product": [1.0, 0.0],
        "best_of_3_minimum": [1.0, 0.0],
        "best_of_3_last": [1.0, 0.0],
    }
    assert result["unparseable"] == pytest.approx(1 / 6, abs=1e-5)
    assert result["accuracy"]["greedy"]["mean"] == 0.5
    assert result["accuracy"]["greedy"]["n"] == 2


def test_problems_are_joined_by_id_not_by_place(tmp_path: Path) -> None:
    result = evaluated(tmp_path, ROWS, GREEDY[::-1], [])
    assert result["problems"] == ["q", "p"]
    assert result["per_problem"] == {"greedy": [0.0, 1.0], "mean": [2 / 3, 1 / 3], "majority_3": [1.0, 0.0]}


@pytest.mark.parametrize(
    ("rows", "greedy", "message"),
    [
        (ROWS[:5], GREEDY, "problems have 2 to 3 samples: finish sampling first"),
        (ROWS[:3], GREEDY, "do not hold the same problems"),
        (ROWS, GREEDY[:1], "do not hold the same problems"),
        ([], [], "samples.jsonl: no trajectory to evaluate"),
    ],
    ids=["unequal", "fewer", "more", "none"],
)
def test_files_that_do_not_fit_are_refused(
    rows: list[Trajectory], greedy: list[Trajectory], message: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=message):
        evaluated(tmp_path, rows, greedy, [])


def test_a_sample_without_scores_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"scores.jsonl: no scores for trajectory 'q/2'"):
        evaluated(tmp_path, ROWS, GREEDY, SCORES[:5])


# --- step scores against values -----------------------------------------------------------------------------

HELD = next(f"p{number}" for number in range(100) if is_held_out(f"p{number}", 0.5))
SEEN = next(f"p{number}" for number in range(100) if not is_held_out(f"p{number}", 0.5))
VALUES = StepValues(
    f"{HELD}/0", HELD, "Q", ["a", "b", "c"], [1], [2, 3, 4], [1, 2, 3],
    [0.25, 0.75, 1.0], [1, 3, 1], [4, 4, 1], True,
)  # fmt: skip


def process_reward_evaluated(tmp_path: Path, values: list[StepValues], scores: list[StepScores]) -> dict:
    write_records(tmp_path / "values.jsonl", values)
    write_records(tmp_path / "scores.jsonl", scores)
    stage = EvaluateProcessReward(str(tmp_path / "scores.jsonl"), 0.5)
    return stage.run(str(tmp_path / "values.jsonl"), context())


def test_a_process_reward_model_is_judged_by_hand(tmp_path: Path) -> None:
    seen = replace(VALUES, id=f"{SEEN}/0", problem_id=SEEN)
    scores = [StepScores(VALUES.id, HELD, [0.5, 0.45, 0.95]), StepScores(seen.id, SEEN, [1.0, 0.0, 0.0])]
    result = process_reward_evaluated(tmp_path, [VALUES, seen], scores)
    assert (result["num_steps"], result["num_problems"]) == (3, 1)
    assert result["auc"] == 0.5
    assert result["value_mae"] == pytest.approx((0.25 + 0.3 + 0.05) / 3, abs=1e-5)
    assert result["ece"] == pytest.approx((0.25 + 0.3 + 0.05) / 3, abs=1e-5)


def test_a_prefix_that_two_trajectories_share_counts_once(tmp_path: Path) -> None:
    other = replace(VALUES, id=f"{HELD}/1", response_ids=[2, 3, 5], values=[0.25, 0.75, 0.0], is_correct=False)
    scores = [StepScores(row.id, HELD, [0.5, 0.5, 0.5]) for row in (VALUES, other)]
    assert process_reward_evaluated(tmp_path, [VALUES, other], scores)["num_steps"] == 4


def test_a_trajectory_without_scores_or_with_fewer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=f"'{HELD}/0' has 0 scores and 3 values"):
        process_reward_evaluated(tmp_path, [VALUES], [])
    with pytest.raises(BadInput, match=f"'{HELD}/0' has 2 scores and 3 values"):
        process_reward_evaluated(tmp_path, [VALUES], [StepScores(VALUES.id, HELD, [0.5, 0.5])])


def test_no_held_out_problem_is_refused(tmp_path: Path) -> None:
    seen = replace(VALUES, id=f"{SEEN}/0", problem_id=SEEN)
    with pytest.raises(BadInput, match="no held-out problem"):
        process_reward_evaluated(tmp_path, [seen], [StepScores(seen.id, SEEN, [1.0, 1.0, 1.0])])
