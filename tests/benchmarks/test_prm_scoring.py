"""Figures of the benchmark of published reward models, from numbers by hand; what a stopped run keeps."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.result import kept
from benchmarks.road import prm_scoring
from benchmarks.road.prm_scoring import (
    AS_CLASSIFIERS,
    AS_PUBLISHED,
    EXACT,
    LAYOUTS,
    engine_words,
    exact_part,
    gaps_part,
    largest_gap,
    measure,
    merged,
    solutions,
    speed_part,
)
from benchmarks.road.road import SECTIONS, runs_table
from espalier.data.jsonl import write_json


def test_engines_and_the_loop_compute_in_the_precision_that_the_stage_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_fast, dtype, name in ((True, "bfloat16", "bf16"), (False, "float32", "fp32")):
        monkeypatch.setattr("espalier.models.precision.has_fast_bf16", lambda kind, is_fast=is_fast: is_fast)
        assert f"client.dtype={dtype}" in engine_words()
        assert prm_scoring.precision() == name
        with prm_scoring.autocast(torch.device("cpu")):
            assert torch.is_autocast_enabled("cpu") == is_fast


def test_one_model_that_is_not_exact_misses_the_goal() -> None:
    assert len(EXACT) == 16
    figure = exact_part(15, ["TRL"])["figures"]["published_prms_exact"]
    assert (figure["value"], figure["goal"], figure["met"]) == (15, 16, False)
    assert exact_part(16, [])["figures"]["published_prms_exact"]["met"]


def test_a_test_that_fails_or_is_not_there_is_a_model_that_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model has its test but one, whose test failed, and one, of whose cases one did."""

    def pytest_run(command: list[str], **settings: Any) -> None:
        path = next(word.removeprefix("--junitxml=") for word in command if word.startswith("--junitxml="))
        names = {test: "" for model, test in EXACT.items() if model not in ("PQM", "TRL", "PURE")}
        names |= {EXACT["PQM"]: "<failure/>", f"{EXACT['TRL']}-True]": "", f"{EXACT['TRL']}-False]": "<skipped/>"}
        cases = "".join(f'<testcase name="{name}">{inner}</testcase>' for name, inner in names.items())
        Path(path).write_text(f"<testsuite>{cases}</testsuite>")

    monkeypatch.setattr(prm_scoring.subprocess, "run", pytest_run)
    found, wrong = prm_scoring.exact()
    assert found == 13
    assert set(wrong) == {"PQM", "TRL", "PURE"}


def test_the_widest_layout_is_the_figure_and_its_goal_is_the_precisions() -> None:
    found = {"qwen": {"gap": 0.02, "lowest": 0.1, "highest": 0.9}, "pqm": {"gap": 1e-5, "lowest": 0.2, "highest": 0.8}}
    part = gaps_part(found, "fp32")
    figure = part["figures"]["scores_transformers_vs_vllm"]
    assert (figure["value"], figure["low"], figure["met"]) == (0.02, 1e-5, False)
    assert figure["unit"] == "score, fp32, 2 of 15 layouts"
    every = dict.fromkeys(LAYOUTS, found["qwen"])
    for some, is_met in ((found, False), (every, True)):
        assert gaps_part(some, "bf16")["figures"]["scores_transformers_vs_vllm"]["met"] is is_met
    assert part["tables"][0]["rows"] == [
        ["qwen", "published", "0.020000", "0.100 to 0.900"],
        ["pqm", "a plain classifier", "0.000010", "0.200 to 0.800"],
    ]
    assert largest_gap([[0.1, 0.5], [0.3]], [[0.1, 0.7], [0.2]]) == pytest.approx(0.2)
    with pytest.raises(ValueError, match="zip"):
        largest_gap([[0.1, 0.5]], [[0.1]])


def test_throughput_is_the_median_of_the_rounds_each_beside_its_own_loop() -> None:
    loops, stages, engines = (8.0, 10.0, 12.0, 9.0, 20.0), (2.0, 5.0, 3.0, 3.0, 4.0), (8.0, 5.0, 12.0, 9.0, 10.0)
    rounds = [
        {"loop": one, "transformers": other, "engines": third}
        for one, other, third in zip(loops, stages, engines, strict=True)
    ]
    part = speed_part(rounds, 40, "fp32")
    fast, slow = (part["figures"][name] for name in ("prm_scoring_vs_prefixes", "prm_engines_vs_prefixes"))
    assert (fast["value"], fast["low"], fast["high"], fast["met"]) == (4.0, 2.0, 5.0, True)
    assert (slow["value"], slow["met"]) == (1.0, False)
    assert part["tables"][0]["rows"][1] == ["transformers", "13.3", "8.0 to 20.0"]
    assert part["seconds"] == rounds


STAMP = {"machine": "m", "commit": "c", "date": "2020-01-01", "precision": "fp32", "load_before": 0.1}


def test_what_is_kept_is_made_again_where_settings_machine_or_commit_differ(tmp_path: Path) -> None:
    made: list[int] = []

    def make() -> int:
        made.append(len(made))
        return made[-1]

    path = tmp_path / "work" / "one.json"
    assert kept(path, {"solutions": 4}, STAMP, make) == (0, STAMP)
    later = {**STAMP, "date": "2020-01-02", "load_before": 0.2}
    assert kept(path, {"solutions": 4}, later, make) == (0, STAMP), "with the stamp of when it was made"
    assert kept(path, {"solutions": 8}, later, make) == (1, later)
    for number, (key, value) in enumerate((("machine", "n"), ("commit", "another")), 2):
        assert kept(path, {"solutions": 8}, {**STAMP, key: value}, make)[0] == number


@pytest.mark.parametrize("commit", ["0123abcd-dirty", "unknown"])
def test_nothing_is_kept_of_code_that_has_no_name(commit: str, tmp_path: Path) -> None:
    made = iter(range(2))
    stamp = {**STAMP, "commit": commit}
    assert [kept(tmp_path / "one.json", {}, stamp, lambda: next(made))[0] for _ in range(2)] == [0, 1]


def test_a_cell_is_of_the_day_of_its_oldest_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prm_scoring, "RESULTS", tmp_path)
    monkeypatch.setattr(prm_scoring, "stamp_of_now", lambda: {"machine": "m", "commit": "c", "date": "2020-01-02"})
    monkeypatch.setattr(prm_scoring, "load_before", lambda: 0.0)
    monkeypatch.setattr(prm_scoring, "precision", lambda: "fp32")
    monkeypatch.setattr(prm_scoring, "gap", lambda layout: {"gap": 0.0, "lowest": 0.1, "highest": 0.9})
    kept(tmp_path / "gap-qwen.json", {"precision": "fp32"}, STAMP, lambda: {"gap": 1e-6, "lowest": 0.2, "highest": 0.8})
    part = measure(["gaps", "--layouts", "trl", "qwen", "--work", str(tmp_path)])
    assert part["figures"]["scores_transformers_vs_vllm"]["value"] == 1e-6
    assert part["cells"]["gaps"]["made"] == STAMP


def test_a_cell_that_is_run_alone_leaves_the_others_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamp = {"machine": "m", "commit": "c", "date": "2020-01-01"}
    before = merged({"speed": {**speed_part([{"loop": 4.0, "transformers": 1.0, "engines": 2.0}], 4, "bf16"),
                               "made": stamp}})  # fmt: skip
    write_json(tmp_path / "road.json", {"detail": {"prm_scoring": before}})
    monkeypatch.setattr(prm_scoring, "RESULTS", tmp_path)
    monkeypatch.setattr(prm_scoring, "exact", lambda: (16, []))
    part = measure(["exact", "--work", str(tmp_path / "work")])
    assert list(part["figures"]) == ["published_prms_exact", "prm_scoring_vs_prefixes", "prm_engines_vs_prefixes"]
    assert part["cells"]["speed"]["made"] == stamp
    assert part["cells"]["exact"]["made"]["precision"] in ("fp32", "bf16")
    rows = runs_table({"prm_scoring": part, "streams": {"made": stamp}})["rows"]
    assert [row[0] for row in rows] == ["prm_scoring exact", "prm_scoring speed", "streams"]
    assert rows[1] == ["prm_scoring speed", "2020-01-01", "c", "m"]


def test_every_section_of_the_road_stands_in_the_scripts_header_and_is_a_module() -> None:
    root = Path(prm_scoring.__file__).resolve().parents[2]
    lines = [line for line in (root / "scripts" / "bench.sh").read_text().splitlines() if "bench.sh road" in line]
    named = {words[4] for line in lines if len(words := line.split()) > 4 and words[4] in SECTIONS}
    assert named == set(SECTIONS)
    assert not set(AS_PUBLISHED) & set(AS_CLASSIFIERS)
    assert len({row.problem_id for row in solutions(12)}) == 3
