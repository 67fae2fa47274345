"""What the benchmark of search makes of its records, and that every arm of it can be built."""

from pathlib import Path

import pytest

from benchmarks.search.arms import METHODS, SIZES, settings_of
from benchmarks.search.cells import CELLS
from benchmarks.search.runs import SearchRecord, keep
from benchmarks.search.search import Speed, accuracy_parts, speed_parts
from benchmarks.search.tree_data import (
    TREES,
    TreeDataRecord,
    compare,
    data_parts,
    in_order,
    nearest_prefix,
    num_labelled,
    run_data,
)
from espalier.pipeline.prm.compare_with_truth import JudgedStep
from espalier.runtime.entrypoint import build, compose_config
from espalier.runtime.schemas import SampleConfig
from espalier.search.methods.omega_prm import OmegaPRM
from espalier.values.tree_values import tree_step_values
from tests.support.search_trees import TREE, changed


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("method", METHODS)
def test_every_arm_is_built(method: str, size: int) -> None:
    settings = ["policy=p", "output=o", *settings_of(method, size, 33.3), "scorer@search.scorer=random"]
    search = build(compose_config(SampleConfig, "api/vllm/search", settings).search)
    assert search.budget.tokens in (0, round(33.3 * size))


def record(scorer: str, seed: int, accuracy: float) -> SearchRecord:
    return SearchRecord("word_arithmetic", "dvts", scorer, 16, seed, accuracy, 400.0, 2.0, 10, 90, 100, 100)


def test_scorers_are_compared_seed_by_seed() -> None:
    rows = [record("random", seed, 0.3 + seed / 10) for seed in range(3)]
    rows += [record("process", seed, 0.5 + seed / 10) for seed in range(3)]
    figures, table = accuracy_parts([*rows, record("exact", 0, 0.9)])
    assert set(figures) == {"word_arithmetic_dvts_process_minus_random", "word_arithmetic_dvts_exact_minus_process"}
    assert figures["word_arithmetic_dvts_process_minus_random"]["value"] == pytest.approx(0.2)
    assert figures["word_arithmetic_dvts_process_minus_random"]["met"]
    assert figures["word_arithmetic_dvts_exact_minus_process"]["value"] == pytest.approx(0.4)
    assert [row[2] for row in table["rows"]] == ["exact", "process", "random"]
    assert [row[-1] for row in table["rows"]] == ["0.90"] * 3


def test_both_ways_are_compared_on_the_same_problems() -> None:
    rows = [Speed("word_arithmetic", "product", 0, 6.0, 0.7, 105.0, 100.0, 100.0),
            Speed("word_arithmetic", "public", 0, 1.0, 0.7, 2000.0, 900.0, 0.0)]  # fmt: skip
    figures, _ = speed_parts(rows)
    assert (figures["word_arithmetic_speed"]["value"], figures["word_arithmetic_speed"]["met"]) == (6.0, True)
    assert figures["word_arithmetic_prompt_tokens_by_distinct"]["value"] == 1.05
    assert figures["word_arithmetic_prompt_tokens_by_distinct"]["met"]
    assert figures["word_arithmetic_scored_tokens_by_distinct"]["better"] == "lower"


def judged(problem: str, step: int, score: float, is_right: bool) -> JudgedStep:
    return JudgedStep(problem, step, score, is_right)


def test_trees_are_taken_in_the_order_of_their_problems_until_their_tokens_are_nearest_to_the_budget() -> None:
    trees = [changed(id=f"{name}/0", problem_id=name, num_tokens=tokens)
             for name, tokens in (("wa-train-10", 40), ("wa-train-9", 50), ("wa-train-2", 30))]  # fmt: skip
    assert [tree.problem_id for tree in in_order(trees)] == ["wa-train-2", "wa-train-9", "wa-train-10"]
    costs = [30, 50, 40]
    assert [nearest_prefix(costs, budget) for budget in (1, 54, 55, 56, 100, 101, 999)] == [1, 1, 1, 2, 2, 3, 3]


def test_reward_models_are_compared_on_the_same_steps_with_an_interval_over_problems() -> None:
    truth = [("p", 1, True), ("p", 2, False), ("q", 1, True), ("q", 2, False)]
    good = [judged(*row[:2], float(row[2]), row[2]) for row in truth]
    blind = [judged(*row[:2], 0.5, row[2]) for row in truth]
    # AUC 1 and 1/2, whichever problems are drawn
    assert compare(good, blind) == {"mean": 0.5, "low": 0.5, "high": 0.5, "n": 2}
    with pytest.raises(ValueError, match="problem q"):
        compare(good, [*blind[:3], judged("q", 2, 0.5, True)])
    with pytest.raises(ValueError, match="shorter"):
        compare(good, blind[:3])


def test_labels_of_a_state_count_once_and_those_of_last_steps_not_at_all() -> None:
    rows = tree_step_values(TREE)
    # two states behind the prompt have completions; the third response's are the second's labels
    assert [row.labels for row in rows] == [[0.25, 1.0], [None, 0.0], [0.75, 1.0], [0.0]]
    assert num_labelled(rows) == 2


def data_record(way: str, seed: int, above: float | None) -> TreeDataRecord:
    interval = {"mean": 0.8, "low": 0.7, "high": 0.9, "n": 10}
    gap = None if above is None else {"mean": above, "low": above - 0.1, "high": above + 0.1, "n": 10}
    return TreeDataRecord("rule_logic", way, seed, 100, 50, 1000, 10, 80, 40, 60, interval, interval, gap)


def test_labels_of_trees_are_compared_seed_by_seed() -> None:
    rows = [data_record("independent", seed, None) for seed in range(3)]
    rows += [data_record("omega_prm", seed, 0.01 * (seed + 1)) for seed in range(3)]
    figures, table = data_parts(rows)
    (name,) = figures
    assert name == "rule_logic_omega_prm_labels_minus_independent"
    assert figures[name]["value"] == pytest.approx(0.02)
    # t of 2 degrees of freedom 4.303, standard error 0.01 / sqrt(3)
    assert figures[name]["low"] == pytest.approx(0.02 - 4.303 * 0.01 / 3**0.5, abs=1e-4)
    assert not figures[name]["met"]
    assert [row[:3] for row in table["rows"]] == [
        ["rule_logic", way, seed] for seed in range(3) for way in ("independent", "omega_prm")
    ]
    assert [row[5] for row in table["rows"]][:2] == ["", "0.010 [-0.090, 0.110]"]


@pytest.mark.parametrize("way", TREES)
def test_the_trees_of_every_way_hold_completions(way: str) -> None:
    settings = ["policy=p", "output=o", *TREES[way], "scorer@search.scorer=outcome", "requests.split=train"]
    method = build(compose_config(SampleConfig, "api/vllm/search", settings).search).method
    assert isinstance(method, OmegaPRM) or method.rollouts > 0


def test_a_record_of_a_trial_is_no_figure_of_another_size(tmp_path: Path) -> None:
    keep(data_record("independent", 0, None), tmp_path / "rule_logic-independent-0.json")
    with pytest.raises(SystemExit, match="is of --labelled 100 --problems 50: remove it"):
        run_data(CELLS["rule_logic"], "policy", [0], 8, 50, tmp_path)
    for way in TREES:
        keep(data_record(way, 0, 0.1), tmp_path / f"rule_logic-{way}-0.json")
    assert run_data(CELLS["rule_logic"], "policy", [0], 100, 50, tmp_path) == []
