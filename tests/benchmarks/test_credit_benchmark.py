"""The benchmark of credit methods: statistics and curves by hand, the order of runs, records, tables and pictures."""

import argparse
import dataclasses
import json
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.credit.comparison import (
    GIVEN,
    Curves,
    common_cost,
    compare,
    curves_of,
    within_plan,
)
from benchmarks.credit.credit import asked_runs, missing
from benchmarks.credit.curves import Point, TargetCost, accuracy_at, cost_of, mean_accuracy, points_of, target_cost
from benchmarks.credit.intervals import holm, mean_over_seeds, paired, t_quantile, t_within
from benchmarks.credit.learning_rates import runs_of_other_rates, tuned_rates, tuning_areas
from benchmarks.credit.pictures import draw, map_points, series_of
from benchmarks.credit.plan import (
    Cell,
    Method,
    Plan,
    Policy,
    Run,
    agree,
    benchmark_runs,
    read_plan,
    recorded_settings,
    settings_of,
    tuning_runs,
)
from benchmarks.credit.runs import Places, Record, check_policies, cost_of_process_rewards, digest, read_records, record
from benchmarks.credit.schedule import spend
from benchmarks.credit.tables import summarise
from benchmarks.result import machine
from espalier.data.records import BadInput
from espalier.runtime.entrypoint import check_component, compose_config
from espalier.runtime.schemas import RLConfig

PLAN = Path(__file__).parent.parent.parent / "benchmarks" / "credit" / "plan.yaml"
EASY = Cell("easy", ("task=word_arithmetic",), "small", ("evaluation.every=2",), 100, 10.0, 50, 0.8)
HARD = replace(EASY, name="hard")
GRPO, VINE = Method("grpo", "outcome", "exp/ppo/grpo"), Method("vine", "monte_carlo", "exp/ppo/vine")
PRM = Method("prm", "process_model", "exp/ppo/prm", ("advantage.path={process_rewards}/prm/model",))
SFT = Policy("small", ("task=word_arithmetic",), "exp/sft/word_arithmetic", 5)
SMALL = Plan("grpo", (1e-4, 1e-5), (1e-6,), 1000, ("server=none",), {"small": SFT}, {"easy": EASY, "hard": HARD},
             {"grpo": GRPO, "vine": VINE, "prm": PRM})  # fmt: skip


def test_students_distribution_agrees_with_closed_forms_and_the_printed_table() -> None:
    assert t_within(1.0, 1) == pytest.approx(0.5)  # Cauchy: 2 atan(t) / pi
    assert t_within(math.sqrt(2), 2) == pytest.approx(math.sqrt(0.5))  # t / sqrt(2 + t^2)
    assert t_within(0.0, 5) == 0.0
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 30: 2.042}
    assert {degrees: round(t_quantile(degrees), 3) for degrees in table} == table


def test_an_interval_over_three_seeds_is_students_and_two_seeds_give_none() -> None:
    found = mean_over_seeds([1.0, 2.0, 3.0])  # standard deviation 1
    assert (found.value, found.high) == pytest.approx((2.0, 2.0 + 4.302653 / math.sqrt(3)))
    assert found.low == pytest.approx(2.0 - 4.302653 / math.sqrt(3))
    assert found.p == pytest.approx(1 - math.sqrt(12 / 14))  # t = 2 sqrt(3): t^2 = 12
    assert mean_over_seeds([0.5, 0.7]) == dataclasses.replace(found, value=0.6, low=None, high=None, p=None, n=2)


def test_seeds_that_agree_exactly_have_no_interval_and_the_p_of_their_signs() -> None:
    """Of the 2^n ways to give n differences their signs two are all of one sign: 2 / 8, 2 / 32."""
    found = mean_over_seeds([0.1, 0.1, 0.1])
    assert (found.p, found.low, found.high) == (0.25, None, None)
    assert mean_over_seeds([-0.1] * 5).p == 0.0625
    assert mean_over_seeds([0.0, 0.0, 0.0]).p == 1.0
    rounded = paired({0: 0.4, 1: 0.6, 2: 0.9}, {0: 0.3, 1: 0.5, 2: 0.8})  # 0.1 up to the last bits
    assert rounded is not None
    assert (rounded.p, rounded.low) == (0.25, None)
    above = mean_over_seeds([0.1, 0.1, 0.11])
    assert above.p is not None
    assert above.p < 0.25, "a spread, however small, is the t-test's"


def test_a_band_has_no_width_where_the_seeds_agree_and_is_drawn_all_the_same() -> None:
    """They all start from one policy."""
    seeds = {k: [Point(0, 0, 0, 0.2), Point(1, 10, 1, 0.4 + k / 10)] for k in range(3)}
    series = series_of(Curves("grpo", "outcome", 1e-4, True, seeds), "tokens")
    assert (series.low[0], series.high[0]) == pytest.approx((20.0, 20.0))
    assert series.low[1] < 49 < 51 < series.high[1]


def test_a_difference_is_taken_seed_by_seed() -> None:
    found = paired({0: 0.5, 1: 0.7, 4: 0.9}, {0: 0.4, 1: 0.6, 2: 0.1})
    assert found is not None
    assert found.value == pytest.approx(0.1)
    assert found.n == 2
    assert paired({0: 0.5}, {1: 0.5}) is None


def test_holm_multiplies_the_smallest_p_most_and_never_falls() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})
    assert holm({"a": 0.7, "b": 0.6}) == {"b": 1.0, "a": 1.0}
    assert holm({}) == {}


ROWS = [
    {"step": 0, "eval/accuracy": 0.2, "seconds/evaluate": 99.0},
    {"step": 1, "sampling/tokens": 30.0, "seconds/iteration": 2.0},
    {"step": 2, "sampling/tokens": 10.0, "seconds/iteration": 3.0},
    {"step": 2, "eval/accuracy": 0.6},
    {"step": 3, "sampling/tokens": 40.0, "seconds/iteration": 5.0},
    {"step": 3, "eval/accuracy": 1.0},
]


def test_a_curve_counts_tokens_and_seconds_of_iterations_alone() -> None:
    assert points_of(ROWS) == [Point(0, 0, 0, 0.2), Point(2, 40, 5, 0.6), Point(3, 80, 10, 1.0)]
    assert points_of(ROWS, 100, 7)[1] == Point(2, 140, 12, 0.6)


def test_a_curve_is_read_between_its_evaluations_and_never_behind_the_last() -> None:
    points = points_of(ROWS)
    assert accuracy_at(points, "tokens", 20) == pytest.approx(0.4)
    assert accuracy_at(points, "seconds", 10) == pytest.approx(1.0)
    assert accuracy_at(points, "tokens", 81) is None
    # 40 tokens at 0.4 in the mean, 20 at 0.7
    assert mean_accuracy(points, "tokens", 60) == pytest.approx((40 * 0.4 + 20 * 0.7) / 60)
    assert mean_accuracy(points, "tokens", 81) is None
    assert cost_of(points, "tokens", 0.7) == pytest.approx(50)
    assert cost_of(points, "updates", 0.1) == 0.0
    assert cost_of([Point(0, 0, 0, 0.2), Point(1, 5, 5, 0.3)], "tokens", 0.7) is None


def test_what_is_spent_before_the_first_update_teaches_nothing() -> None:
    points = points_of(ROWS, tokens_before=100)
    assert accuracy_at(points, "tokens", 50) == pytest.approx(0.2)
    assert mean_accuracy(points, "tokens", 120) == pytest.approx((100 * 0.2 + 20 * 0.3) / 120)
    assert cost_of(points, "tokens", 0.4) == pytest.approx(120)


def test_runs_that_did_not_get_there_cost_more_than_any_that_did() -> None:
    assert target_cost([3.0, None, 5.0]) == TargetCost(5.0, 3.0, None)
    assert target_cost([3.0, 4.0, None, 8.0]) == TargetCost(6.0, 3.0, None)
    assert target_cost([3.0, None, None]) == TargetCost(None, 3.0, None)
    assert target_cost([3.0, 4.0, None, None]).middle is None  # the lower middle one alone says too little
    assert target_cost([7.0, 4.0, 8.0]) == TargetCost(7.0, 4.0, 8.0)


def test_every_method_has_a_seed_on_every_cell_before_any_has_the_next() -> None:
    rates = {(cell, method): 1e-4 for cell in ("easy", "hard") for method in ("grpo", "vine")}
    runs = benchmark_runs([EASY, HARD], [GRPO, VINE, PRM], [0, 1], rates)  # prm is not tuned
    names = [(run.seed, run.cell.name, run.method.name) for run in runs]
    assert names == [(0, "easy", "grpo"), (0, "easy", "vine"), (0, "hard", "grpo"), (0, "hard", "vine"),
                     (1, "easy", "grpo"), (1, "easy", "vine"), (1, "hard", "grpo"), (1, "hard", "vine")]  # fmt: skip
    assert missing(runs, [stored("easy", "grpo", 0, [0.2]), stored("hard", "vine", 1, [0.2])]) == runs[1:7]


class FakeJob:
    """Ends after so many seconds of a clock that only waits move."""

    def __init__(self, clock: list[float], seconds: float, code: int):
        self.clock, self.end, self.code, self.is_stopped = clock, clock[0] + seconds, code, False

    def poll(self) -> int | None:
        return self.code if self.clock[0] >= self.end else None

    def stop(self) -> None:
        self.is_stopped = True


def spend_on(seconds: Sequence[float], end: float, codes: Sequence[int] = ()) -> tuple[list[list[int]], list[FakeJob]]:
    """Runs of so many seconds on two cores: (seeds finished, failed, cut, started), the jobs."""
    clock, started, jobs = [0.0], [], []

    def start(run: Run, core: int) -> FakeJob:
        started.append(run.seed)
        jobs.append(FakeJob(clock, seconds[run.seed], (codes or [0] * len(seconds))[run.seed]))
        return jobs[-1]

    def wait(step: float) -> None:
        clock[0] += step

    methods = [Method(f"m{i % 2}", "outcome", "") for i in range(len(seconds))]
    runs = [Run(EASY, methods[i], i, 1e-4) for i in range(len(seconds))]
    spent = spend(runs, [0, 1], end, start, lambda run: None, lambda: clock[0], wait)
    return [[run.seed for run in rows] for rows in (spent.finished, spent.failed, spent.cut)] + [started], jobs


def test_two_cores_take_the_next_run_as_soon_as_they_are_free() -> None:
    (finished, failed, cut, started), _ = spend_on([10, 3, 3, 3], end=3600)
    assert (finished, failed, cut, started) == ([1, 2, 3, 0], [], [], [0, 1, 2, 3])


def test_what_runs_when_the_time_is_over_is_stopped_and_nothing_is_begun_then() -> None:
    (finished, _, cut, started), jobs = spend_on([4, 9, 9, 9], end=8)
    assert (finished, cut, started) == ([0], [1, 2], [0, 1, 2])
    assert [job.is_stopped for job in jobs] == [False, True, True]


def test_after_a_failure_the_method_is_left_alone_and_the_others_go_on() -> None:
    (finished, failed, _, started), _ = spend_on([2, 5, 5, 5, 5, 5], end=3600, codes=[1, 0, 0, 0, 0, 0])
    assert (finished, failed, started) == ([1, 3, 5], [0], [0, 1, 3, 5])


@pytest.mark.slow
def test_every_row_of_the_plan_is_a_config_whose_estimator_takes_its_settings() -> None:
    plan = read_plan(PLAN)
    assert len(plan.methods) >= 10
    first = next(iter(plan.cells.values()))
    rows = [(first, method) for method in plan.methods.values()]
    for cell, method in [*rows, *((cell, plan.methods["grpo"]) for cell in plan.cells.values() if cell != first)]:
        settings = settings_of(plan, Run(cell, method, 0, 1e-4))
        own = ["output_dir=x", "model.path=x", *(row.replace("{process_rewards}", "x") for row in settings[2:])]
        config = compose_config(RLConfig, settings[1], own)
        check_component(config.advantage)
        assert (config.stop_after_tokens, config.stop_after_seconds) == (cell.tokens, cell.seconds)
        assert config.num_iterations == (cell.updates or 100000)
        assert config.update.learning_rate == 1e-4
        assert config.checkpoints.save_every == config.evaluation.every


def test_a_row_of_the_plan_that_says_what_does_not_exist_is_refused(tmp_path: Path) -> None:
    text = PLAN.read_text()
    for old, new, message in (
        ("family: critic", "family: critics", "family must be one of outcome, critic"),
        ("rates_of: long_arithmetic,", "rates_of: long_arithmetic_rare,", "must be a cell that is tuned itself"),
        ("baseline: grpo", "baseline: gropo", "baseline must be one of the methods"),
        ("tuning_tokens:", "tuning_token:", "has no field 'tuning_token'"),
        ("tuning_tokens: 200000,", "", "cells.word_arithmetic needs updates, or tokens and tuning_tokens"),
        ("updates: 40,", "updates: 40, tokens: 9, tuning_tokens: 9,", "and not both"),
        ("methods: [vineppo_k3,", "methods: [vineppo,", "cells.word_arithmetic_updates.methods must be one of"),
        (
            "start: long_arithmetic,",
            "start: short,",
            "policies.long_arithmetic_rare_half.start must be one of the policies",
        ),
        ("policy: word_arithmetic", "policy: word", "cells.word_arithmetic.policy must be one of the policies"),
        ("lower_rates: [3.0e-5, 1.0e-5]", "lower_rates: [1.0e-5, 3.0e-5]", "lower_rates must fall, from below all of"),
        ("lower_rates: [3.0e-5, 1.0e-5]", "lower_rates: [1.0e-4]", "lower_rates must fall, from below all of"),
    ):
        (tmp_path / "plan.yaml").write_text(text.replace(old, new, 1))
        with pytest.raises(BadInput, match=message):
            read_plan(tmp_path / "plan.yaml")


def stored(
    cell: str, method: str, seed: int, accuracies: Sequence[float], rate: float = 1e-4, *, tokens_before: float = 0,
    tokens: float = 100, is_tuning: bool = False, policy: str = "d",
) -> Record:  # fmt: skip
    """A record whose evaluations lie evenly over so many tokens and 10 seconds."""
    last = max(1, len(accuracies) - 1)
    points = [Point(i, tokens_before + i * tokens / last, i * 10 / last, value) for i, value in enumerate(accuracies)]
    run = Run(SMALL.cells[cell], SMALL.methods[method], seed, rate, is_tuning)
    return Record(cell, method, seed, rate, is_tuning, settings_of(SMALL, run), policy, points, tokens_before, 0.0, 2.0,
                  "m", "c", "2026-11-23")  # fmt: skip


def test_the_learning_rate_with_the_largest_area_up_to_the_tuning_budget_is_chosen() -> None:
    rows = [stored("easy", "grpo", 1000, [0.2, 0.4, 0.4], 1e-4, is_tuning=True),
            stored("easy", "grpo", 1000, [0.2, 0.3, 0.9], 1e-5, is_tuning=True),  # better, but behind 50 tokens
            stored("easy", "vine", 1000, [0.2, 0.4, 0.4], 1e-4, is_tuning=True),  # one rate of two
            stored("easy", "prm", 1000, [0.2, 0.2, 0.2], 1e-4, tokens_before=500, is_tuning=True),
            stored("easy", "prm", 1000, [0.2, 0.3, 0.3], 1e-5, tokens_before=500, is_tuning=True)]  # fmt: skip
    assert tuned_rates(SMALL, rows) == {("easy", "grpo"): {"d": 1e-4}}, (
        "the lowest rate is the best: one more is wanted"
    )
    areas = {key: found["d"] for key, found in tuning_areas(SMALL, rows).items()}
    wanted = {key: [run.learning_rate for run in tuning_runs(SMALL, [EASY], [SMALL.methods[key]], areas)]
              for key in ("grpo", "vine", "prm")}  # fmt: skip
    assert wanted == {"grpo": [1e-4, 1e-5], "vine": [1e-4, 1e-5], "prm": [1e-4, 1e-5, 1e-6]}
    rows.append(stored("easy", "prm", 1000, [0.2, 0.4, 0.4], 1e-6, tokens_before=500, is_tuning=True))
    assert tuned_rates(SMALL, rows) == {("easy", "grpo"): {"d": 1e-4}, ("easy", "prm"): {"d": 1e-6}}, "none is below"
    assert tuning_runs(SMALL, [EASY], [GRPO], {})[0].tokens == 50


def test_a_cell_may_take_its_rates_from_another_one_and_is_not_tuned_then() -> None:
    plan = replace(SMALL, cells={"easy": EASY, "hard": replace(HARD, rates_of="easy")})
    rows = [stored("easy", "grpo", 1000, [0.2, 0.4, 0.4], 1e-4, is_tuning=True),
            stored("easy", "grpo", 1000, [0.2, 0.3, 0.3], 1e-5, is_tuning=True),
            stored("hard", "grpo", 1000, [0.2, 0.3, 0.3], 1e-4, is_tuning=True),
            stored("hard", "grpo", 1000, [0.2, 0.4, 0.4], 1e-5, is_tuning=True)]  # fmt: skip
    assert ("hard", "grpo") not in tuned_rates(SMALL, rows), "by itself its lowest rate is the best: one more is wanted"
    assert tuned_rates(plan, rows) == {("easy", "grpo"): {"d": 1e-4}, ("hard", "grpo"): {"d": 1e-4}}
    assert {run.cell.name for run in tuning_runs(plan, [*plan.cells.values()], [GRPO], {})} == {"easy"}
    assert tuned_rates(plan, rows[2:]) == {}, "none of the cell that is named"


def test_a_cell_may_be_tuned_and_compared_by_updates_and_only_with_its_methods(tmp_path: Path) -> None:
    """vine's best rate by tokens is not the one by updates: its updates of 1e-5 cost more."""
    cell = replace(EASY, tokens=0, seconds=0.0, tuning_tokens=0, updates=2, methods=("vine", "prm"))
    vine = replace(VINE, against="prm")
    plan = replace(SMALL, cells={"easy": cell}, methods={"grpo": GRPO, "vine": vine, "prm": replace(PRM, settings=())})
    rows = [stored("easy", "vine", 1000, [0.2, 0.4, 0.4, 0.0], 1e-4, is_tuning=True),
            stored("easy", "vine", 1000, [0.2, 0.3, 0.4, 0.9], 1e-5, tokens=9000, is_tuning=True)]  # fmt: skip
    assert tuning_areas(plan, rows)["easy", "vine"]["d"] == pytest.approx({1e-4: 0.35, 1e-5: 0.3})
    assert tuned_rates(plan, rows) == {("easy", "vine"): {"d": 1e-4}}
    assert {run.method.name for run in tuning_runs(plan, [cell], [*plan.methods.values()], {})} == {"vine", "prm"}
    rates = {("easy", name): 1e-4 for name in plan.methods}
    runs = benchmark_runs([cell], [*plan.methods.values()], [0], rates)
    assert [run.method.name for run in runs] == ["vine", "prm"]
    assert [row for row in settings_of(plan, runs[0]) if "stop_after" in row] == []
    assert settings_of(plan, runs[0])[-1] == "num_iterations=2"
    for seed in range(3):
        rows += [stored("easy", "vine", seed, [0.2, 0.4, 0.6 + seed / 10, 0.9]),
                 stored("easy", "prm", seed, [0.2, 0.2, 0.2])]  # fmt: skip
    figures, tables, found = summarise(plan, rows, "bench")
    figure = figures["easy_vine_minus_prm_at_equal_updates"]
    assert figure["value"] == pytest.approx(0.225)  # 0.4, 0.425 and 0.45, less 0.2
    assert figure["unit"].startswith("mean accuracy up to 2 updates")
    assert "easy_methods" not in figures
    assert len(tables) == 1
    assert [*found["easy"]] == ["updates"]
    assert [path.name for path in draw(plan, found, tmp_path)] == ["easy-updates.svg"]


def test_a_rate_is_chosen_by_the_rule_alone_whatever_else_was_once_run() -> None:
    wanted = [stored("easy", "grpo", 1000, [0.2, 0.4, 0.4], 1e-4, is_tuning=True),
              stored("easy", "grpo", 1000, [0.2, 0.3, 0.3], 1e-5, is_tuning=True)]  # fmt: skip
    lower = stored("easy", "grpo", 1000, [0.2, 0.9, 0.9], 1e-6, is_tuning=True)  # of an earlier plan
    assert tuned_rates(SMALL, [*wanted[::-1], lower]) == {("easy", "grpo"): {"d": 1e-4}}
    other = stored("easy", "grpo", 7, [0.2, 0.9, 0.9], 1e-5, is_tuning=True)  # when the plan had another tuning seed
    assert tuned_rates(SMALL, [wanted[0], other]) == {}
    assert tuned_rates(SMALL, [*wanted[::-1], other]) == {("easy", "grpo"): {"d": 1e-4}}


@pytest.mark.parametrize("place", [0, 1])
def test_a_tuning_run_without_a_finite_accuracy_leaves_its_method_untuned(place: int) -> None:
    rows = [stored("easy", "grpo", 1000, [0.2, 0.4, 0.4], rate, is_tuning=True) for rate in (1e-4, 1e-5)]
    rows[place] = replace(rows[place], points=[replace(point, accuracy=math.nan) for point in rows[place].points])
    assert tuned_rates(SMALL, rows) == {}


def test_methods_are_compared_at_a_cost_that_every_run_has_reached() -> None:
    gains = {0: 0.1, 1: 0.2, 2: 0.3}
    rows = [stored("easy", "grpo", seed, [0.2, 0.2]) for seed in gains]
    rows += [stored("easy", "vine", seed, [0.2, 0.2 + 2 * gain], tokens=80) for seed, gain in gains.items()]
    curves = curves_of(SMALL, EASY, rows)
    assert common_cost(EASY, curves, "tokens") == 80  # the budget is 100, vine has spent 80
    assert common_cost(EASY, curves, "seconds") == 10
    _, vine = compare(EASY, curves, "tokens", 80)
    assert vine.difference is not None
    assert vine.difference.value == pytest.approx(0.2)  # half of 2 * 0.2: the mean along a straight line
    assert vine.accuracy.value == pytest.approx(0.6)
    assert vine.p == pytest.approx(1 - math.sqrt(12 / 14))  # one method: Holm changes nothing
    assert (vine.num_reached, vine.to_target) == (1, TargetCost(None, 80.0, None))
    assert not vine.curves.is_tuned


def test_a_method_with_small_updates_is_set_against_a_baseline_with_small_updates() -> None:
    """Else what small updates alone bring would count for its credit."""
    small = replace(VINE, baseline="few")
    plan = replace(SMALL, methods={"grpo": GRPO, "few": replace(GRPO, name="few"), "vine": small})
    rows = [replace(stored("easy", "grpo", seed, [0.2, end + seed / 100]), method=name)
            for name, end in (("grpo", 0.2), ("few", 0.6), ("vine", 0.4)) for seed in range(3)]  # fmt: skip
    found = {row.curves.method: row.difference for row in compare(EASY, curves_of(plan, EASY, rows), "tokens", 100)}
    assert found["grpo"] is None
    assert found["few"] is not None
    assert found["few"].value > 0
    assert found["vine"] is not None
    assert found["vine"].value < 0
    figures, (_, _, table, *_), _ = summarise(plan, rows, "bench")
    assert figures["easy_step_credit_ahead_per_token"]["value"] == 0
    assert [str(row[6]).endswith(" (few)") for row in table["rows"]] == [False, False, True]


def test_runs_of_another_rate_than_the_tuned_one_are_in_no_figure_and_that_is_said() -> None:
    rows = [stored("easy", "grpo", 1000, [0.2, 0.4, 0.4], 1e-4, is_tuning=True),
            stored("easy", "grpo", 1000, [0.2, 0.3, 0.3], 1e-5, is_tuning=True),
            *(stored("easy", "grpo", seed, [0.2, 0.4], 1e-5) for seed in range(3)),
            stored("easy", "vine", 0, [0.2, 0.4], 1e-5), stored("easy", "vine", 0, [0.2, 0.4], 1e-4),
            stored("easy", "vine", 1, [0.2, 0.4], 1e-4)]  # fmt: skip
    assert [row.method for row in curves_of(SMALL, EASY, rows)] == ["vine"]
    assert runs_of_other_rates(SMALL, rows) == [
        "3 runs of grpo on easy: of the rates 1e-05, figures are of the tuned 0.0001",
        "1 runs of vine on easy: of the rates 1e-05, figures are of 0.0001, which most runs have",
    ]


def test_a_rate_holds_for_the_policy_that_it_was_tuned_from() -> None:
    """Of another machine's policy the same rate may be too high: its runs are of the rate that was tuned from it."""
    tuning = [stored("easy", "grpo", 1000, accuracies, rate, is_tuning=True, policy=policy)
              for policy, best in (("d", 1e-4), ("e", 1e-5)) for rate in (1e-4, 1e-5, 1e-6)
              for accuracies in ([[0.2, 0.4, 0.4]] if rate == best else [[0.2, 0.3, 0.3]])]  # fmt: skip
    assert tuned_rates(SMALL, tuning) == {("easy", "grpo"): {"d": 1e-4, "e": 1e-5}}
    runs = [stored("easy", "grpo", 0, [0.2, 0.5], 1e-4), stored("easy", "grpo", 1, [0.2, 0.5], 1e-5, policy="e"),
            stored("easy", "grpo", 2, [0.2, 0.1], 1e-4, policy="e")]  # fmt: skip
    (curves,) = curves_of(SMALL, EASY, tuning + runs)
    assert (sorted(curves.seeds), curves.learning_rates, curves.tuning) == ([0, 1], (1e-4, 1e-5), "")
    assert runs_of_other_rates(SMALL, tuning + runs) == [
        "1 runs of grpo on easy: of the rates 0.0001, figures are of the tuned 0.0001, 1e-05"
    ]
    runs += [stored("easy", "grpo", seed, [0.2, 0.5], 1e-5, policy="f") for seed in (3, 4)]  # f is not tuned from
    runs += [stored("easy", "grpo", 5, [0.2, 0.5], 1e-4, policy="f"),
             stored("easy", "grpo", 6, [0.2, 0.5], 1e-6, policy="f")]  # fmt: skip
    (curves,) = curves_of(SMALL, EASY, tuning + runs)
    assert (sorted(curves.seeds), curves.tuning) == ([0, 1, 3, 4], " (another policy's)")
    table = summarise(SMALL, tuning + runs, "bench")[1][2]
    assert table["rows"][0][3] == "0.0001, 1e-05 (another policy's)"
    plan = replace(SMALL, cells={"easy": EASY, "hard": replace(HARD, rates_of="easy")})
    (curves,) = curves_of(plan, plan.cells["hard"], [*tuning, stored("hard", "grpo", 0, [0.2, 0.5], 1e-4, policy="x")])
    assert (curves.tuning, curves.is_tuned) == (" (of easy)", True)


def test_runs_are_asked_for_at_the_rate_tuned_from_the_policy_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def made(name: str) -> Path:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())
        return tmp_path / name

    asked = argparse.Namespace(tune=False, learning_rate=0.0, seeds=[0])
    plan = replace(SMALL, cells={"easy": EASY, "hard": replace(HARD, rates_of="easy")})
    cells, here = [*plan.cells.values()], digest(made("easy"))
    tuning = [stored("easy", "grpo", 1000, [0.2, end, end], rate, is_tuning=True, policy="other")
              for rate, end in ((1e-4, 0.4), (1e-5, 0.3))]  # fmt: skip

    def runs(rows: list[Record]) -> list[tuple[str, float, bool]]:
        found = asked_runs(asked, plan, cells, [GRPO], rows, lambda cell: made(cell.name))
        return [(run.cell.name, run.learning_rate, run.is_tuning) for run in found]

    assert runs(tuning) == []
    assert "2 without a learning rate tuned from the policy here are left out (grpo on easy" in capsys.readouterr().err
    asked.tune = True
    assert runs(tuning) == [("easy", 1e-4, True), ("easy", 1e-5, True)]
    own = [replace(row, policy=here) for row in tuning]
    assert runs([*tuning, own[0]]) == [("easy", 1e-5, True)]
    asked.tune = False
    assert runs([*tuning, *own]) == [("easy", 1e-4, False), ("hard", 1e-4, False)]
    assert runs([*tuning, *own, stored("easy", "grpo", 0, [0.2], 1e-4)]) == [("hard", 1e-4, False)]
    asked.learning_rate = 0.5
    assert runs([]) == [("easy", 0.5, False), ("hard", 0.5, False)]
    with pytest.raises(BadInput, match=r"0.5: grpo on easy was tuned from other policies, to 0.0001, and"):
        runs(tuning)
    asked.learning_rate = 1e-4
    assert runs(tuning) == [("easy", 1e-4, False), ("hard", 1e-4, False)]


def test_a_method_is_held_against_another_at_equal_updates() -> None:
    plan = replace(SMALL, methods={**SMALL.methods, "vine": replace(SMALL.methods["vine"], against="grpo")})
    rows = [stored("easy", "grpo", seed, [0.2, 0.2, 0.2, 0.9]) for seed in range(3)]  # behind update 1: not read
    rows += [stored("easy", "vine", seed, [0.2, 0.4 + seed / 10], tokens=900) for seed in range(3)]
    figure = summarise(plan, rows, "how")[0]["easy_vine_minus_grpo_at_equal_updates"]
    assert figure["value"] == pytest.approx(0.15)  # half of 0.2, 0.3, 0.4: the mean along a straight line
    assert figure["low"] == pytest.approx(0.15 - 4.3027 * 0.05 / math.sqrt(3), abs=1e-4)
    assert (figure["unit"], figure["met"]) == ("mean accuracy up to 1 updates, vine and grpo not tuned, 3 seeds", True)
    for method in ("grpo", "vine"):
        rows += [stored("easy", method, 1000, [0.2, 0.5 + place / 10], rate, is_tuning=True)
                 for place, rate in enumerate((1e-5, 1e-4))]  # fmt: skip
    figures = summarise(plan, rows, "how")[0]
    assert figures["easy_vine_minus_grpo_at_equal_updates"]["unit"] == "mean accuracy up to 1 updates, 3 seeds"
    assert figures["easy_step_credit_ahead_per_token"]["unit"] == "methods, of 2"
    assert not any("minus" in name for name in summarise(SMALL, rows, "how")[0])


def test_a_reward_model_is_shown_with_and_without_what_it_cost() -> None:
    rows = [stored("easy", "grpo", 0, [0.2, 0.4]), stored("easy", "prm", 0, [0.2, 0.8], tokens_before=60)]
    _, paid, free = compare(EASY, curves_of(SMALL, EASY, rows), "tokens", 100)
    assert free.curves.method == "prm" + GIVEN
    assert paid.accuracy.value == pytest.approx(0.2 + 0.6 * 0.4)
    assert free.accuracy.value == pytest.approx(0.8)
    assert paid.to_target.middle == pytest.approx(160)
    assert free.to_target.middle == pytest.approx(100)


def test_figures_tables_and_pictures_come_from_records_and_say_how_many_seeds(tmp_path: Path) -> None:
    rows = [stored("easy", "grpo", seed, [0.2, 0.3 + seed / 100]) for seed in range(3)]
    rows += [stored("easy", "vine", seed, [0.2, 0.85 + seed / 50]) for seed in range(3)]
    rows += [stored("hard", "grpo", 0, [0.01, 0.02]), stored("hard", "vine", 0, [0.0, 0.9])]
    figures, tables, found = summarise(SMALL, rows, "how")
    assert figures["easy_step_credit_ahead_per_token"]["value"] == 1
    assert figures["easy_step_credit_ahead_per_token"]["unit"] == "methods, of 2, 2 not tuned"
    assert figures["hard_step_credit_ahead_per_token"]["value"] == 0  # one seed shows nothing
    alone = [row for row in rows if row.method != "grpo"]
    assert not any("ahead" in name for name in summarise(SMALL, alone, "how")[0])  # nothing was compared
    assert [figures[f"{cell}_methods"]["value"] for cell in ("easy", "hard")] == [0, 0]
    more = [replace(row, seed=row.seed + 3) for row in rows if row.cell == "easy"]
    counted = summarise(SMALL, [*rows, *more], "how")[0]["easy_methods"]
    assert (counted["value"], counted["goal"], counted["met"]) == (2, 10, False)
    ahead, target = tables[0], tables[1]
    assert ahead["columns"][2:] == ["easy (20.0 % at the start)", "hard (0.5 % at the start)"]
    assert target["columns"][2] == "easy (20.0 % at the start, target 80.0 %)"
    assert [row[0] for row in ahead["rows"]] == ["grpo", "vine"]
    assert ahead["rows"][0][3] == "1.5; 1", "of the baseline its own mean"
    assert ahead["rows"][1][2] == f"{tables[2]['rows'][1][6]}; 3 *"
    assert target["rows"][1][2:] == ["90 [87, 92]; 3 of 3", "89; 1 of 1"]
    easy, hard = tables[2]["rows"], tables[5]["rows"]
    assert easy[0][:4] == ["grpo", "outcome", 3, "0.0001 (not tuned)"]
    assert easy[1][6].startswith("+28.0 [")  # half of 0.55, 0.56, 0.57
    assert easy[0][8:] == ["not reached", "0 of 3"]
    assert easy[1][8:] == ["90 [87, 92]", "3 of 3"]  # 0.8 of 0.2 to 0.87: 100 * 0.6 / 0.67
    assert (hard[1][4], hard[1][7]) == ("90.0", "")
    paths = draw(SMALL, found, tmp_path)
    drawn = {f"{cell}-{cost}.svg" for cell in ("easy", "hard") for cost in ("tokens", "seconds")}
    assert {path.name for path in paths} == drawn | {"map.svg"}
    for path in paths:
        ElementTree.parse(path)
    assert "vine (3)" in (tmp_path / "easy-tokens.svg").read_text()
    assert ("easy: grpo", 0, 0.2, None) in [(n, g, round(x, 6), y) for n, g, x, y in map_points(SMALL, found)]


def test_a_record_is_kept_read_again_and_left_out_when_the_plan_has_changed(tmp_path: Path) -> None:
    policy, results = tmp_path / "policy", tmp_path / "results"
    policy.mkdir()
    (policy / "model.safetensors").write_bytes(b"weights")
    places = Places(SMALL, tmp_path / "runs", results, {"easy": policy}, {})
    run = Run(EASY, GRPO, 3, 1e-4)
    (places.run_dir(run) / "checkpoints").mkdir(parents=True)
    (places.run_dir(run) / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    kept = record(places, run)
    assert not (places.run_dir(run) / "checkpoints").exists()
    assert (kept.points, kept.machine) == (points_of(ROWS), machine())
    assert read_records(SMALL, results) == ([kept], [])
    changed = replace(SMALL, settings=("server=none", "engine.concurrency=8"))
    assert read_records(changed, results)[0] == []
    assert "other settings" in read_records(changed, results)[1][0]
    silent = Run(EASY, VINE, 3, 1e-4)
    places.run_dir(silent).mkdir(parents=True)
    for num_states, is_said in ((0.0, True), (2.0, False)):
        rows = [row | ({"estimate/num_states": num_states} if "rollout/reward" in row else {}) for row in ROWS]
        rows.append({"step": 9, "estimate/num_states": num_states})
        (places.run_dir(silent) / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if is_said:
            with pytest.raises(BadInput, match="valued no state in any iteration"):
                record(places, silent)
            assert read_records(SMALL, results)[0] == [kept]
        else:
            record(places, silent)
            places.record_path(silent, kept.policy).unlink()
    other_method = Run(EASY, VINE, 3, 1e-4)
    check_policies([kept], [other_method], lambda cell: policy)
    (policy / "model.safetensors").write_bytes(b"others")
    with pytest.raises(BadInput, match=f"seed 3 began from other weights .{kept.policy}, these are {digest(policy)}"):
        check_policies([kept], [other_method], lambda cell: policy)
    check_policies([kept], [replace(other_method, seed=4)], lambda cell: policy)
    tuning = replace(kept, seed=1000, is_tuning=True)
    check_policies([tuning], [replace(run, seed=1000, is_tuning=True)], lambda cell: policy)
    tuning_run = replace(run, seed=1000, is_tuning=True)
    paths = {places.record_path(tuning_run, of).relative_to(results) for of in ("one", "two")}
    assert paths == {Path(f"credit/easy/tuning/{of}/grpo-0.0001-1000.json") for of in ("one", "two")}


def test_records_and_folders_of_reward_models_say_how_these_were_made(tmp_path: Path) -> None:
    few, many = (replace(EASY, process_rewards=(f"num_problems={number}",)) for number in (10, 20))
    plan = dataclasses.replace(SMALL, cells={"easy": few})
    assert recorded_settings(plan, Run(few, PRM, 0, 1e-4))[-1] == "process_rewards.num_problems=10"
    assert recorded_settings(plan, Run(few, GRPO, 0, 1e-4)) == settings_of(plan, Run(few, GRPO, 0, 1e-4))
    row = dataclasses.asdict(stored("easy", "prm", 0, [0.1])) | {
        "settings": recorded_settings(plan, Run(few, PRM, 0, 1e-4))
    }
    path = tmp_path / "credit" / "easy" / "prm.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(row | {"points": [[0, 0.0, 0.0, 0.1]]}))
    assert len(read_records(plan, tmp_path)[0]) == 1
    _, stale = read_records(dataclasses.replace(plan, cells={"easy": many}), tmp_path)
    assert stale == ["credit/easy/prm.json: was run with other settings than the plan's"]
    run = tmp_path / "easy" / "process_rewards"
    (run / "prm" / "model").mkdir(parents=True)
    places = Places(plan, tmp_path, tmp_path, {}, {})
    with pytest.raises(SystemExit, match="made with other settings than the plan's"):
        places.process_rewards_of(few)  # nobody knows how
    (run / "made_by.json").write_text('["num_problems=10"]')
    assert places.process_rewards_of(few) == run
    with pytest.raises(SystemExit, match="num_problems=20"):
        places.process_rewards_of(many)
    given = dataclasses.replace(places, process_rewards={"easy": run})  # `--process-rewards`
    assert given.process_rewards_of(few) == run
    with pytest.raises(SystemExit, match="num_problems=20"):
        given.process_rewards_of(many)


def test_the_cost_of_process_rewards_is_all_that_was_sampled_and_all_stages_up_to_the_model(tmp_path: Path) -> None:
    """Also of a sampling that was cut and went on, whose counts are those of its last part."""
    data = tmp_path / "process_rewards"
    data.mkdir()
    for name, rows in (("trajectories", [[1, 2], [3]]), ("completions", [[4, 5, 6]])):
        (data / f"{name}.jsonl").write_text("".join(json.dumps({"response_ids": ids}) + "\n" for ids in rows))
        (data / f"{name}.meta.json").write_text(json.dumps({"counts": {"generated_tokens": 1}}))
    stages = (
        "sample_trajectories",
        "choose_labels",
        "join_completions",
        "label_by_contrast",
        "train_prm_policy",
        "make_prm",
        "score_steps",
    )
    (tmp_path / "seconds.jsonl").write_text("".join(json.dumps({"stage": s, "seconds": 2}) + "\n" for s in stages))
    assert cost_of_process_rewards(tmp_path) == (6.0, 12.0)


def test_a_run_that_went_on_for_longer_or_was_looked_at_more_often_stands_for_one_of_the_plan() -> None:
    wanted = ["-cn", "c", "evaluation.every=6", "seed=1", "stop_after_tokens=500", "stop_after_seconds=0"]
    longer = ["-cn", "c", "evaluation.every=2", "seed=1", "stop_after_tokens=1500", "stop_after_seconds=60"]
    assert agree(longer, wanted)
    assert not agree(wanted, longer)
    assert not agree([*longer, "reward=x"], wanted)
    assert not agree([row.replace("seed=1", "seed=2") for row in longer], wanted)
    for every in (7, 0):
        assert not agree([row.replace("every=2", f"every={every}") for row in longer], wanted)
    assert agree(["-cn", "c", "evaluation.every=6", *wanted[3:], "evaluation.every=2"], wanted)
    ahead = "rollout.max_staleness=4"
    assert agree([*wanted, ahead], [*wanted, ahead])
    assert not agree([*longer, ahead], [*wanted, ahead])
    updates = ["-cn", "c", "num_iterations=40"]
    assert agree(updates, updates)
    assert not agree(["-cn", "c", "num_iterations=80"], updates)
    assert not agree(updates, [*updates, "stop_after_tokens=5"])


def test_of_a_longer_run_what_the_plan_would_not_have_made_is_not_read() -> None:
    cell = Cell("easy", (), "p", (), tokens=500, seconds=10.0, tuning_tokens=100)
    points = [Point(updates, 100.0 * updates + 50, 2.0 * updates, 0.1) for updates in range(12)]
    row = Record("easy", "grpo", 0, 0.1, False, [], "p", points, 50.0, 0.0, 0.0, "", "", "")
    assert within_plan(cell, row)[-1] == points[5]  # 500 tokens of its own, 10 seconds
    assert within_plan(replace(cell, seconds=15.0), row)[-1] == points[8]
    assert within_plan(replace(cell, tokens=5000), row) == points
    assert within_plan(replace(cell, tokens=0, updates=3), row) == points
