"""How well step scores judge: figures by hand, thresholds against brute force, what is left out."""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.data.examples.token_examples import is_held_out
from espalier.data.jsonl import write_records
from espalier.data.process_data.formats import read_labelled, step_format
from espalier.data.records import AnnotatedSolution, BadInput, StepScores
from espalier.pipeline.prm.evaluate_prm_benchmarks import EvaluatePRMBenchmarks
from espalier.pipeline.prm.step_score_metrics import (
    best_threshold,
    candidate_thresholds,
    figure_intervals,
    first_error_counts,
    first_error_figures,
    predict_first_error,
    right_thresholds,
    step_counts,
    step_figures,
    tune_first_error,
    tune_steps,
)
from espalier.pipeline.stage import StageContext


def judged(number: int, first_error: int | None, num_steps: int = 3, **info: Any) -> AnnotatedSolution:
    """Problem and id by number; all steps are labelled unless the first error is not known."""
    known = [1.0 if first_error == -1 or index < (first_error or 0) else 0.0 for index in range(num_steps)]
    labels: list[float | None] = [None] * num_steps if first_error is None else list(known)
    return AnnotatedSolution(f"s{number}", f"p{number}", "Q", ["x"] * num_steps, labels, first_error, None, info=info)


def evaluate(
    tmp_path: Path, rows: Sequence[AnnotatedSolution], scores: Sequence[list[float]], **options: Any
) -> dict[str, Any]:
    write_records(tmp_path / "labelled.jsonl", rows)
    write_records(
        tmp_path / "scores.jsonl",
        [StepScores(row.id, row.problem_id, own) for row, own in zip(rows, scores, strict=True)],
    )
    context = StageContext(None, tmp_path / "judging.json", 10.0)
    return EvaluatePRMBenchmarks(str(tmp_path / "scores.jsonl"), **options).run(
        str(tmp_path / "labelled.jsonl"), context
    )


def means(figures: dict[str, Any]) -> dict[str, float | None]:
    return {name: None if figure is None else figure["mean"] for name, figure in figures.items()}


@pytest.mark.parametrize(
    ("scores", "threshold", "predicted"),
    [([0.9, 0.4, 0.1], 0.5, 1), ([0.9, 0.5], 0.5, -1), ([0.9, 0.4], 0.3, -1), ([0.0], 0.0, -1), ([], 0.5, -1)],
)
def test_the_first_score_below_the_threshold_is_the_predicted_error(
    scores: list[float], threshold: float, predicted: int
) -> None:
    assert predict_first_error(scores, threshold) == predicted


def test_f1_is_the_harmonic_mean_of_the_two_accuracies(tmp_path: Path) -> None:
    """At 1/2: of four with an error one is found, of two without one is passed: 2 x 1/4 x 1/2 / (3/4) = 1/3."""
    rows = [judged(n, first) for n, first in enumerate([0, 1, 2, 2, -1, -1])]
    scores = [[0.1, 0.9, 0.9], [0.1, 0.1, 0.9], [0.9, 0.9, 0.9], [0.9, 0.4, 0.1], [0.5, 0.9, 0.9], [0.4, 0.9, 0.9]]
    found = evaluate(tmp_path, rows, scores, threshold=0.5)["first_error"]
    assert means(found["overall"]) == {
        "f1": pytest.approx(1 / 3, abs=1e-5),
        "accuracy": pytest.approx(2 / 6, abs=1e-5),
        "accuracy_with_error": 0.25,
        "accuracy_without_error": 0.5,
    }
    assert (found["num_rows"], found["num_with_error"], found["num_without_error"]) == (6, 4, 2)
    assert (found["threshold"], found["tuning"]) == (0.5, None)
    assert found["overall"]["f1"]["n"] == 6


def test_f1_is_zero_where_nothing_is_right_and_unknown_where_a_kind_is_missing(tmp_path: Path) -> None:
    rows = [judged(0, 0), judged(1, -1)]
    assert means(evaluate(tmp_path, rows, [[0.9] * 3, [0.1] * 3], threshold=0.5)["first_error"]["overall"])["f1"] == 0
    only = means(evaluate(tmp_path, rows[:1], [[0.1] * 3], threshold=0.5)["first_error"]["overall"])
    assert only == {"f1": None, "accuracy": 1.0, "accuracy_with_error": 1.0, "accuracy_without_error": None}


def test_step_figures_by_hand() -> None:
    """Right steps: 3 of 4 passed; wrong steps: 1 of 2 marked. F1 = 6 / (6 + 1 + 1), negative F1 = 2 / (2 + 1 + 1)."""
    one = step_counts([0.9, 0.8, 0.1, 0.7], [1.0, 1.0, 0.0, 0.0], 0.5)
    two = step_counts([0.2, 0.9, 0.3], [1.0, 1.0, None], 0.5)
    assert (one, two) == ([2, 1, 1, 0, 1, 1], [1, 0, 0, 1, 0, 0])
    figures = step_figures(np.asarray([*(a + b for a, b in zip(one, two, strict=True)), 0.5, 2]))
    assert {name: float(value) for name, value in figures.items()} == {
        "prm_score": 0.5 * 0.75 + 0.5 * 0.5,
        "f1": 0.75,
        "negative_f1": 0.5,
        "precision": 0.75,
        "recall": 0.75,
        "negative_precision": 0.5,
        "negative_recall": 0.5,
        "step_accuracy": pytest.approx(4 / 6),
        "first_error_marked": 1.0,
        "similarity": 0.25,
    }


def test_the_first_wrong_step_is_marked_whatever_comes_before_it() -> None:
    assert step_counts([0.1, 0.2, 0.9], [1.0, 0.0, 0.0], 0.5)[4:] == [1, 1]
    assert step_counts([0.1, 0.9, 0.1], [1.0, 0.0, 0.0], 0.5)[4:] == [0, 1]


def pairs() -> tuple[list[AnnotatedSolution], list[list[float]]]:
    """Two pairs of one problem: the original wins the first by its product, loses the second, ties by its last."""
    rows, scores = [], []
    for name, group, good, bad in (
        ("a", "circular", [0.9, 0.5], [0.9, 0.1]),
        ("b", "deception", [0.2, 0.5], [0.9, 0.5]),
    ):
        pair = {"pair": name}
        rows += [
            AnnotatedSolution(f"{name}/m", "p", "Q", ["x", "y"], [1.0, 0.0], 1, None,
                          info={**pair, "group": group, "is_chosen": False}),
            AnnotatedSolution(f"{name}/o", "p", "Q", ["x", "y"], [1.0, 1.0], -1, True,
                          info={**pair, "group": "original", "is_chosen": True}),
        ]  # fmt: skip
        scores += [bad, good]
    return rows, scores


def test_pairs_are_won_by_the_higher_aggregate_and_a_tie_is_half(tmp_path: Path) -> None:
    rows, scores = pairs()
    found = evaluate(tmp_path, rows, scores, threshold=0.3)["pairs"]
    wins = {how: means(found[how]["overall"])["pair_accuracy"] for how in ("product", "minimum", "last", "mean")}
    assert wins == {"product": 0.5, "minimum": 0.5, "last": 0.75, "mean": 0.5}
    assert means(found["last"]["groups"]["deception"])["pair_accuracy"] == 0.5
    assert found["num_pairs"] == 2


def test_originals_count_in_their_own_group_only(tmp_path: Path) -> None:
    """At 0.3: modified steps: TP 2, TN 1, FP 1. The originals: TP 3, FN 1. Shares passed: 1/2 and 1, 1 and 1/2."""
    rows, scores = pairs()
    found = evaluate(tmp_path, rows, scores, threshold=0.3)["steps"]
    overall, original = means(found["overall"]), means(found["groups"]["original"])
    assert overall["prm_score"] == pytest.approx(0.5 * 4 / 5 + 0.5 * 2 / 3, abs=1e-5)
    assert overall["similarity"] == 0.5
    assert [original[name] for name in ("recall", "f1", "negative_f1", "prm_score", "similarity")] == [
        0.75, pytest.approx(6 / 7, abs=1e-5), None, None, None,
    ]  # fmt: skip
    assert (found["num_rows"], found["num_steps"]) == (2, 4)
    circular, deception = (means(found["groups"][name])["prm_score"] for name in ("circular", "deception"))
    assert (circular, deception) == (1.0, pytest.approx(0.5 * 2 / 3, abs=1e-5))
    assert found["mean_over_groups"]["prm_score"]["mean"] == pytest.approx((1 + 1 / 3) / 2, abs=1e-5)


def test_two_solutions_on_one_side_of_a_pair_are_named(tmp_path: Path) -> None:
    rows, scores = pairs()
    rows[3] = replace(rows[1], id="c/o")
    with pytest.raises(BadInput, match="'c/o': two solutions of the pair 'a' are on one side"):
        evaluate(tmp_path, rows, scores, threshold=0.3)


def test_half_a_pair_is_left_out_and_counted(tmp_path: Path) -> None:
    rows, scores = pairs()
    result = evaluate(tmp_path, rows[:3], scores[:3], threshold=0.3)
    assert result["pairs"]["num_pairs"] == 1
    assert result["left_out"] == {"of a pair, the other is missing": 1}


def test_what_cannot_be_evaluated_is_left_out_and_counted(tmp_path: Path) -> None:
    rows = [judged(0, 0), judged(1, -1), judged(2, None), judged(3, -1, 0), judged(4, -1, defect="so")]
    scores = [[0.1] * 3, [0.9] * 3, [0.9] * 3, [], [0.1] * 3]
    result = evaluate(tmp_path, rows, scores, threshold=0.5, skip_defects=True)
    assert result["left_out"] == {
        "no step": 1, "published judgement contradicts itself": 1, "first error not known": 1, "no judged step": 1,
    }  # fmt: skip
    assert means(result["first_error"]["overall"])["f1"] == 1.0
    with_defects = evaluate(tmp_path, rows, scores, threshold=0.5)["first_error"]["overall"]
    assert means(with_defects)["accuracy_without_error"] == 0.5


def test_the_threshold_is_chosen_on_other_problems_than_those_reported(tmp_path: Path) -> None:
    """Every problem is separable at 0.6 but for those of the tuning share, which are separable at 0.2."""
    rows, scores = [], []
    for number in range(60):
        low = 0.1 if is_held_out(f"p{number}", 0.4) else 0.5
        rows.append(judged(number, 1 if number % 2 else -1))
        scores.append([low + 0.2, low if number % 2 else low + 0.2, low + 0.2])
    found = evaluate(tmp_path, rows, scores, tune_share=0.4)["first_error"]
    num_tuned = sum(is_held_out(row.problem_id, 0.4) for row in rows)
    assert found["tuning"] == {"share": 0.4, "num_problems": num_tuned, "num_rows": num_tuned, "f1": 1.0}
    assert 0.1 < found["threshold"] <= 0.3
    assert found["num_rows"] == 60 - num_tuned
    assert means(found["overall"])["f1"] == 0.0  # no score is below 0.3: no error is ever found
    assert means(found["overall"])["accuracy_without_error"] == 1.0


def test_a_tuning_share_without_errors_gives_no_threshold(tmp_path: Path) -> None:
    rows = [judged(number, -1) for number in range(8)]
    with pytest.raises(BadInput, match="nothing to evaluate"):
        evaluate(tmp_path, rows, [[0.9] * 3] * 8)


def brute_force_f1(scores: list[list[float]], first_errors: list[int], threshold: float) -> float:
    hits = {True: [], False: []}  # type: dict[bool, list[bool]]
    for row, first in zip(scores, first_errors, strict=True):
        below = [index for index, score in enumerate(row) if score < threshold]
        hits[first >= 0].append((below[0] if below else -1) == first)
    finding, passing = (sum(part) / len(part) if part else math.nan for part in (hits[True], hits[False]))
    return 2 * finding * passing / (finding + passing) if finding + passing != 0 else 0.0


def brute_force_score(scores: list[list[float]], labels: list[list[float]], threshold: float) -> float:
    steps = [
        (s >= threshold, x == 1)
        for row, truth in zip(scores, labels, strict=True)
        for s, x in zip(row, truth, strict=True)
    ]
    tp, tn = steps.count((True, True)), steps.count((False, False))
    fp, fn = steps.count((True, False)), steps.count((False, True))
    if tp + fn == 0 or tn + fp == 0:
        return math.nan
    precision, recall = tp / (tp + fp) if tp + fp else 0.0, tp / (tp + fn)
    negative_precision, negative_recall = tn / (tn + fn) if tn + fn else 0.0, tn / (tn + fp)
    parts = [
        2 * p * r / (p + r) if p + r else 0.0 for p, r in ((precision, recall), (negative_precision, negative_recall))
    ]
    return sum(parts) / 2


SOLUTION = st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0]), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(st.lists(SOLUTION, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_the_chosen_threshold_is_as_good_as_the_best_of_all(scores: list[list[float]], rng: random.Random) -> None:
    first_errors = [rng.randrange(-1, len(row)) for row in scores]
    labels = [
        [float(first < 0 or index < first) for index in range(len(row))]
        for row, first in zip(scores, first_errors, strict=True)
    ]
    grid = [0.0, *(x / 200 for x in range(1, 201)), 1.5]
    for tuned, best in (
        (tune_first_error(scores, first_errors, "f1"), [brute_force_f1(scores, first_errors, t) for t in grid]),
        (tune_steps(scores, labels), [brute_force_score(scores, labels, t) for t in grid]),
    ):  # fmt: skip
        known = [value for value in best if not math.isnan(value)]
        if not known:
            assert tuned is None
            continue
        assert tuned is not None
        assert tuned[1] == pytest.approx(max(known))
    tuned = tune_first_error(scores, first_errors, "f1")
    if tuned is not None:
        assert brute_force_f1(scores, first_errors, tuned[0]) == pytest.approx(tuned[1])
    tuned = tune_steps(scores, labels)
    if tuned is not None:
        assert brute_force_score(scores, labels, tuned[0]) == pytest.approx(tuned[1])


@given(SOLUTION, st.integers(-1, 3), st.floats(0, 1.2))
def test_the_right_thresholds_are_exactly_those_with_a_right_prediction(
    scores: list[float], first_error: int, threshold: float
) -> None:
    first_error = min(first_error, len(scores) - 1)
    low, high = right_thresholds(scores, first_error)
    assert (low < threshold <= high) == (predict_first_error(scores, threshold) == first_error)
    hit = first_error_counts(scores, first_error, threshold)
    assert hit[0] + hit[2] == float(low < threshold <= high)


def test_candidates_stand_between_neighbouring_scores() -> None:
    assert candidate_thresholds([0.2, 0.6, 0.2]).tolist() == pytest.approx([0.1, 0.4, 0.8])
    assert candidate_thresholds([0.0, 1.0]).tolist() == [0.0, 0.5, math.nextafter(1, 2)]
    near = math.nextafter(0.5, 1)
    assert candidate_thresholds([0.5, near]).tolist()[1] == near


def test_among_equal_thresholds_the_one_nearest_to_one_half_is_chosen() -> None:
    values = np.asarray([math.nan, 0.7, 0.7, 0.7, 0.1])
    assert best_threshold(np.asarray([0.1, 0.2, 0.4, 0.7, 0.9]), values) == (0.4, 0.7)
    assert best_threshold(np.asarray([0.1]), np.asarray([math.nan])) is None


def test_intervals_draw_problems_and_not_solutions() -> None:
    """One problem with a hundred solutions: every draw is the same, so the interval is a point."""
    counts = np.asarray([[30.0, 60.0, 20.0, 40.0]])
    assert figure_intervals(counts, first_error_figures)["f1"] == {"mean": 0.5, "low": 0.5, "high": 0.5, "n": 1}


def test_the_interval_of_a_mean_is_close_to_the_normal_one() -> None:
    """100 problems, half found: 0.5 +- 1.96 x 0.05."""
    counts = np.asarray([[float(n % 2), 1.0, 0.0, 0.0] for n in range(100)])
    found = figure_intervals(counts, first_error_figures)["accuracy"]
    assert found is not None
    assert (found["low"], found["high"]) == (pytest.approx(0.402, abs=0.011), pytest.approx(0.598, abs=0.011))
    assert found == figure_intervals(counts, first_error_figures)["accuracy"]


@pytest.mark.parametrize(
    ("scores", "options", "said"),
    [
        ([[0.1, 0.2]], {}, "'s0' has 2 scores and 3 steps"),
        ([[0.1, 0.2, 1.5]], {}, r"'s0' has a score outside \[0, 1\]: 1.5"),
        ([[0.1] * 3], {"threshold": 2.0}, r"threshold must be null or lie in \[0, 1\]"),
        ([[0.1] * 3], {"threshold": None, "tune_share": 0.0}, "tune_share must lie between 0 and 1"),
        ([[0.1] * 3], {"tune_for": "auc"}, "tune_for must be f1 or accuracy"),
    ],
)
def test_scores_and_settings_that_do_not_fit_are_named(
    scores: list[list[float]], options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=said):
        evaluate(tmp_path, [judged(0, 1)], scores, **{"threshold": 0.5, **options})


def test_a_solution_without_scores_is_named(tmp_path: Path) -> None:
    write_records(tmp_path / "labelled.jsonl", [judged(0, 1)])
    write_records(tmp_path / "scores.jsonl", [StepScores("other", "p", [0.5])])
    with pytest.raises(BadInput, match="'s0' has 0 scores and 3 steps: score these solutions"):
        EvaluatePRMBenchmarks(str(tmp_path / "scores.jsonl"), 0.5).run(
            str(tmp_path / "labelled.jsonl"), StageContext(None, tmp_path / "out.json", 10.0)
        )


def test_a_table_of_all_figures_is_part_of_the_document(tmp_path: Path) -> None:
    rows, scores = pairs()
    result = evaluate(tmp_path, rows, scores, threshold=0.3)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    metrics = [row["metric"] for row in result["table"]["rows"]]
    assert "steps prm_score (circular)" in metrics
    assert "pairs by product pair_accuracy" in metrics


def test_a_scorer_that_knows_the_labels_is_perfect_on_the_published_sets(datasets_dir: Path, tmp_path: Path) -> None:
    for name, file in (("processbench", "processbench/gsm8k.json"),
                       ("bigbench_mistake", "bigbench_mistake/multistep_arithmetic.jsonl"),
                       ("prmbench", "prmbench/prm800k_test_p1_4o_circular.jsonl")):  # fmt: skip
        rows = list(read_labelled(datasets_dir / file, step_format(name)))
        scores = [[0.9 if label is None or label else 0.2 for label in row.labels] for row in rows]
        result = evaluate(tmp_path, rows, scores)
        assert means(result["first_error"]["overall"])["f1"] == 1.0
        assert 0.2 < result["first_error"]["threshold"] <= 0.9
        assert means(result["steps"]["overall"])["prm_score"] == 1.0
        assert result["left_out"].get("first error not known", 0) == sum(row.first_error is None for row in rows)
