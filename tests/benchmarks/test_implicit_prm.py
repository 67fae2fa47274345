"""Figures and table of the benchmark of implicit process reward models, from records by hand."""

from typing import Any

import pytest

from benchmarks.credit.implicit_prm import JOINS, LOSSES, figures_of, rows_of


def record(shift: float) -> dict[str, Any]:
    names = [f"{loss}_{how}" for loss in LOSSES for how in JOINS]
    auc = {name: {"mean": 0.6 + 0.01 * number + shift} for number, name in enumerate(names)}
    return {
        "auc": auc | {"monte_carlo": {"mean": 0.62}},
        "index_auc": {"mean": 0.55},
        "tokens": {"solutions": 100_000, "completions": 300_000},
    }


def test_a_loss_is_compared_with_monte_carlo_values_seed_by_seed_in_one_way_that_was_chosen_before() -> None:
    found = figures_of("rule_logic", [record(0.0), record(0.02)])
    assert list(found) == [f"rule_logic_{loss}_minus_monte_carlo" for loss in LOSSES]
    ce, dpo = (found[f"rule_logic_{loss}_minus_monte_carlo"] for loss in ("ce", "dpo"))
    assert (ce["value"], ce["met"], ce["unit"]) == (-0.01, False, "AUC, 2 seeds")
    assert (dpo["value"], dpo["met"]) == (0.02, False)  # two seeds: the interval reaches below 0
    alike = figures_of("rule_logic", [record(shift) for shift in (0.0, 0.001, 0.002)])[
        "rule_logic_dpo_minus_monte_carlo"
    ]
    assert (alike["value"], alike["met"]) == (0.011, True)
    assert alike["low"] == pytest.approx(0.011 - 4.303 * 0.001 / 3**0.5, abs=1e-4)
    rows = rows_of("rule_logic", [record(0.0), record(0.02)])
    assert rows[0] == ["rule_logic", "step's index alone", "", "", "0.550", 2]
    assert rows[1] == ["rule_logic", "Monte-Carlo values", "0.40", "", "0.620", 2]
    assert rows[3] == ["rule_logic", "implicit, ce", "0.10", "sum", "0.620", 2]
    assert len(rows) == 2 + len(LOSSES) * len(JOINS)
