"""The figures of verifiers, from records."""

from typing import Any

import pytest

from benchmarks.verifiers import generative_verifiers


def record(seed: int, direct: float, num_problems: int = 1000) -> dict[str, Any]:
    scorers = {f"best_of_8_{name}": {"mean": direct} for name in generative_verifiers.SCORERS[1:]}
    accuracy = {**scorers, "best_of_8_outcome_model": {"mean": 0.5}, "majority_8": {"mean": 0.25}}
    recipe = {"num_problems": num_problems, "num_test": 300, "max_steps": 600, "policy": "p"}
    return {"seed": seed, **recipe, "accuracy": accuracy}


def test_a_verifier_is_held_against_the_reward_model_and_majority_seed_by_seed() -> None:
    found = generative_verifiers.figures_of([record(1, 0.6), record(2, 0.7), record(3, 0.8)])
    assert found["direct_minus_outcome_model"]["value"] == pytest.approx(0.2)
    assert found["direct_minus_majority"]["value"] == pytest.approx(0.45)
    assert found["direct_minus_majority"]["met"]
    one = generative_verifiers.figures_of([record(1, 0.6)])["direct_minus_majority"]
    assert (one["low"], one["met"]) == (None, False)  # one seed has no interval


def test_records_of_two_recipes_are_not_averaged() -> None:
    with pytest.raises(SystemExit, match="seeds 1, 2 are of several recipes"):
        generative_verifiers.check_recipes([record(1, 0.6), record(2, 0.6, num_problems=400)])
