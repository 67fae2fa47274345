"""Accuracies, intervals, and how well step scores predict values: by hand and against brute force."""

import gzip
import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.analysis.scorers import ShowScorers
from espalier.data.examples.token_examples import is_held_out
from espalier.data.failed_rows import write_failed
from espalier.data.jsonl import read_records, write_records
from espalier.data.records import BadInput, Problem, StepScores, StepValues, Trajectory
from espalier.pipeline.evaluation.calibration_metrics import calibration_bins, calibration_error
from espalier.pipeline.evaluation.evaluate import (
    Evaluate,
    Prediction,
    best_of,
    bootstrap_interval,
    interval,
    majority_vote,
)
from espalier.pipeline.evaluation.evaluation_inputs import OutcomeScore
from espalier.pipeline.evaluation.intervals import intervals, resampled, resampled_mean
from espalier.pipeline.prm.prm_calibration import EvaluateProcessReward, auc
from espalier.pipeline.stage import StageContext
from espalier.rewards.aggregate import BadAggregate


def sample(number: int, answer: str | None, gold: str = "7", problem: str = "p") -> Trajectory:
    return Trajectory(f"{problem}/{number}", problem, "Q\n", "x", ["x"], [1], [2], [1], "stop", gold, answer,
                      answer == gold)  # fmt: skip


def samples(*answers: str | None) -> list[Trajectory]:
    return [sample(number, answer) for number, answer in enumerate(answers)]


def context(output: Path = Path("unused")) -> StageContext:
    return StageContext(None, output, 10.0)


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


def test_metrics_that_share_their_draws_have_the_intervals_they_have_alone() -> None:
    rng = random.Random(1)
    rows = {name: [rng.random() for _ in range(50)] for name in "abc"}
    assert intervals(rows) == {name: interval(values) for name, values in rows.items()}


def test_an_interval_is_that_of_the_drawn_problems_means() -> None:
    values = np.asarray([0.0, 0.25, 1.0, 1.0, 0.5])
    drawn = np.random.default_rng(3).integers(0, 5, (500, 5))
    low, high = np.quantile([values[row].mean() for row in drawn], [0.025, 0.975])
    assert bootstrap_interval(list(values), seed=3, draws=500) == pytest.approx((0.55, low, high))


def test_rows_of_unequal_lengths_or_without_values_have_no_interval() -> None:
    with pytest.raises(ValueError, match="same number of values"):
        intervals({"a": [1.0], "b": [1.0, 0.0]})
    with pytest.raises(ValueError, match="at least 1"):
        interval([])


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
    bins = calibration_bins([0.0, 0.05, 0.1, 0.15, 0.95, 1.0], [0.0, 0.5, 1.0, 1.0, 1.0, 0.0])
    assert bins == [
        {"score": 0.05, "value": 0.5, "count": 3},
        {"score": 0.15, "value": 1.0, "count": 1},
        {"score": 0.975, "value": 0.5, "count": 2},
    ]


def evaluated(
    tmp_path: Path, rows: list[Trajectory], greedy: list[Trajectory], scores: list[StepScores], **settings: Any
) -> dict[str, Any]:
    paths = [str(tmp_path / f"{name}.jsonl") for name in ("samples", "greedy", "scores")]
    for path, records in zip(paths, (rows, greedy, scores), strict=True):
        write_records(path, records)
    stage = Evaluate(paths[1], paths[2] if scores else "", **settings)
    return stage.run(paths[0], context(tmp_path / "evaluation.json"))


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
        "weighted_3_product": [1.0, 1.0],  # 3 against 1 + 2 is a tie: the answer sampled first
        "weighted_3_minimum": [1.0, 1.0],
        "weighted_3_last": [1.0, 1.0],
        "fewest_steps_of_3": [1 / 3, 2 / 3],  # all have as many: any of them
        "pass_at_1": [1 / 3, 2 / 3],
        "pass_at_2": [2 / 3, 1.0],
        "pass_at_3": [1.0, 1.0],
    }
    assert result["unparseable"] == pytest.approx(1 / 6, abs=1e-5)
    assert result["accuracy"]["greedy"]["mean"] == 0.5
    assert result["accuracy"]["greedy"]["n"] == 2
    assert list(result["pass_at_k"]) == ["pass_at_1", "pass_at_2", "pass_at_3"]


def test_votes_and_best_of_fewer_samples_of_two_problems_by_hand(tmp_path: Path) -> None:
    """p: 7 (right, score 3), 8 (1), 8 (2); q: 7 (right, 1), none (3), 7 (right, 2)."""
    result = evaluated(tmp_path, ROWS, GREEDY, SCORES, aggregates=["last"])
    means = {name: {n: row["mean"] for n, row in curve.items()} for name, curve in result["by_n"].items()}
    assert means == {
        "majority": {"1": 0.5, "2": pytest.approx((1 / 3 + 1) / 2, abs=1e-5), "3": 0.5},
        "weighted_last": {
            "1": 0.5,
            "2": pytest.approx((2 / 3 + 1) / 2, abs=1e-5),
            "3": pytest.approx((1 / 3 + 1) / 2, abs=1e-5),
        },  # 3 of one sample ties with 1 + 2 of two
        "best_of_last": {"1": 0.5, "2": pytest.approx((2 / 3 + 1 / 3) / 2, abs=1e-5), "3": 0.5},
        "fewest_steps": {"1": 0.5, "2": 0.5, "3": 0.5},
    }
    assert result["by_n"]["majority"]["3"] == {"mean": 0.5, "low": 0.0, "high": 1.0, "n": 2}
    plain = result["table"]["by_n"]["plain"].split("\n")
    assert plain[0].split() == ["by", "n", "1", "2", "3"]
    assert [line.split()[0] for line in plain[2:-1]] == [*means, "pass"]
    assert "| best_of_last | 50.0 [33.3, 66.7] | 50.0 [33.3, 66.7] | 50.0 [0.0, 100.0] |" in (
        result["table"]["by_n"]["markdown"].split("\n")
    )


def test_an_empty_response_is_not_the_solution_of_fewest_steps(tmp_path: Path) -> None:
    """No scorer chooses it either."""
    rows = samples("7", "8")
    rows[1] = replace(rows[1], response="", steps=[], response_ids=[], step_ends=[], is_correct=False)
    scores = [StepScores(row.id, row.problem_id, [0.5] * len(row.steps)) for row in rows]
    result = evaluated(tmp_path, rows, rows[:1], scores)
    found = result["per_problem"]
    assert (found["fewest_steps_of_2"], found["best_of_2_last"]) == ([1.0], [1.0])
    by_n = json.loads(json.dumps(result["by_n"], allow_nan=False))
    assert by_n["fewest_steps"]["2"]["mean"] == by_n["best_of_last"]["2"]["mean"] == 1.0


def test_the_share_of_lowest_scores_on_the_last_step_is_told_without_a_judged_step(tmp_path: Path) -> None:
    rows = [replace(row, response="a\nb\n", steps=["a\n", "b\n"]) for row in samples("7", "8", "8", "7")]
    given = [[0.9, 0.1], [0.2, 0.8], [0.5, 0.5], [0.9, 0.3]]
    scores = [StepScores(row.id, row.problem_id, own) for row, own in zip(rows, given, strict=True)]
    result = evaluated(tmp_path, rows, [sample(0, "7")], scores)
    assert result["last_minimum"] == {"scores": 0.5}
    (tmp_path / "evaluation.json").write_text(json.dumps(result))
    page = ShowScorers([str(tmp_path)]).run("", context(tmp_path / "page.html"))
    assert "lowest score on the last step, scores" in page
    assert "50.0 (an outcome model in disguise)" in page
    assert "Best of n and votes over n" in page
    assert '<th scope="row">best_of_product, n = 2</th>' in page


def test_problems_are_joined_by_id_not_by_place(tmp_path: Path) -> None:
    result = evaluated(tmp_path, ROWS, GREEDY[::-1], [])
    assert result["problems"] == ["q", "p"]
    assert result["per_problem"]["greedy"] == [0.0, 1.0]
    assert result["per_problem"]["mean"] == [2 / 3, 1 / 3]
    assert result["per_problem"]["majority_3"] == [1.0, 0.0]


def test_without_a_greedy_file_all_else_is_told(tmp_path: Path) -> None:
    write_records(tmp_path / "samples.jsonl", ROWS)
    result = Evaluate().run(str(tmp_path / "samples.jsonl"), context(tmp_path / "e.json"))
    assert list(result["accuracy"]) == ["mean", "majority_3"]
    assert list(result["responses"]) == ["samples"]
    rows = read_records(Prediction, tmp_path / "e.predictions.jsonl")
    assert [(row.answer, row.is_correct, row.greedy_answer) for row in rows] == [("8", False, None), ("7", True, None)]


def test_predictions_stand_beside_the_output(tmp_path: Path) -> None:
    evaluated(tmp_path, ROWS, GREEDY, SCORES, aggregates=["last"])
    assert read_records(Prediction, tmp_path / "evaluation.predictions.jsonl") == [
        Prediction("p", "7", True, "7", "8", {"last": "7"}, {"last": "7"}, ["7", "8", "8"], 1),
        Prediction("q", "8", False, "8", "7", {"last": None}, {"last": "7"}, ["7", None, "7"], 2),
    ]


def test_no_accuracy_is_claimed_for_problems_without_gold(tmp_path: Path) -> None:
    hidden = [replace(row, gold="", is_correct=False) for row in ROWS[3:]]
    greedy = [GREEDY[0], replace(GREEDY[1], gold="", is_correct=False)]
    result = evaluated(tmp_path, [*ROWS[:3], *hidden], greedy, [])
    assert (result["num_problems"], result["num_unlabelled"], result["problems"]) == (2, 1, ["p"])
    assert result["per_problem"]["mean"] == [1 / 3]
    assert result["accuracy"]["greedy"]["n"] == 1
    assert result["responses"]["samples"]["unparseable"] == interval([0.0, 1 / 3])
    rows = read_records(Prediction, tmp_path / "evaluation.predictions.jsonl")
    assert [(row.id, row.answer, row.is_correct, row.num_correct) for row in rows] == [
        ("p", "7", True, 1), ("q", "8", None, None),
    ]  # fmt: skip


@pytest.mark.parametrize("gold", ["", []])
def test_where_no_problem_has_a_gold_only_predictions_and_responses_are_left(gold: Any, tmp_path: Path) -> None:
    rows = [replace(row, gold=gold, is_correct=False) for row in ROWS]
    result = evaluated(tmp_path, rows, [replace(row, gold=gold, is_correct=False) for row in GREEDY], SCORES)
    assert (result["accuracy"], result["pass_at_k"], result["by_n"], result["per_problem"]) == ({}, {}, {}, {})
    assert result["num_unlabelled"] == 2
    assert len(read_records(Prediction, tmp_path / "evaluation.predictions.jsonl")) == 2


def test_lengths_steps_and_cut_responses_by_hand(tmp_path: Path) -> None:
    long = {"response": "ab\nc", "steps": ["ab\n", "c"], "response_ids": [2, 3, 4], "step_ends": [2, 3]}
    rows = [replace(ROWS[0], **long), replace(ROWS[1], finish_reason="length"), *ROWS[2:]]
    figures = evaluated(tmp_path, rows, GREEDY, [])["responses"]["samples"]
    means = {name: figure["mean"] for name, figure in figures.items()}
    assert means == {
        "unparseable": 0.16667,
        "cut_by_length": 0.16667,
        "response_tokens": 1.33333,
        "steps": 1.16667,
        "response_chars": 1.5,
    }


def test_tokens_are_not_told_where_the_sampler_returned_none(tmp_path: Path) -> None:
    rows = [replace(row, response_ids=[], step_ends=[]) for row in ROWS]
    figures = evaluated(tmp_path, rows, GREEDY, [])["responses"]
    assert "response_tokens" not in figures["samples"]
    assert figures["greedy"]["response_tokens"]["mean"] == 1


# --- scorers ------------------------------------------------------------------------------------------------


def test_several_scorers_are_told_by_name_and_outcome_scores_once(tmp_path: Path) -> None:
    outcome = [OutcomeScore(row.id, row.problem_id, score) for row, score in zip(ROWS, [0, 1, 0] * 2, strict=True)]
    write_records(tmp_path / "orm.jsonl", outcome)
    write_records(tmp_path / "scores.jsonl", SCORES)
    write_records(tmp_path / "samples.jsonl", ROWS)
    scores = {"prm": str(tmp_path / "scores.jsonl"), "orm": str(tmp_path / "orm.jsonl")}
    stage = Evaluate(scores=scores, aggregates=["last"])
    found = stage.run(str(tmp_path / "samples.jsonl"), context(tmp_path / "e.json"))["per_problem"]
    assert found["best_of_3_prm_last"] == [1.0, 0.0]
    assert found["best_of_3_orm"] == [0.0, 0.0]
    assert found["weighted_3_orm"] == [0.0, 1.0]
    assert sorted(stage.inputs()) == sorted(scores.values())


@pytest.mark.parametrize("log_odds", [[0.5, 0.0, -1.0], [9.0, 4.0, 4.0]])
def test_log_odds_rank_as_they_are_and_vote_as_shares(log_odds: list[float], tmp_path: Path) -> None:
    # 8 twice at log-odds 0 and -1 (weights 1/2 and 0.27) outweigh 7 once at 1/2 (0.62), though -1 < 1/2; and twice at
    # 4 (0.98) 7 once at 9 (1.00), though 4 + 4 < 9.
    outcome = [OutcomeScore(row.id, "p", score) for row, score in zip(ROWS[:3], log_odds, strict=True)]
    write_records(tmp_path / "orm.jsonl", outcome)
    write_records(tmp_path / "samples.jsonl", ROWS[:3])
    stage = Evaluate(scores=str(tmp_path / "orm.jsonl"))
    found = stage.run(str(tmp_path / "samples.jsonl"), context(tmp_path / "e.json"))["per_problem"]
    assert (found["best_of_3_outcome"], found["weighted_3_outcome"]) == ([1.0], [0.0])


def test_step_scores_with_one_score_for_several_steps_are_outcome_scores(tmp_path: Path) -> None:
    rows = [replace(row, steps=["a", "b"], step_ends=[1, 2]) for row in ROWS]
    found = evaluated(tmp_path, rows, GREEDY, SCORES)["per_problem"]
    assert [name for name in found if name.startswith("best_of")] == ["best_of_3_outcome"]


def test_scores_that_do_not_match_the_steps_are_refused(tmp_path: Path) -> None:
    scores = [replace(SCORES[0], scores=[0.5, 0.5]), *SCORES[1:]]
    with pytest.raises(BadInput, match=r"scores.jsonl: trajectory 'p/0' has 2 scores and 1 steps"):
        evaluated(tmp_path, ROWS, GREEDY, scores)


def test_an_aggregate_that_does_not_exist_is_told_before_anything_is_read() -> None:
    with pytest.raises(BadAggregate, match="no aggregate 'median'"):
        Evaluate("nowhere", aggregates=["median"]).run("nowhere", context())


def test_scorers_of_one_file_name_need_names() -> None:
    assert Evaluate("g", ["a/one.jsonl", "b/two.jsonl"]).inputs() == ["g", "a/one.jsonl", "b/two.jsonl"]
    with pytest.raises(BadInput, match="two files have the same name: give names"):
        Evaluate("g", ["a/scores.jsonl", "b/scores.jsonl"]).inputs()
    with pytest.raises(BadInput, match=r"stage.scores must be a path, a list of paths or a mapping"):
        Evaluate("g", 3).inputs()


# --- breakdown, robustness, table ---------------------------------------------------------------------------

PROBLEMS = [
    Problem("p", "Q", "7", {"subject": "Sums", "level": 2}),
    Problem("q", "Q", "7", {"subject": ["Sums", "Ratios"], "level": None}),
    Problem("r", "Q", "7", {"subject": "Sums"}),
]


def test_subjects_and_levels_by_hand(tmp_path: Path) -> None:
    write_records(tmp_path / "problems.jsonl", PROBLEMS)
    result = evaluated(tmp_path, ROWS, GREEDY, [], problems=str(tmp_path / "problems.jsonl"))
    assert {value: row["mean"] for value, row in result["breakdown"]["subject"].items()} == {
        "Ratios": interval([2 / 3]),
        "Sums": interval([1 / 3, 2 / 3]),
    }
    assert {value: row["greedy"]["mean"] for value, row in result["breakdown"]["level"].items()} == {
        "2": 1.0,
        "not given": 0.0,
    }
    assert result["num_not_sampled"] == 1
    assert "greedy, subject Ratios" in [row["metric"] for row in result["table"]["rows"]]


def test_a_problem_that_was_refused_is_in_no_figure_and_is_counted(tmp_path: Path) -> None:
    """q is listed as refused by one of the two runs, p by none."""
    rows = [sample(0, "7"), sample(1, "8"), sample(0, "7", problem="q"), sample(1, "7", problem="q")]
    write_records(tmp_path / "samples.jsonl", rows)
    write_records(tmp_path / "greedy.jsonl", [sample(0, "7")])
    stage = Evaluate(greedy=str(tmp_path / "greedy.jsonl"))
    with pytest.raises(BadInput, match=r"do not hold the same problems \('q' is only in one"):
        stage.run(str(tmp_path / "samples.jsonl"), context(tmp_path / "e.json"))
    write_failed(tmp_path / "greedy.jsonl", [("q", "too long"), ("r", "too long")])
    asked = context(tmp_path / "e.json")
    result = stage.run(str(tmp_path / "samples.jsonl"), asked)
    assert (result["num_problems"], result["num_refused"], asked.counts["refused"]) == (1, 2, 2)
    assert result["accuracy"]["mean"]["mean"] == 0.5


def test_levels_are_in_the_order_of_numbers_and_long_subjects_are_cut_in_the_table_alone(tmp_path: Path) -> None:
    long = "a kind of reasoning " * 10
    write_records(tmp_path / "problems.jsonl", [
        replace(PROBLEMS[0], info={"subject": long, "level": 10}), replace(PROBLEMS[1], info={"level": 9}),
    ])  # fmt: skip
    result = evaluated(tmp_path, ROWS, GREEDY, [], problems=str(tmp_path / "problems.jsonl"))
    assert list(result["breakdown"]["level"]) == ["9", "10"]
    assert list(result["breakdown"]["subject"]) == [long, "not given"]
    assert max(len(line) for line in result["table"]["plain"].split("\n")) < 120


def test_a_file_without_subjects_makes_no_breakdown_and_one_of_other_problems_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "problems.jsonl")
    write_records(path, [replace(problem, info={}) for problem in PROBLEMS])
    assert evaluated(tmp_path, ROWS, GREEDY, [], problems=path)["breakdown"] == {}
    write_records(path, PROBLEMS[:1])
    with pytest.raises(BadInput, match=r"problems.jsonl: no problem 'q', which .*samples.jsonl holds"):
        evaluated(tmp_path, ROWS, GREEDY, [], problems=path)


OPTIONS = ["red", "green", "blue"]


def permuted(tmp_path: Path, name: str, order: list[int] | None, answers: dict[str, str | None]) -> dict[str, str]:
    """Files of problems whose right option is the first as published, with the options in `order`."""
    info = {} if order is None else {"option_order": order}
    shown = order or [0, 1, 2]
    gold = "ABC"[shown.index(0)]
    problems = [Problem(key, "Q", gold, info, "", [OPTIONS[i] for i in shown]) for key in answers]
    rows = [replace(sample(0, answer, gold, key), num_options=3) for key, answer in answers.items()]
    paths = {kind: str(tmp_path / f"{name}.{kind}.jsonl") for kind in ("trajectories", "problems")}
    write_records(paths["trajectories"], rows)
    write_records(paths["problems"], problems)
    return paths


def test_robustness_to_the_order_of_options_by_hand(tmp_path: Path) -> None:
    # p: always red, q: always the first place, r: red, then no answer, s: always green.
    given = permuted(tmp_path, "given", None, {"p": "A", "q": "A", "r": "A", "s": "B"})
    turned = permuted(tmp_path, "turned", [1, 2, 0], {"p": "C", "q": "A", "r": None, "s": "A"})
    swapped = permuted(tmp_path, "swapped", [1, 0, 2], {"p": "B", "q": "A", "r": "B", "s": "A"})
    stage = Evaluate(
        given["trajectories"], problems=given["problems"], option_orders={"turned": turned, "swapped": swapped}
    )
    result = stage.run(given["trajectories"], context(tmp_path / "e.json"))
    found = result["option_orders"]
    assert {name: row["mean"] for name, row in found["accuracy"].items()} == {
        "given": 0.75, "turned": 0.25, "swapped": 0.5,
    }  # fmt: skip
    assert found["right_under_all"] == interval([1, 0, 0, 0])
    assert found["right_under_any"] == interval([1, 1, 1, 0])
    assert found["flip_rate"] == interval([0, 1, 1, 0])
    assert found["num_orders"] == 3
    assert set(stage.inputs()) == {*given.values(), *turned.values(), *swapped.values()}
    assert {"turned (order of options)", "flip_rate"} <= {row["metric"] for row in result["table"]["rows"]}


def test_option_orders_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    given = permuted(tmp_path, "given", None, {"p": "A", "q": "A"})

    def run(orders: Any, problems: str = given["problems"]) -> None:
        stage = Evaluate(problems=problems, option_orders=orders)
        stage.inputs()
        stage.run(given["trajectories"], context(tmp_path / "e.json"))

    with pytest.raises(BadInput, match=r"'q' is only in one"):
        run({"other": permuted(tmp_path, "other", [1, 0, 2], {"p": "A"})})
    broken = permuted(tmp_path, "broken", [1, 0, 2], {"p": "A", "q": "A"})
    Path(broken["problems"]).write_text(Path(broken["problems"]).read_text().replace("[1,0,2]", "[1,0,1]"))
    with pytest.raises(BadInput, match=r"info.option_order must hold 0 to 2 once each, got"):
        run({"other": broken})
    with pytest.raises(BadInput, match=r"stage.option_orders.other must name two files"):
        run({"other": {"trajectories": given["trajectories"]}})
    with pytest.raises(BadInput, match=r"must name two files"):
        run({"other": given["trajectories"]})
    with pytest.raises(BadInput, match="must map names to files"):
        run([given])
    with pytest.raises(BadInput, match="'given' is the input itself"):
        run({"given": given})
    with pytest.raises(BadInput, match=r"needs stage.problems"):
        run({"other": given}, problems="")


def test_the_table_is_readable_in_markdown_and_in_plain_text(tmp_path: Path) -> None:
    table = evaluated(tmp_path, ROWS, GREEDY, [])["table"]
    assert table["rows"][0] == {"metric": "greedy", "mean": 0.5, "low": 0.0, "high": 1.0, "n": 2, "unit": "share"}
    lines = table["markdown"].split("\n")
    assert lines[:3] == ["| metric | mean | low | high | n |", "|---|---:|---:|---:|---:|",
                         "| greedy | 50.0 % | 0.0 % | 100.0 % | 2 |"]  # fmt: skip
    assert "| response_tokens, samples (tokens) | 1.0 | 1.0 | 1.0 | 2 |" in lines
    plain = table["plain"].split("\n")
    assert plain[0].split() == ["metric", "mean", "low", "high", "n"]
    assert plain[2].split() == ["greedy", "50.0", "%", "0.0", "%", "100.0", "%", "2"]
    assert len({len(line) for line in plain if line}) == 1
    json.dumps(table, allow_nan=False)


# --- files that do not fit ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "greedy", "message"),
    [
        (ROWS[:5], GREEDY, "problems have 2 to 3 samples: finish sampling first"),
        (ROWS[:3], GREEDY, "do not hold the same problems .'q' is only in one"),
        (ROWS, GREEDY[:1], "do not hold the same problems"),
        ([], [], "samples.jsonl: no trajectory to evaluate"),
        (ROWS, [], "greedy.jsonl: no greedy trajectory"),
        (ROWS, [*GREEDY, sample(1, "7")], "greedy.jsonl: problem 'p' stands 2 times: one greedy"),
        (ROWS, [sample(0, "7", gold="9"), GREEDY[1]], "problem 'p' has gold '7' in 'p/0' and '9' in 'p/0'"),
        ([replace(ROWS[0], gold=""), *ROWS[1:]], GREEDY, "problem 'p' has gold '' in 'p/0' and '7' in 'p/1'"),
        ([*ROWS, ROWS[0]], GREEDY, r"samples.jsonl:7: id 'p/0' stands already at .*samples.jsonl:1"),
    ],
    ids=["unequal", "fewer", "more", "none", "no greedy", "greedy twice", "other gold", "gold in part", "twice"],
)
def test_files_that_do_not_fit_are_refused(
    rows: list[Trajectory], greedy: list[Trajectory], message: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=message):
        evaluated(tmp_path, rows, greedy, [])
    assert not list(tmp_path.glob("evaluation*"))


def test_a_sample_without_scores_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"scores.jsonl: no scores for trajectory 'q/2'"):
        evaluated(tmp_path, ROWS, GREEDY, SCORES[:5])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no trajectory to evaluate"),
        (b'{"id": "p/0", "prob', r"samples.jsonl:1: not a JSON object"),
        (b"\x1f\x8b\x08\x00\x00", r"samples.jsonl: is a gzip file: unpack it first"),
        (b"[1]\n", r"samples.jsonl:1: a line must be a JSON object, got list"),
        (b'{"id": 3}\n', r"samples.jsonl:1: (Trajectory lacks|id must be str)"),
    ],
    ids=["empty", "torn", "gzip", "list", "types"],
)
def test_a_broken_file_is_told_in_one_line(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_bytes(content)
    with pytest.raises(BadInput, match=message) as caught:
        Evaluate().run(str(tmp_path / "samples.jsonl"), context(tmp_path / "e.json"))
    assert "\n" not in str(caught.value)


def test_a_byte_order_mark_and_windows_line_ends_change_nothing(tmp_path: Path) -> None:
    write_records(tmp_path / "samples.jsonl", ROWS)
    plain = Evaluate().run(str(tmp_path / "samples.jsonl"), context(tmp_path / "e.json"))
    text = (tmp_path / "samples.jsonl").read_bytes().replace(b"\n", b"\r\n")
    (tmp_path / "samples.jsonl").write_bytes(b"\xef\xbb\xbf" + text)
    assert Evaluate().run(str(tmp_path / "samples.jsonl"), context(tmp_path / "f.json")) == plain


# --- step scores against values -----------------------------------------------------------------------------

HELD = next(f"p{number}" for number in range(100) if is_held_out(f"p{number}", 0.5))
SEEN = next(f"p{number}" for number in range(100) if not is_held_out(f"p{number}", 0.5))
VALUES = StepValues(
    f"{HELD}/0", HELD, "Q", ["a", "b", "c"], [1], [2, 3, 4], [1, 2, 3],
    [0.25, 0.75, 1.0], [1, 3, 1], [4, 4, 1], True,
)  # fmt: skip


def test_best_of_n_by_scores_of_problems_that_were_seen_or_may_be_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_records(tmp_path / "samples.jsonl", ROWS)
    scores = {}
    for name, is_seen in (("clean", False), ("seen", True), ("unknown", None)):
        scores[name] = str(tmp_path / f"{name}.jsonl")
        write_records(scores[name], [replace(row, is_seen=is_seen) for row in SCORES])
    asked, number = context(tmp_path / "e.json"), len({row.problem_id for row in ROWS})
    with caplog.at_level("WARNING"):
        Evaluate(scores=scores, aggregates=["last"]).run(str(tmp_path / "samples.jsonl"), asked)
    counts = {key: count for key, count in asked.counts.items() if key.startswith("problems_")}
    assert counts == {
        "problems_seen_by_the_reward_model_clean": 0,
        "problems_seen_by_the_reward_model_seen": number,
        "problems_seen_by_the_reward_model_unknown": 0,
        "problems_perhaps_seen_unknown": number,
    }
    assert f"{number} of {number} problems were in the reward model's training set and look better" in caplog.text
    assert "clean.jsonl" not in caplog.text


def process_reward_evaluated(
    tmp_path: Path, values: list[StepValues], scores: list[StepScores], target: str = "values"
) -> dict:
    write_records(tmp_path / "values.jsonl", values)
    write_records(tmp_path / "scores.jsonl", scores)
    stage = EvaluateProcessReward(str(tmp_path / "scores.jsonl"), 0.5, target)
    return stage.run(str(tmp_path / "values.jsonl"), context())


def test_a_process_reward_model_is_judged_by_hand(tmp_path: Path) -> None:
    seen = replace(VALUES, id=f"{SEEN}/0", problem_id=SEEN)
    scores = [StepScores(VALUES.id, HELD, [0.55, 0.45, 0.95]), StepScores(seen.id, SEEN, [1.0, 0.0, 0.0])]
    result = process_reward_evaluated(tmp_path, [VALUES, seen], scores)
    inner, terminal = result["inner"], result["terminal"]
    assert (inner["num_steps"], terminal["num_steps"], result["num_problems"]) == (2, 1, 1)
    assert inner["auc"] == {"mean": 0.0, "low": 0.0, "high": 0.0, "n": 1}, "0.45 for 0.75 is below 0.55 for 0.25"
    assert inner["value_mae"]["mean"] == pytest.approx((0.3 + 0.3) / 2, abs=1e-5)
    assert inner["ece"]["mean"] == pytest.approx((0.3 + 0.3) / 2, abs=1e-5)
    assert (terminal["auc"], terminal["value_mae"]["mean"]) == (None, 0.05)
    assert [row["count"] for row in result["bins"]] == [1, 1]
    assert [row["count"] for row in result["terminal_bins"]] == [1]


@pytest.mark.parametrize("knows", ["the step", "the index"])
def test_scores_that_know_no_more_than_the_index_of_a_step_are_warned_of(
    knows: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Step 1 is good in 3 of 4 rows, step 2 in 1 of 4: of 16 pairs of a good and a bad step 9 are ranked by the index,
    6 tie. A score that knows the step ranks all of them."""
    problems = [name for name in map("p{}".format, range(60)) if is_held_out(name, 0.5)][:10]
    rows = [
        replace(VALUES, id=f"{name}/{k}", problem_id=name, response_ids=[2 + k, 5, 9],
                values=[float(k != 0), float(k == 1), 1.0])
        for name in problems for k in range(4)
    ]  # fmt: skip
    scores = [
        StepScores(
            row.id, row.problem_id, [float(v or 0) for v in row.values] if knows == "the step" else [0.9, 0.1, 1.0]
        )
        for row in rows
    ]
    inner = process_reward_evaluated(tmp_path, rows, scores)["inner"]
    assert inner["index_auc"]["mean"] == (9 + 6 / 2) / 16
    assert inner["above_index"]["mean"] == (0.25 if knows == "the step" else 0.0)
    assert ("the step's index alone one of 0.750" in caplog.text) == (knows == "the index")


def test_outcomes_that_are_easy_to_see_do_not_make_inner_steps_look_good(tmp_path: Path) -> None:
    """Inner scores are the wrong way round, last ones perfect: the AUC of both together would be 5 / 9."""
    rows = [
        replace(VALUES, id=f"{HELD}/{k}", response_ids=[2 + k, 5, 9], values=[value, value, outcome])
        for k, (value, outcome) in enumerate([(0.25, 0.0), (0.75, 1.0)])
    ]
    scores = [StepScores(rows[0].id, HELD, [0.6, 0.6, 0.0]), StepScores(rows[1].id, HELD, [0.4, 0.4, 1.0])]
    result = process_reward_evaluated(tmp_path, rows, scores)
    assert result["inner"]["auc"]["mean"] == 0.0
    assert result["terminal"]["auc"]["mean"] == 1.0


def test_a_step_whose_value_is_not_known_is_no_wrong_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    unknown = replace(VALUES, values=[None, 0.75, 1.0])
    with caplog.at_level("WARNING"):
        result = process_reward_evaluated(tmp_path, [unknown], [StepScores(VALUES.id, HELD, [0.5, 0.45, 0.95])])
    assert (result["inner"]["num_steps"], result["inner"]["value_mae"]["mean"]) == (1, 0.3)
    assert "of 1 of 1 problems nobody knows whether the reward model was trained on them" in caplog.text
    assert "values.jsonl: 1 of 3 steps lead to a state whose value is not known and are left out" in caplog.text


def test_a_process_reward_model_is_judged_by_the_labels_that_it_learned_where_these_are_no_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By values 0.45 would be a bad score of the second step; a completion's solution has no scores."""
    labelled = replace(VALUES, labels=[1.0, 0.0, None])
    completion = replace(labelled, id=f"{HELD}/0#1/0")
    with caplog.at_level("WARNING"):
        result = process_reward_evaluated(
            tmp_path, [labelled, completion], [StepScores(VALUES.id, HELD, [0.5, 0.45, 0.95], False)], "labels"
        )
    assert (result["inner"]["auc"]["mean"], result["inner"]["num_steps"], result["terminal"]["num_steps"]) == (1, 2, 0)
    assert result["inner"]["value_mae"]["mean"] == pytest.approx((0.5 + 0.45) / 2, abs=1e-5)
    assert (result["target"], caplog.text) == ("labels", "")
    other = replace(labelled, id=f"{HELD}/1")
    with pytest.raises(BadInput, match=f"trajectory '{HELD}/1' has 0 scores and 3 labels: score these trajectories"):
        process_reward_evaluated(
            tmp_path, [labelled, other], [StepScores(VALUES.id, HELD, [0.5, 0.45, 0.95], False)], "labels"
        )
    with pytest.raises(BadInput, match=r"stage\.target must be values or labels, got 'label'"):
        EvaluateProcessReward("scores.jsonl", 0.5, "label")


def test_the_weights_of_a_draw_are_repeated_rows() -> None:
    """AUC and calibration error against the rows written out as often as their problem was drawn."""
    rng = random.Random(0)
    for _ in range(40):
        size = rng.randint(2, 12)
        scores = [rng.choice([0.1, 0.25, 0.5, 0.8, 1.0]) for _ in range(size)]
        values = [rng.random() for _ in range(size)]
        weights = [rng.randint(0, 3) for _ in range(size)]
        rows = [row for row, times in zip(zip(scores, values, strict=True), weights, strict=True) for _ in range(times)]
        pairs = [(one > other) + 0.5 * (one == other) for one, v in rows if v > 0.5 for other, w in rows if w <= 0.5]
        want = sum(pairs) / len(pairs) if pairs else None
        found = auc(scores, [value > 0.5 for value in values], weights)
        assert found == (None if want is None else pytest.approx(want))
        if rows:
            bins = calibration_bins([one for one, _ in rows], [value for _, value in rows])
            gap = sum(row["count"] * abs(row["score"] - row["value"]) for row in bins) / len(rows)
            error = calibration_error(np.asarray(scores), np.asarray(values), np.asarray(weights, dtype=float))
            assert error == pytest.approx(gap, abs=1e-4)


def test_an_interval_of_a_figure_of_steps_draws_whole_problems() -> None:
    """Values 0, 0 and 1 of three problems: all 0 in 8 of 27 draws, all 1 in 1 of 27, both above 2.5 %. Ten rows of one
    problem are one problem."""
    assert resampled_mean([("a", 0.0), ("b", 0.0), ("c", 1.0)]) == {"mean": 0.33333, "low": 0.0, "high": 1.0, "n": 3}
    assert resampled_mean([("a", 0.5)] * 10) == {"mean": 0.5, "low": 0.5, "high": 0.5, "n": 1}
    assert resampled_mean([]) is None
    assert resampled(["a", "b"], lambda weights: None) is None


def test_a_prefix_that_two_trajectories_share_counts_once(tmp_path: Path) -> None:
    other = replace(VALUES, id=f"{HELD}/1", response_ids=[2, 3, 5], values=[0.25, 0.75, 0.0], is_correct=False)
    scores = [StepScores(row.id, HELD, [0.5, 0.5, 0.5]) for row in (VALUES, other)]
    assert process_reward_evaluated(tmp_path, [VALUES, other], scores)["inner"]["num_steps"] == 2


def test_a_trajectory_without_scores_or_with_fewer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=f"'{HELD}/0' has 0 scores and 3 values"):
        process_reward_evaluated(tmp_path, [VALUES], [])
    with pytest.raises(BadInput, match=f"'{HELD}/0' has 2 scores and 3 values"):
        process_reward_evaluated(tmp_path, [VALUES], [StepScores(VALUES.id, HELD, [0.5, 0.5])])


def test_problems_that_the_reward_model_was_trained_on_are_never_held_out(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"was trained on 1 problems that held_out_share 0\.5 holds out"):
        process_reward_evaluated(tmp_path, [VALUES], [StepScores(VALUES.id, HELD, [0.5, 0.45, 0.95], is_seen=True)])


def test_no_held_out_problem_is_refused(tmp_path: Path) -> None:
    seen = replace(VALUES, id=f"{SEEN}/0", problem_id=SEEN)
    with pytest.raises(BadInput, match="no held-out problem"):
        process_reward_evaluated(tmp_path, [seen], [StepScores(seen.id, SEEN, [1.0, 1.0, 1.0])])


# --- published samples --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_eight_published_samples_of_a_hundred_problems(datasets_dir: Path, tmp_path: Path) -> None:
    path = datasets_dir / "recorded_outputs" / "qwen25math_math_cot_100x8.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"no {path.name} in the datasets")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        published = [json.loads(line) for line in file]
    rows, scores = [], []
    for row in published:
        for k in range(8):
            one = sample(k, row["pred"][k] or None, row["gt"], f"m{row['idx']}")
            rows.append(replace(one, is_correct=row["score"][k]))
            scores.append(OutcomeScore(one.id, one.problem_id, row["pred_score"][k][0]))
    write_records(tmp_path / "samples.jsonl", rows)
    write_records(tmp_path / "rm.jsonl", scores)
    stage = Evaluate(scores={"rm": str(tmp_path / "rm.jsonl")})
    result = stage.run(str(tmp_path / "samples.jsonl"), context(tmp_path / "e.json"))
    means = {name: row["mean"] for name, row in {**result["accuracy"], **result["pass_at_k"]}.items()}
    assert (means["mean"], means["pass_at_1"]) == (0.91, 0.91)
    assert means["pass_at_8"] == sum(any(row["score"]) for row in published) / 100
    best = [row["score"][max(range(8), key=lambda k: row["pred_score"][k][0])] for row in published]
    assert means["best_of_8_rm"] == sum(best) / 100
    voted = []
    for row in published:
        counts = Counter(pred for pred in row["pred"] if pred)
        voted.append(any(right for pred, right in zip(row["pred"], row["score"], strict=True)
                         if counts and pred == counts.most_common(1)[0][0]))  # fmt: skip
    assert means["majority_8"] == pytest.approx(sum(voted) / 100, abs=0.01)  # equal numbers written in two ways
    assert means["mean"] <= means["majority_8"] <= means["pass_at_8"]
    assert means["weighted_8_rm"] <= means["pass_at_8"]
