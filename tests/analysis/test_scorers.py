"""The page of step scorers: every document of a folder, a column for each scorer."""

import json
from pathlib import Path

import pytest

from espalier.analysis.scorers import DOCUMENTS, ShowScorers
from espalier.data.jsonl import write_records
from espalier.data.records import AnnotatedSolution, BadInput, StepScores
from espalier.pipeline.prm.evaluate_prm_benchmarks import EvaluatePRMBenchmarks
from espalier.pipeline.stage import StageContext, run_stage
from espalier.runtime.schemas import StageConfig

ROWS = [
    AnnotatedSolution(f"s{k}", f"p{k}", "Q?", ["a", "b", "c"], [1.0, float(k % 2), float(k % 2)], -1 if k % 2 else 1,
                      None, info={"group": "first" if k % 4 else "second"})
    for k in range(40)
]  # fmt: skip


def scorer(folder: Path, good: float) -> Path:
    """A folder of a scorer that gives wrong steps 0.2 and right ones `good`, evaluated by the stage."""
    folder.mkdir()
    scores = [[0.9, *([good, good] if row.first_error == -1 else [0.2, 0.1])] for row in ROWS]
    write_records(folder / "rows.jsonl", ROWS)
    write_records(
        folder / "scores.jsonl",
        [StepScores(row.id, row.problem_id, own) for row, own in zip(ROWS, scores, strict=True)],
    )
    found = EvaluatePRMBenchmarks(str(folder / "scores.jsonl"), tune_share=0.3).run(
        str(folder / "rows.jsonl"), StageContext(None, folder / "unused", 10.0)
    )
    (folder / "prm_benchmark.json").write_text(json.dumps(found))
    meta = {
        "config": {"stage": {"model": f"org/<{folder.name}>"}},
        "counts": {"layout": "trl", "steps": 120, "too_long": 1},
    }
    (folder / "step_scores.meta.json").write_text(json.dumps(meta))
    return folder


def page(*folders: Path) -> str:
    stage = ShowScorers([str(folder) for folder in folders])
    assert len(stage.inputs()) == sum((folder / name).is_file() for folder in folders for name in DOCUMENTS)
    return stage.run("", StageContext(None, folders[0] / "page.html", 10.0))


def test_every_scorer_has_a_column_and_every_evaluation_a_table(tmp_path: Path) -> None:
    good, bad = scorer(tmp_path / "good", 0.8), scorer(tmp_path / "bad", 0.15)
    figure = {"mean": 0.75, "low": 0.5, "high": 0.9, "n": 8}
    (good / "evaluation.json").write_text(json.dumps({"accuracy": {"best_of_8_minimum": figure}, "pass_at_k": {}}))
    (good / "prm.json").write_text(json.dumps({
        "target": "values", "inner": {"auc": figure, "index_auc": figure, "ece": figure, "value_mae": None},
        "terminal": {"auc": None, "ece": figure, "value_mae": figure}}))  # fmt: skip
    text = page(good, bad)
    assert "org/&lt;good&gt;" in text
    assert "org/&lt;bad&gt;" in text
    for shown in ("First errors (ProcessBench)", "30 % of the problems", "index alone: f1", "AUC, inner steps",
                  "calibration error, last steps", "best_of_8_minimum", "75.0 [50.0, 90.0]", "0.750 [0.500, 0.900]",
                  "solutions too long, without scores", "f1 of second"):  # fmt: skip
        assert shown in text, shown
    assert "<script" not in text


def test_the_page_is_made_anew_where_a_scorer_was_evaluated_further(tmp_path: Path) -> None:
    folder = scorer(tmp_path / "1", 0.8)
    made = StageConfig(output=str(tmp_path / "scorers.html"), input="", stage={"_target_": "x"})
    assert run_stage(ShowScorers([str(folder)]), None, made) == 0
    assert "best_of_8_minimum" not in (tmp_path / "scorers.html").read_text()
    figure = {"mean": 0.75, "low": 0.5, "high": 0.9, "n": 8}
    (folder / "evaluation.json").write_text(json.dumps({"accuracy": {"best_of_8_minimum": figure}, "pass_at_k": {}}))
    assert run_stage(ShowScorers([str(folder)]), None, made) == 0
    assert "best_of_8_minimum" in (tmp_path / "scorers.html").read_text()


def test_minima_on_last_steps_are_named_for_what_they_are(tmp_path: Path) -> None:
    assert "100.0 (an outcome model in disguise)" not in page(scorer(tmp_path / "good", 0.8))
    folder = scorer(tmp_path / "late", 0.8)
    found = json.loads((folder / "prm_benchmark.json").read_text())
    found["separation"]["last_minimum"] = 0.546
    (folder / "prm_benchmark.json").write_text(json.dumps(found))
    assert "54.6 (an outcome model in disguise)" in page(folder)


def test_a_folder_without_documents_and_a_document_of_another_stage_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"holds none of prm_benchmark\.json, .*: evaluate a scorer there first"):
        ShowScorers([str(tmp_path)]).inputs()
    (tmp_path / "prm_benchmark.json").write_text("{}")
    with pytest.raises(BadInput, match="none of prm/evaluate_prm_benchmarks"):
        page(tmp_path)
