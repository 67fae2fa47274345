"""What the benchmark of search makes of its records, and that every arm of it can be built."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.search import search
from benchmarks.search.arms import METHODS, SIZES, settings_of
from benchmarks.search.cells import CELLS
from benchmarks.search.figures import accuracy_table, method_gaps, prompt_figures, scorer_gaps
from benchmarks.search.origin import Origin, origin, weights
from benchmarks.search.runs import ProblemRow, SearchRecord, keep, problem_row, read
from benchmarks.search.search import RECORDS, Speed, speed_parts
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
from espalier.data.records import BadInput
from espalier.pipeline.prm.compare_with_truth import JudgedStep
from espalier.runtime.entrypoint import build, compose_config
from espalier.runtime.schemas import SampleConfig
from espalier.search.methods.omega_prm import OmegaPRM
from espalier.values.tree_values import tree_step_values
from tests.support.search_trees import TREE, changed


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("method", METHODS)
def test_every_arm_is_built(method: str, size: int) -> None:
    settings = ["policy=p", "output=o", *settings_of(method, size, 33.3), "scorer@search.scorer=random"]
    search = build(compose_config(SampleConfig, "api/vllm/search", settings).search)
    assert search.budget.tokens in (0, round(33.3 * size))


def record(scorer: str, seed: int, accuracy: float, **more: Any) -> SearchRecord:
    row = SearchRecord("word_arithmetic", "dvts", scorer, 16, seed, accuracy, 400.0, 2.0, 10, 90, 100, 100)
    return replace(row, **more)


def test_scorers_are_compared_seed_by_seed_at_every_size() -> None:
    rows = [record("random", seed, 0.3 + seed / 10) for seed in range(3)]
    rows += [record("process", seed, 0.5 + seed / 10) for seed in range(3)]
    rows += [record("exact", 0, 0.9), record("exact", 0, 0.6, size=4), record("process", 0, 0.5, size=4)]
    figures, table = scorer_gaps(rows, "how")
    assert {name: found["value"] for name, found in figures.items()} == {
        "word_arithmetic_4_times_exact_minus_process": pytest.approx(0.1),
        "word_arithmetic_16_times_exact_minus_process": pytest.approx(0.4),
        "word_arithmetic_16_times_process_minus_random": pytest.approx(0.2),
    }
    assert figures["word_arithmetic_16_times_exact_minus_process"]["unit"] == "accuracy, mean of 1 method, 1 seed"
    assert not figures["word_arithmetic_16_times_exact_minus_process"]["met"]  # one seed has no interval
    assert table["columns"][3:] == ["exact - process", "exact - contrast", "contrast - process", "process - random",
                                    "contrast - random"]  # fmt: skip
    assert table["rows"] == [["word_arithmetic", 4, "dvts", "10.0", "", "", "", ""],
                             ["word_arithmetic", 16, "dvts", "40.0", "", "", "20.0", ""]]  # fmt: skip


def test_a_figure_of_scorers_is_the_mean_over_methods_of_the_seeds_that_all_of_them_have() -> None:
    above = {"dvts": [0.1, 0.2, 0.3], "uct": [0.3, 0.2, 0.4], "rebase": [0.5, 0.2, 0.8]}
    rows = [record(scorer, seed, value, method=method) for method, gaps in above.items()
            for seed, gap in enumerate(gaps) for scorer, value in (("process", 0.1), ("exact", 0.1 + gap))]  # fmt: skip
    figures, _ = scorer_gaps(rows, "how")
    found = figures["word_arithmetic_16_times_exact_minus_process"]
    # by seed 0.3, 0.2 and 0.5: mean 1/3, standard error 0.0882, t of 2 degrees of freedom 4.303
    assert (found["value"], found["low"]) == (pytest.approx(1 / 3, abs=1e-4), pytest.approx(1 / 3 - 0.3795, abs=1e-3))
    assert (found["met"], found["unit"]) == (False, "accuracy, mean of 3 methods, 3 seeds")
    del rows[3]  # seed 1 of dvts with the exact value
    found = scorer_gaps(rows, "how")[0]["word_arithmetic_16_times_exact_minus_process"]
    assert (found["value"], found["unit"]) == (pytest.approx(0.4), "accuracy, mean of 3 methods, 2 seeds")


def test_records_of_another_policy_or_number_of_problems_are_not_compared() -> None:
    old, other = record("random", 0, 0.3), record("process", 0, 0.5)
    assert scorer_gaps([old, other], "how")[0]
    for more in ({"origin": Origin("aa")}, {"problems": 20}):
        assert not scorer_gaps([old, replace(other, **more)], "how")[0]


def test_the_table_says_seconds_and_of_which_machine_they_are() -> None:
    rows = [record("random", 0, 0.5), record("random", 1, 0.7), record("exact", 0, 0.9, origin=Origin("aa", "", "m"))]
    table = accuracy_table(rows)
    assert table["title"].startswith("Accuracy by tokens and seconds (2 of 3 records do not say policy, machine")
    assert [row[2:] for row in table["rows"]] == [
        ["exact", 16, "90.0", 1, "400", "0.200", "m", "0.90"],
        ["random", 16, "60.0", 2, "400", "0.200", "not recorded", "0.90"],
    ]
    both = accuracy_table([rows[0], replace(rows[2], scorer="random", seed=1)])
    assert both["rows"][0][-2] == "several: m; not recorded"


def test_prompt_tokens_meet_their_goal_where_no_search_is_above_it() -> None:
    rows = [record("random", seed, 0.5, prompt_tokens=tokens) for seed, tokens in enumerate((90, 100, 111))]
    (found,) = prompt_figures(rows, "how").values()
    assert (found["value"], found["low"], found["high"], found["met"]) == (1.0, 0.9, 1.11, False)
    assert found["unit"] == "ratio, of 3 searches, 1 above 1.1"
    (found,) = prompt_figures(rows[:2], "how").values()
    assert found["met"]


def rows_of(answers: str, share: float | None = None) -> list[ProblemRow]:
    """One problem per letter, right where it is "x"; of the first two the policy's own samples are right at `share`."""
    return [ProblemRow(f"p{place}", answer == "x", 40, 0.1, share if place < 2 else None)
            for place, answer in enumerate(answers)]  # fmt: skip


def test_methods_are_compared_problem_by_problem_and_by_difficulty() -> None:
    baseline = record("exact", 0, 0.5, method="best_of_n", rows=rows_of("xx--", 0.1), origin=Origin("aa"))
    better = record("exact", 0, 0.75, rows=rows_of("-xxx"), origin=Origin("aa"))
    old = record("exact", 0, 0.75, method="rebase", rows=[])
    (row,) = method_gaps([baseline, better, old])["rows"]
    assert row[6:] == ["", "", ""], "few own samples, the baseline's very ones: lucky ones would look easy"
    large = replace(baseline, size=32, rows=rows_of("xx--", 0.1))
    (row,) = method_gaps([replace(baseline, rows=rows_of("xx--", 0.9)), better, old, large])["rows"]
    # -1, 0, 1, 1: mean 0.25; of the two problems whose samples were seldom right -0.5
    assert row[:4] == ["word_arithmetic", 16, "exact", "dvts"]
    assert row[4].startswith("25.0 [")
    assert row[4].endswith("], n=4")
    assert row[5] == "25.0"
    assert row[6].startswith("-50.0 [-100.0, 0.0]")
    assert row[7:] == ["", ""]


def test_a_record_is_read_as_it_was_kept_and_an_old_one_says_nothing_of_its_origin(tmp_path: Path) -> None:
    row = record("exact", 0, 0.75, rows=rows_of("-xxx", 0.5), origin=origin("aa", "bb"))
    keep(row, tmp_path / "new.json")
    assert read(tmp_path, SearchRecord) == [row]
    stored = read(RECORDS, SearchRecord)
    assert len(stored) > 400
    (tmp_path / "new.json").write_text('{"cell": "rule_logic"}')
    with pytest.raises(BadInput, match=r"new.json: not a record of this benchmark .*: move it away"):
        read(tmp_path, SearchRecord)


def test_a_row_says_what_the_policy_drew_of_its_own() -> None:
    assert problem_row(TREE) == ProblemRow("p", False, 40, 2.0, None)
    drawn = changed(completions=[[3, 4, 4, 7], *([] for _ in range(7))])
    assert problem_row(drawn).own_share == 0.25


def model_folder(path: Path, weights: bytes) -> Path:
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(weights)
    return path


def test_weights_of_a_log_ratio_reward_are_those_of_both_policies(tmp_path: Path) -> None:
    one = model_folder(tmp_path / "m", b"one")
    alone = weights(str(one))
    model_folder(one / "reference", b"two")
    assert weights(str(one)) == f"{alone}+{weights(str(one / 'reference'))}"
    with pytest.raises(BadInput, match=r"no model.safetensors in it"):
        weights(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["--problems", "100"], "are of 10 problems per seed, these would be of 100: ask for --problems 10"),
        (["--problems", "10"], "with seed 0 are of another policy (aa, this is "),
        (["--problems", "10", "--seeds", "1"], "with seed 1 have another reward model for process (bb, this is "),
    ],
)
def test_a_share_beside_records_that_are_not_alike_is_refused_with_one_line(
    asked: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    policy, prm = model_folder(tmp_path / "policy", b"1"), model_folder(tmp_path / "prm", b"2")
    stored = [record("exact", 0, 0.5, origin=Origin("aa")),
              record("process", 1, 0.5, origin=Origin(weights(str(policy)), "bb"))]  # fmt: skip
    for row in stored:
        keep(row, tmp_path / "results" / f"{row.scorer}.json")
    monkeypatch.setattr(search, "RECORDS", tmp_path / "results")
    arguments = ["search", "accuracy", "--cells", "word_arithmetic", "--scorers", "process", "exact", "--policy",
                 f"word_arithmetic={policy}", "--prm", f"word_arithmetic={prm}", *asked]  # fmt: skip
    monkeypatch.setattr(sys, "argv", arguments)
    assert search.main() == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert words in line


def test_both_ways_are_compared_on_the_same_problems() -> None:
    rows = [Speed("word_arithmetic", "product", 0, 6.0, 0.7, 105.0, 100.0, 100.0),
            Speed("word_arithmetic", "public", 0, 1.0, 0.7, 2000.0, 900.0, 0.0)]  # fmt: skip
    figures, _ = speed_parts(rows)
    assert (figures["word_arithmetic_speed"]["value"], figures["word_arithmetic_speed"]["met"]) == (6.0, True)
    assert figures["word_arithmetic_prompt_tokens_by_distinct"]["value"] == 1.05
    assert figures["word_arithmetic_prompt_tokens_by_distinct"]["met"]
    assert figures["word_arithmetic_scored_tokens_by_distinct"]["better"] == "lower"
    elsewhere = replace(rows[1], origin=Origin("aa", "", "another machine"))
    assert speed_parts([rows[0], elsewhere])[0] == {}


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
    with pytest.raises(BadInput, match="is of --labelled 100 --problems 50: remove it"):
        run_data(CELLS["rule_logic"], "policy", [0], 8, 50, tmp_path)
    for way in TREES:
        keep(data_record(way, 0, 0.1), tmp_path / f"rule_logic-{way}-0.json")
    assert run_data(CELLS["rule_logic"], "policy", [0], 100, 50, tmp_path) == []


def test_labels_of_another_policy_are_refused_beside_stored_ones_of_their_seed(tmp_path: Path) -> None:
    policy = model_folder(tmp_path / "policy", b"1")
    stored = replace(data_record("independent", 0, None), origin=Origin("aa"))
    keep(stored, tmp_path / "results" / "rule_logic-independent-0.json")
    with pytest.raises(BadInput, match=r"with seed 0 are of another policy \(aa"):
        run_data(CELLS["rule_logic"], str(policy), [0], 100, 50, tmp_path / "results")
