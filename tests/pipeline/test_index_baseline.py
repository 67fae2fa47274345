"""What a score that knows a step's index alone says, beside a scorer's figures."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from espalier.analysis.scorers import ShowScorers
from espalier.data.jsonl import write_records
from espalier.data.records import AnnotatedSolution, StepScores
from espalier.pipeline.prm.evaluate_prm_benchmarks import EvaluatePRMBenchmarks
from espalier.pipeline.prm.index_baseline import (
    is_right_so_far,
    is_right_step,
    scores_by_index,
    separation,
    shares_by_index,
)
from espalier.pipeline.prm.judged_scores import ScoredSolution
from espalier.pipeline.stage import StageContext


def solution(number: int, labels: list[float | None], first_error: int | None = None) -> AnnotatedSolution:
    return AnnotatedSolution(f"s{number}", f"p{number}", "Q", ["x"] * len(labels), labels, first_error, None)


ROWS = [solution(0, [1, 1, 0], 2), solution(1, [1, 0, None], 1), solution(2, [0, None], 0), solution(3, [1, 1], -1)]


def test_shares_by_index_by_hand() -> None:
    """Right so far: at index 0 three of four, at 1 two of four, at 2 none of two. Judged steps: 3/4, 2/3, 0/1."""
    assert shares_by_index(ROWS, is_right_so_far) == [0.75, 0.5, 0.0]
    assert shares_by_index(ROWS, is_right_step) == pytest.approx([0.75, 2 / 3, 0.0])


def test_indices_that_nobody_has_seen_take_the_last_share_and_a_gap_the_one_before() -> None:
    assert shares_by_index([solution(0, [1, None, 0])], is_right_step) == [1.0, 1.0, 0.0]
    assert scores_by_index(np.arange(4), [0.75, 0.5]).tolist() == [0.75, 0.5, 0.5, 0.5]
    assert scores_by_index(np.arange(2), []).tolist() == [1.0, 1.0]


def separated(scores: list[list[float]]) -> dict[str, Any] | None:
    """Of ROWS, each of a problem of its own."""
    solutions = [ScoredSolution(row.labels, row.first_error, own) for row, own in zip(ROWS, scores, strict=True)]
    return separation(range(len(ROWS)), solutions)


def test_separation_by_hand() -> None:
    """Inner steps: right 0.9, 0.2, 0.8 and 0.7, wrong 0.3 and 0.1: 7 of 8 pairs in order. The index: right at 0, 1, 0
    and 0, wrong at 1 and 0, with shares 3/4 (index 0) and 1/2 (index 1): 3 pairs won, 4 ties, 1 lost: 5/8."""
    scores = [[0.9, 0.2, 0.1], [0.8, 0.3, 0.9], [0.1, 0.9], [0.7, 0.9]]
    found = separated(scores)
    assert found is not None
    assert found["inner_auc"]["mean"] == pytest.approx(7 / 8)
    assert found["inner_auc_of_the_index"]["mean"] == pytest.approx(5 / 8)
    assert (found["num_inner"], found["num_last"]) == (6, 2)
    assert found["last_auc"]["mean"] == 1.0  # right 0.9 above wrong 0.1
    assert found["last_minimum"] == 0.25


def test_an_outcome_model_in_disguise_has_its_minima_on_last_steps() -> None:
    found = separated([[0.9, 0.9, 0.1], [0.9, 0.9, 0.1], [0.9, 0.1], [0.9, 0.9]])
    assert found is not None
    assert found["last_minimum"] == 0.75


def test_an_evaluation_shows_the_index_beside_a_scorer(tmp_path: Path) -> None:
    """First errors at index 3 of half the solutions: the index alone gets them all and calls all others wrong too, or
    none; a perfect scorer has F1 1."""
    rows = [solution(n, [1, 1, 1, 0], 3) if n % 2 else solution(n, [1, 1, 1, 1], -1) for n in range(200)]
    perfect = [StepScores(row.id, row.problem_id, [float(label or 0) for label in row.labels]) for row in rows]
    write_records(tmp_path / "rows.jsonl", rows)
    write_records(tmp_path / "scores.jsonl", perfect)
    context = StageContext(None, tmp_path / "out.json", 10.0)
    found: dict[str, Any] = EvaluatePRMBenchmarks(str(tmp_path / "scores.jsonl")).run(
        str(tmp_path / "rows.jsonl"), context
    )
    assert found["first_error"]["overall"]["f1"]["mean"] == 1.0
    assert found["index"]["first_error"]["overall"]["f1"]["mean"] == 0.0
    assert "index alone: first_error f1" in found["table"]["plain"]


def test_pairs_stand_beside_a_score_that_prefers_fewer_steps(tmp_path: Path) -> None:
    """By hand: of three pairs the chosen side has fewer steps, more, and as many: 1, 0 and 1/2."""
    lengths = {"a": (2, 3), "b": (3, 1), "c": (2, 2)}
    rows, scores = [], []
    for pair, sides in lengths.items():
        for side, num_steps in zip(("chosen", "rejected"), sides, strict=True):
            info = {"pair": pair, "is_chosen": side == "chosen"}
            steps: list[float | None] = [None] * num_steps
            rows.append(
                AnnotatedSolution(f"{pair}/{side}", pair, "Q?", ["x"] * num_steps, steps, None, None, info=info)
            )
            scores.append(StepScores(rows[-1].id, pair, [0.9 if side == "chosen" else 0.1] * num_steps))
    write_records(tmp_path / "rows.jsonl", rows)
    write_records(tmp_path / "scores.jsonl", scores)
    context = StageContext(None, tmp_path / "out.json", 10.0)
    found: dict[str, Any] = EvaluatePRMBenchmarks(str(tmp_path / "scores.jsonl")).run(
        str(tmp_path / "rows.jsonl"), context
    )
    assert found["pairs"]["last"]["overall"]["pair_accuracy"]["mean"] == 1.0
    assert found["index"]["pairs"]["fewer_steps"]["overall"]["pair_accuracy"]["mean"] == 0.5
    assert "index alone: pairs by fewer_steps pair_accuracy" in found["table"]["plain"]
    (tmp_path / "pairs.json").write_text(json.dumps(found))
    page = ShowScorers([str(tmp_path)]).run("", StageContext(None, tmp_path / "page.html", 10.0))
    assert "index alone: fewer steps" in page
