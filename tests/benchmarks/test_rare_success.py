"""The figures of process rewards where success is rare, from records."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.credit import rare_success
from benchmarks.credit import rare_success_result as result
from benchmarks.credit.curves import Point

TASKS = {"long": "long_arithmetic"}


def record(seed: int, inner_auc: float) -> dict[str, Any]:
    """A run of the cell `long` of which only the AUC of the reward model differs between them."""
    half, truth = {"mean": 0.5}, {"inner_auc": {"mean": inner_auc}, "index_auc": {"mean": 0.5}}
    accuracy = {"mean": half, "majority_8": half, "best_of_8_minimum": half, "greedy": half}
    return {
        "cell": "long", "seed": seed, "labels": {"labels": "contrast"}, "tokens": 1e6, "truth": truth,
        "accuracy": dict.fromkeys(["sft", *result.NAMES.values()], accuracy),
    }  # fmt: skip


def test_the_seed_that_settings_were_chosen_on_is_in_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    written: dict[str, Any] = {}

    def write_result(name: str, figures: Any, detail: Any, tables: Any) -> None:
        written.update(figures=figures, rows=tables[0]["rows"])

    monkeypatch.setattr(result, "write_result", write_result)
    result.write([record(0, 1.0), record(1, 0.7), record(2, 0.8)], TASKS)
    assert written["figures"]["long_inner_auc"]["value"] == 0.75
    assert written["figures"]["long_inner_auc"]["unit"] == "AUC, 2 seeds"
    assert [row[1] for row in written["rows"]] == [0, 1, 2]
    result.write([record(0, 1.0)], TASKS)
    assert written["figures"] == {}


def test_pairs_are_held_against_what_grpo_reaches_at_as_many_tokens() -> None:
    """Of seeds and policies that GRPO was run on, by its curve between two evaluations; beyond its last one there is
    nothing."""
    rows = [record(seed, 0.7) | {"tokens": tokens} for seed, tokens in ((1, 1e6), (2, 1.5e6), (3, 1e6), (4, 3e6))]
    rows.append(record(1, 0.7) | {"recipe": {"policy": "another"}})
    for row, reached in zip(rows, (0.5, 0.6, 0.5, 0.9, 0.9), strict=True):
        row["accuracy"] = {name: {"mean": {"mean": reached}} for name in result.NAMES.values()}
    curves = {(seed, ""): [Point(0, 0.0, 0.0, 0.0), Point(9, 2e6, 9.0, 0.4)] for seed in (1, 2, 4)}
    found = result.grpo_figures(rows, curves)["step_sampled_minus_grpo"]
    assert found["value"] == pytest.approx(((0.5 - 0.2) + (0.6 - 0.3)) / 2)
    assert (found["unit"], found["met"]) == ("accuracy, 2 seeds", False)  # two seeds make no interval
    assert result.grpo_figures(rows, {}) == {}


def test_pairs_are_held_against_outcome_pairs_greedily_and_by_samples_and_met_where_the_interval_is_above_0() -> None:
    rows = []
    for seed, gain in ((1, 0.1), (2, 0.2), (3, 0.3)):
        rows.append(record(seed, 0.9))
        accuracy = {name: {"greedy": {"mean": 0.5}, "mean": {"mean": 0.4}} for name in result.NAMES.values()}
        accuracy["step_dpo"] = {"greedy": {"mean": 0.5 - gain}, "mean": {"mean": 0.7 + gain / 10}}
        rows[-1]["accuracy"] = rows[-1]["accuracy"] | accuracy
    found = result.figures_of(rows)
    assert (found["step_minus_outcome"]["value"], found["step_minus_outcome"]["met"]) == (-0.2, False)
    assert (found["step_sampled_minus_outcome"]["value"], found["step_sampled_minus_outcome"]["met"]) == (0.32, True)
    assert found["step_sampled_minus_outcome"]["unit"] == "sampled accuracy, 3 seeds"
    assert found["process_minus_outcome"]["met"] is False, "a difference of 0 is none"
    assert (found["inner_auc"]["goal"], found["inner_auc"]["met"]) == (0.85, True)


def test_records_of_two_recipes_are_not_averaged() -> None:
    rows = [record(1, 0.7), record(2, 0.8) | {"recipe": {"num_epochs": 12}}]
    with pytest.raises(SystemExit, match="long, seeds 1 and 2 are of two recipes"):
        result.write(rows, TASKS)


def test_runs_of_one_recipe_from_two_policies_are_averaged() -> None:
    recipe = {"num_epochs": 12}
    both = [record(seed, 0.7) | {"recipe": recipe | {"policy": policy}} for seed, policy in ((1, "a"), (2, "b"))]
    result.check_recipes(both)
    for one, other in ((0.5, 0.6), (0.01, 0.05)):
        for row, share in zip(both, (one, other), strict=True):
            row["accuracy"] = row["accuracy"] | {"sft": {"mean": {"mean": share}}}
        with pytest.raises(SystemExit, match="seeds 1 and 2 are of two recipes"):
            result.check_recipes(both)


def test_a_recipe_says_how_the_reward_model_was_made(tmp_path: Path) -> None:
    policy, run = tmp_path / "sft" / "model", tmp_path / "run"
    for folder in (policy, run / "prm" / "model", run / "prm_policy"):
        folder.mkdir(parents=True)
    (policy / "model.safetensors").write_bytes(b"weights")
    for name, steps in (("prm", 300), ("prm_policy", 60)):
        (run / name).joinpath("config.yaml").write_text(
            f"num_epochs: 2\nmax_steps: {steps}\nupdate: {{learning_rate: 3.0e-4, batch_size: 32}}\n"
        )
    found = rare_success.recipe_of("long", policy, run)
    assert (found["reward_model"], found["max_steps"], found["num_problems"]) == ("head", 300, 1000)
    (run / "prm" / "model" / "log_ratio_reward.json").write_text("{}")
    found = rare_success.recipe_of("long", policy, run)
    assert (found["reward_model"], found["max_steps"]) == ("log-ratio", 60)


def test_a_record_says_what_the_checks_before_training_said(tmp_path: Path) -> None:
    for name in ("process_rewards", "pairs"):
        (tmp_path / name).mkdir()
    (tmp_path / "pairs" / "step.check.json").write_text('{"verdict": "in order"}')
    assert rare_success.verdicts(tmp_path) == {"step": "in order"}
    (tmp_path / "process_rewards" / "label_signal.json").write_text('{"verdict": "none"}')
    (tmp_path / "pairs" / "process.check.json").write_text('{"verdict": "harm"}')
    assert rare_success.verdicts(tmp_path) == {"labels": "none", "process": "harm", "step": "in order"}
