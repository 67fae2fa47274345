"""Figures of the benchmark of steadiness, from records by hand."""

import pytest

from benchmarks.road.prm_seeds import figures_of, measure


def test_one_seed_below_the_goal_is_counted_and_misses_it() -> None:
    rows = {seed: {"auc": auc, "loss": 0.4} for seed, auc in enumerate((0.95, 0.9199, 0.93))}
    found = figures_of(rows)
    lowest, below = found["prm_lowest_auc"], found["prm_seeds_below_goal"]
    assert (lowest["value"], lowest["high"], lowest["met"], lowest["unit"]) == (0.9199, 0.95, False, "AUC, 3 seeds")
    assert (below["value"], below["met"], below["unit"]) == (1, False, "of 3 seeds")
    del rows[1]
    assert all(figure["met"] for figure in figures_of(rows).values())


def test_a_folder_that_is_no_quick_start_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(SystemExit):
        measure(["--run", str(tmp_path_factory.mktemp("empty"))])
