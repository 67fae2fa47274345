"""What is read off a run of the reward-model benchmark, by hand."""

from typing import Any

import pytest

from benchmarks.reward_models.reward_models import figures_of, smoothed, summary


def record(size: int, seed: int, true: list[float], how_far: str = "far") -> dict[str, Any]:
    curve = [{"kl": float(at), "proxy": 0.1 * at, "true": value, "tokens": 9.0} for at, value in enumerate(true)]
    share = {"mean": 0.7, "low": 0.6, "high": 0.8, "n": 5}
    return {"size": size, "seed": seed, "how_far": how_far, "curve": curve,
            "reward_model": {"accuracy": share, "score_accuracy": {**share, "mean": 0.75 + 0.01 * seed}}}  # fmt: skip


def test_start_peak_and_end_are_means_of_three_iterations() -> None:
    found = summary(record(64, 0, [0.0, 0.0, 0.3, 0.9, 0.9, 0.9, 0.3, 0.3, 0.0]))
    assert smoothed([{"x": 1.0}, {"x": 2.0}, {"x": 6.0}, {"x": 1.0}], "x") == [3.0, 3.0]
    assert (found["start"], found["peak"], found["end"]) == pytest.approx((0.1, 0.9, 0.2))
    assert (found["peak_kl"], found["end_kl"]) == (4.0, 7.0)


def test_figures_are_differences_within_a_run_over_seeds() -> None:
    up_and_down = [0.0] * 3 + [1.0] * 3 + [0.5] * 3
    records = [record(64, seed, [value + 0.1 * seed * (place >= 3) for place, value in enumerate(up_and_down)])
               for seed in range(3)]  # fmt: skip
    figures = figures_of(records)
    assert figures["gain_at_end_64"]["value"] == pytest.approx(0.6)
    assert figures["gain_at_end_64"]["low"] == pytest.approx(0.6 - 4.3027 * 0.1 / 3**0.5, abs=1e-3)
    assert figures["fall_from_peak_64"]["value"] == pytest.approx(0.5)
    assert figures["pair_accuracy_above_half_64"]["value"] == pytest.approx(0.26)
    assert "gain_at_end_256" not in figures
    assert not [name for name in figures if "near" in name]
    near = figures_of([record(2048, 0, up_and_down, "near")])
    assert list(near) == ["gain_near_the_start_2048"]
    assert (near["gain_near_the_start_2048"]["value"], near["gain_near_the_start_2048"]["low"]) == (0.5, None)
