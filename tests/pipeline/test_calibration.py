"""Calibration: the error against an independent computation, what counts as wrong, and claims of long texts."""

import math
import random
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.analysis.reliability_figure import DrawReliability
from espalier.data.forecasts import AnswerForecast, CheckedClaim
from espalier.data.jsonl import read_records, write_json, write_records
from espalier.data.records import BadInput, Trajectory
from espalier.data.tasks.qa_world import QAWorld
from espalier.pipeline.evaluation.calibration_metrics import (
    bin_shares,
    bins_with_intervals,
    brier_score,
    calibration_bins,
    calibration_error,
)
from espalier.pipeline.evaluation.measure_calibration import MeasureCalibration, pooled_claims
from espalier.pipeline.evaluation.read_forecasts import ReadForecasts
from espalier.pipeline.stage import StageContext


def reference_error(rows: list[tuple[Fraction, int]], num_bins: int, is_equal_count: bool) -> Fraction:
    """The published definitions in exact fractions. Equal width (Guo et al. 2017, eq. 3): I_m = ((m - 1) / M, m / M],
    and 0 in the first. Equal count (Nguyen and O'Connor 2015): sorted rows in consecutive parts, the first N mod M one
    row larger; in each place among equal confidences stands the mean of their outcomes."""
    if is_equal_count:
        of_score: dict[Fraction, list[int]] = {}
        for score, value in rows:
            of_score.setdefault(score, []).append(value)
        ordered = [(score, Fraction(sum(of_score[score]), len(of_score[score]))) for score, _ in sorted(rows)]
        size, more = divmod(len(ordered), num_bins)
        bins = []
        for index in range(num_bins):
            taken = size + (index < more)
            bins.append(ordered[:taken])
            ordered = ordered[taken:]
    else:
        exact = [(score, Fraction(value)) for score, value in rows]
        bins = [[row for row in exact if Fraction(m - 1, num_bins) < row[0] <= Fraction(m, num_bins)
                 or (m == 1 and row[0] == 0)] for m in range(1, num_bins + 1)]  # fmt: skip
    assert sum(map(len, bins)) == len(rows)
    error = Fraction(0)
    for part in filter(None, bins):
        confidence = Fraction(sum(score for score, _ in part), len(part))
        accuracy = Fraction(sum(value for _, value in part), len(part))
        error += Fraction(len(part), len(rows)) * abs(accuracy - confidence)
    return error


def our_error(rows: list[tuple[Fraction, int]], num_bins: int, is_equal_count: bool) -> float | None:
    scores, values = (np.asarray([float(row[column]) for row in rows]) for column in (0, 1))
    return calibration_error(scores, values, np.ones(len(rows)), num_bins, is_equal_count)


@st.composite
def stated(draw: st.DrawFn) -> tuple[list[tuple[Fraction, int]], int]:
    """Rows and a number of bins, often more than rows; confidences on borders, whole percentages (many of them equal),
    0 and 1, and some that lie on no border."""
    num_bins = draw(st.integers(1, 25))
    kinds = [st.builds(Fraction, st.integers(0, size), st.just(size)) for size in (num_bins, 100, 10, 1, 997)]
    return draw(st.lists(st.tuples(st.one_of(kinds), st.integers(0, 1)), min_size=1, max_size=60)), num_bins


@pytest.mark.parametrize("is_equal_count", [True, False])
@settings(max_examples=100, deadline=None)
@given(drawn=stated())
def test_the_calibration_error_is_that_of_the_published_definitions(
    is_equal_count: bool, drawn: tuple[list[tuple[Fraction, int]], int]
) -> None:
    rows, num_bins = drawn
    error = our_error(rows, num_bins, is_equal_count)
    assert error == pytest.approx(float(reference_error(rows, num_bins, is_equal_count)), abs=1e-12)


@pytest.mark.parametrize("num_rows", [97, 1000])
@pytest.mark.parametrize("num_bins", [10, 20])
@pytest.mark.parametrize("is_equal_count", [True, False])
def test_the_calibration_error_of_many_rows_is_that_of_the_published_definitions(
    num_rows: int, num_bins: int, is_equal_count: bool
) -> None:
    rng = random.Random(num_rows + num_bins)
    scores = [Fraction(rng.choice([rng.random(), rng.randint(0, 20) / 32])) for _ in range(num_rows)]
    rows = [(score, int(rng.random() < score**2)) for score in scores]
    error = our_error(rows, num_bins, is_equal_count)
    assert error == pytest.approx(float(reference_error(rows, num_bins, is_equal_count)), abs=1e-12)


def test_a_confidence_on_a_border_is_of_the_bin_below_it() -> None:
    for num_bins in range(1, 101):
        stated_shares = [Fraction(k, size) for size in (num_bins, 100) for k in range(size + 1)]
        shares = bin_shares(np.asarray(stated_shares, dtype=np.float64), np.ones(len(stated_shares)), num_bins, False)
        assert shares.argmax(axis=0).tolist() == [max(math.ceil(share * num_bins) - 1, 0) for share in stated_shares]


def test_weights_are_repeated_rows() -> None:
    rng = random.Random(0)
    scores = np.asarray([rng.choice([0.1, 0.5, 0.9, 1.0]) for _ in range(60)])
    values = np.asarray([float(rng.random() < 0.5) for _ in range(60)])
    weights = np.asarray([float(rng.randint(0, 3)) for _ in range(60)])
    repeated = np.repeat(np.arange(60), weights.astype(int))
    for is_equal_count in (True, False):
        whole = calibration_error(scores[repeated], values[repeated], np.ones(len(repeated)), 7, is_equal_count)
        assert calibration_error(scores, values, weights, 7, is_equal_count) == pytest.approx(whole)


def test_no_row_is_dropped_and_equal_confidences_are_parted_alike() -> None:
    scores = np.asarray([0.9] * 7 + [1.0] * 6)
    shares = bin_shares(scores, np.ones(13), 5, is_equal_count=True)
    assert shares.sum(axis=0) == pytest.approx(np.ones(13))
    assert shares.sum(axis=1) == pytest.approx([3, 3, 3, 2, 2])
    values = np.asarray([1.0, 0, 1, 0, 1, 1, 0, 1, 1, 1, 1, 0, 1])
    order = [*range(6, -1, -1), *range(12, 6, -1)]
    ones = np.ones(13)
    error = calibration_error(scores, values, ones, 5, True)
    assert calibration_error(scores[order], values[order], ones, 5, True) == pytest.approx(error)


def test_bins_by_hand() -> None:
    bins = calibration_bins([0.2, 0.4, 0.9, 0.9], [0.0, 1.0, 1.0, 0.0], 2, is_equal_count=True)
    assert bins == [{"score": 0.3, "value": 0.5, "count": 2}, {"score": 0.9, "value": 0.5, "count": 2}]
    assert brier_score(np.asarray([0.2, 0.9]), np.asarray([0.0, 1.0]), np.ones(2)) == pytest.approx((0.04 + 0.01) / 2)
    rows = bins_with_intervals(
        ["a", "b", "c", "d"], np.asarray([0.2, 0.2, 0.9, 0.9]), np.asarray([0, 1, 1, 1.0]), 2, False
    )
    assert (rows[0]["low"], rows[0]["high"]) == (0.0, 1.0)
    assert (rows[1]["low"], rows[1]["high"]) == (1.0, 1.0)


def forecast(name: str, probabilities: list[float], is_correct: bool) -> AnswerForecast:
    answers = [f"answer {index}" for index in range(len(probabilities))]
    return AnswerForecast(name, name, answers, probabilities, 0.0, is_correct)


def measure(path: Path, rows: list[AnswerForecast] | list[CheckedClaim], kind: str = "answers") -> dict:
    write_records(path / "rows.jsonl", rows)
    return MeasureCalibration(kind, 2, 100).run(str(path / "rows.jsonl"), StageContext(None, path / "m.json", 10.0))


def test_an_empty_response_is_wrong_with_full_confidence(tmp_path: Path) -> None:
    found = measure(tmp_path, [forecast("a", [], False), forecast("b", [0.3, 0.6], True)])
    figures = {name: row["mean"] for name, row in found["figures"].items()}
    assert found["num_without_answer"] == 1
    assert figures["accuracy"] == 0.5
    assert figures["confidence"] == pytest.approx(0.8)
    assert figures["brier"] == pytest.approx((1 + 0.16) / 2)
    assert figures["ece"] == pytest.approx((1 + 0.4) / 2)
    with pytest.raises(BadInput, match="offers no answer"):
        forecast("c", [], True)


def test_without_confidences_the_error_is_one_minus_the_accuracy(tmp_path: Path) -> None:
    found = measure(tmp_path, [forecast(str(index), [1.0], index < 3) for index in range(4)])
    assert found["figures"]["ece"]["mean"] == pytest.approx(0.25)


def test_claims_are_pooled_without_opinions_and_with_alternatives_once(tmp_path: Path) -> None:
    claims = [
        CheckedClaim("1", "t", "He was born in Rome.", True),
        CheckedClaim("2", "t", "He was likely a smith.", False, alternatives="job"),
        CheckedClaim("3", "t", "He was possibly a cook.", True, alternatives="job"),
        CheckedClaim("4", "t", "He was wonderful.", False, is_subjective=True),
        CheckedClaim("5", "u", "She sang.", True, confidence=0.4, alternatives="job"),
    ]
    rows = [(row.confidence, row.is_correct) for row in pooled_claims(claims)]
    assert rows == [(1.0, True), (0.75, False), (0.4, True)]
    found = measure(tmp_path, claims, "claims")
    assert found["num_rows"] == 3
    assert found["figures"]["accuracy"]["mean"] == pytest.approx(2 / 3, abs=1e-5)
    assert found["figures"]["accuracy"]["n"] == 2


def test_forecasts_of_the_world_know_the_truth(tmp_path: Path) -> None:
    task = QAWorld(num_test=4)
    problems = task.problems("test")

    def sampled(index: int, response: str, finish: str = "stop") -> Trajectory:
        grade = task.grade(problems[index].gold, response)
        is_right, name = grade.is_correct and finish == "stop", problems[index].id
        return Trajectory(f"{name}/0", name, "?", response, [response], [1], [2], [1], finish, problems[index].gold,
                          grade.answer, is_right)  # fmt: skip

    gold, other = problems[0].gold, next(a for a in problems[1].info["probabilities"] if a != problems[1].gold)
    rows = [
        sampled(0, f"<answer>{gold}</answer> <confidence>0.7</confidence>"),
        sampled(1, f"Answer: {other}\nConfidence: 20%"),
        sampled(2, f"<answer>{problems[2].gold}</answer> <confidence>70%</confidence>"),
        sampled(3, f"Answer: {problems[3].gold}\nConfidence: 70%", "length"),
    ]
    write_records(tmp_path / "t.jsonl", rows)
    context = StageContext(task, tmp_path / "f.jsonl", 10.0)
    write_records(tmp_path / "f.jsonl", ReadForecasts("test").run(str(tmp_path / "t.jsonl"), context))
    found = read_records(AnswerForecast, tmp_path / "f.jsonl")
    assert [row.is_correct for row in found] == [True, False, False, False]
    assert [row.confidence for row in found] == [0.7, 0.2, 1.0, 1.0]
    truths = [problems[0].info["probabilities"][gold], problems[1].info["probabilities"][other], 0.0, 0.0]
    assert [row.true_probability for row in found] == pytest.approx(truths)
    assert context.counts == {"cut": 1, "without_answer": 1}


def test_the_diagram_shows_every_bin_and_refuses_another_file(tmp_path: Path) -> None:
    found = measure(tmp_path, [forecast(str(index), [index / 10], index > 5) for index in range(10)])
    write_json(tmp_path / "m.json", found)
    figure = DrawReliability([], ["one"]).run(str(tmp_path / "m.json"), StageContext(None, tmp_path, 10.0))
    assert figure.count("answers: stated") == 2
    several = DrawReliability([str(tmp_path / "m.json")] * 6, list("abcdefg"))
    figure = several.run(str(tmp_path / "m.json"), StageContext(None, tmp_path, 10.0))
    assert [figure.count(f'class="line c{kind}"') for kind in range(8)] == [2, 2, 1, 1, 1, 0, 0, 0]
    assert figure.count('stroke-dasharray="5 4"') == 2, "colours come again, dashed"
    with pytest.raises(BadInput, match="tells 10 lines apart, got 11"):
        DrawReliability(["x"] * 10, ["y"] * 11)
    write_json(tmp_path / "other.json", {})
    with pytest.raises(BadInput, match="measure_calibration"):
        DrawReliability([], ["one"]).run(str(tmp_path / "other.json"), StageContext(None, tmp_path, 10.0))
