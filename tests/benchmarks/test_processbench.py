"""Figures of the benchmark of foreign solutions, from records by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.road import processbench
from benchmarks.road.processbench import (
    INDEX,
    RANDOM,
    TRAINED,
    by_chance,
    deal,
    f1_of,
    figures_of,
    is_worthless,
    measure,
    rows_of,
    table_of,
    write_random,
)
from espalier.data.jsonl import write_records
from espalier.data.records import AnnotatedSolution, StepScores
from espalier.models.load import load_tokenizer
from espalier.models.scalar_head import load_process_reward
from espalier.pipeline.prm.evaluate_prm_benchmarks import EvaluatePRMBenchmarks
from espalier.pipeline.stage import StageContext


def judged(number: int = 120) -> list[AnnotatedSolution]:
    """Four steps each; the first error is at 0, 1, 2, 3 or nowhere, by turns."""
    rows = []
    for k in range(number):
        error = k % 5 if k % 5 < 4 else -1
        labels = [1.0 if error < 0 or step < error else 0.0 if step == error else None for step in range(4)]
        rows.append(AnnotatedSolution(f"s{k}", f"p{k}", "Q", [f"step {n}" for n in range(4)], labels, error, error < 0))
    return rows


def knowing(row: AnnotatedSolution) -> list[float]:
    """Scores of one who knows where the error is."""
    return [0.1 if step == row.first_error else 0.9 for step in range(4)]


def noise(rows: list[AnnotatedSolution]) -> list[list[float]]:
    draw = np.random.default_rng(3)
    return [[round(float(value), 6) for value in draw.random(4)] for _ in rows]


def test_a_scorer_that_knows_is_above_its_own_scores_dealt_out_and_noise_is_not() -> None:
    rows = judged()
    known = [knowing(row) for row in rows]
    assert f1_of(rows, known, 0.2) == 1.0
    chance = by_chance(rows, known, 0.2, deals=40)
    assert 0.0 <= chance["low"] <= chance["mean"] <= chance["high"] < 0.7
    assert not is_worthless({"f1": {"mean": 1.0}, "by_chance": chance})
    drawn = noise(rows)
    assert is_worthless({"f1": {"mean": f1_of(rows, drawn, 0.2)}, "by_chance": by_chance(rows, drawn, 0.2, deals=40)})


def test_scores_are_dealt_among_the_steps_of_their_index_alone() -> None:
    scores = [[0.1, 0.5, 0.9], [0.2, 0.6], [0.3]]
    dealt = deal(scores, np.random.default_rng(0))
    assert [len(row) for row in dealt] == [3, 2, 1]
    assert sorted(row[0] for row in dealt) == [0.1, 0.2, 0.3]
    assert sorted(row[1] for row in dealt if len(row) > 1) == [0.5, 0.6]
    assert dealt[0][2] == 0.9
    assert scores == [[0.1, 0.5, 0.9], [0.2, 0.6], [0.3]], "what was given is as it was"
    assert any(deal(scores, np.random.default_rng(seed)) != scores for seed in range(4))


def evaluated(tmp_path: Path, rows: list[AnnotatedSolution], scores: list[list[float]]) -> dict[str, Any]:
    """What the stage says of these scores."""
    write_records(tmp_path / "rows.jsonl", rows)
    pairs = zip(rows, scores, strict=True)
    write_records(tmp_path / "scores.jsonl", [StepScores(row.id, row.problem_id, own) for row, own in pairs])
    stage = EvaluatePRMBenchmarks(str(tmp_path / "scores.jsonl"))
    return stage.run(str(tmp_path / "rows.jsonl"), StageContext(None, tmp_path / "out.json", 10.0))


def test_rows_hold_the_stages_figures_and_refuse_scores_that_are_not_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processbench, "DEALS", 5)
    rows = judged()
    given = {TRAINED: [knowing(row) for row in rows], RANDOM: noise(rows)}
    given[TRAINED][7] = given[RANDOM][7] = []  # longer than the model takes
    tables = {name: evaluated(tmp_path, rows, scores) for name, scores in given.items()}
    by_id = {name: {row.id: own for row, own in zip(rows, scores, strict=True)} for name, scores in given.items()}
    found = rows_of(rows, tables, by_id)
    assert list(found) == [TRAINED, RANDOM, INDEX]
    assert found[TRAINED]["f1"]["mean"] == 1.0
    assert found[INDEX]["f1"] == tables[TRAINED]["index"]["first_error"]["overall"]["f1"]
    assert found[INDEX]["by_chance"] is None
    figures = figures_of(found)
    assert (figures["processbench_f1_quickstart"]["value"], figures["processbench_f1_quickstart"]["met"]) == (
        100,
        False,
    )
    assert figures["processbench_f1_random"]["met"]
    index = figures["processbench_f1_index"]
    assert (index["goal"], index["met"], index["unit"]) == (None, None, "% F1")
    assert [row[-1] for row in table_of(found, "120 solutions")["rows"]] == ["**no**", "yes", ""]
    with pytest.raises(SystemExit, match="the table's F1 is not that of its scores"):
        rows_of(rows, tables, {TRAINED: by_id[RANDOM], RANDOM: by_id[RANDOM]})
    other = {**tables[RANDOM], "left_out": {}}
    with pytest.raises(SystemExit, match="are left out: these F1 do not compare"):
        rows_of(rows, {TRAINED: tables[TRAINED], RANDOM: other}, by_id)
    others = {**by_id[RANDOM], rows[7].id: [0.5] * 4, rows[8].id: []}
    with pytest.raises(SystemExit, match="s7 and 1 more have scores of one scorer alone: these F1 do not compare"):
        rows_of(rows, tables, {TRAINED: by_id[TRAINED], RANDOM: others})


def test_the_random_model_has_the_trained_ones_shape_and_other_weights(tiny_policy: Path, tmp_path: Path) -> None:
    trained = load_process_reward(str(tiny_policy), 1)
    trained.save_pretrained(tmp_path / "trained")
    load_tokenizer(str(tiny_policy)).save_pretrained(tmp_path / "trained")
    folder = write_random(tmp_path / "trained", tmp_path / "random", 5)
    drawn = load_process_reward(str(folder))
    own, other = trained.state_dict(), drawn.state_dict()
    assert {name: weight.shape for name, weight in own.items()} == {name: w.shape for name, w in other.items()}
    assert other["score.weight"].abs().max() > 0, "its head is random too: a fresh one is zero, and says 1/2 of all"
    assert not own["model.embed_tokens.weight"].equal(other["model.embed_tokens.weight"])
    again = load_process_reward(str(write_random(tmp_path / "trained", tmp_path / "again", 5)))
    assert again.state_dict()["score.weight"].equal(other["score.weight"]), "one seed, one model"


def test_what_is_missing_is_said_before_anything_is_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        measure(["--run", str(tmp_path)])
    assert "is no model: run bash scripts/quickstart.sh first, or give --run" in capsys.readouterr().err
    (tmp_path / "prm" / "model").mkdir(parents=True)
    (tmp_path / "prm" / "model" / "config.json").write_text("{}")
    with pytest.raises(SystemExit):
        measure(["--run", str(tmp_path), "--data", str(tmp_path)])
    assert "processbench/gsm8k.json: set ESPALIER_DATA" in capsys.readouterr().err
