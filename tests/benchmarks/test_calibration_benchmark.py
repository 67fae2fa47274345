"""The calibration benchmark's figures, from records made by hand."""

from typing import Any

from benchmarks.calibration.calibration import ARMS, changes, figures_of


def record(seed: int, **figures: tuple[float, float]) -> dict[str, Any]:
    """A run whose figures are (before, after)."""
    names = ("ece", "accuracy", "truth_error")
    sides = [{name: {"mean": figures.get(name, (0.0, 0.0))[side]} for name in names} for side in (0, 1)]
    return {"arm": "rlcr", "seed": seed, "sft": {"figures": sides[0]}, "rl": {"figures": sides[1]}}


def test_a_change_is_after_less_before_and_met_where_its_interval_excludes_zero() -> None:
    rows = [
        record(seed, ece=(0.2, after), accuracy=(0.5, 0.5 + 0.01 * seed))
        for seed, after in enumerate((0.04, 0.05, 0.06))
    ]
    assert round(changes(rows, "ece").value, 6) == -0.15
    figures = figures_of("rlcr", rows)
    assert figures["rlcr_ece_change"]["met"]
    assert figures["rlcr_ece_change"]["high"] < 0
    assert figures["rlcr_accuracy_change"]["met"]


def test_a_fall_that_may_be_chance_and_a_single_seed_meet_nothing() -> None:
    rows = [record(seed, ece=(0.2, after)) for seed, after in enumerate((0.0, 0.3, 0.1))]
    assert not figures_of("rlcr", rows)["rlcr_ece_change"]["met"]
    single = figures_of("rlcr", rows[:1])["rlcr_ece_change"]
    assert (single["low"], single["met"]) == (None, False)


def test_a_lower_accuracy_beyond_chance_is_no_success() -> None:
    rows = [record(seed, ece=(0.2, 0.1), accuracy=(0.5, after)) for seed, after in enumerate((0.40, 0.41, 0.42))]
    assert not figures_of("rlcr", rows)["rlcr_accuracy_change"]["met"]


def test_every_arm_has_one_of_the_forms_of_the_world() -> None:
    assert {arm.form for arm in ARMS.values()} == {"confidence", "paragraph"}
