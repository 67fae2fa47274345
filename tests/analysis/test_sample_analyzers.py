"""Diversity, problems hit and credit along solutions, on a few samples whose figures are computed by hand."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from espalier.analysis.analyzers.credit_by_position import MeasureStepCredit, spread_evenly
from espalier.analysis.analyzers.diversity import MeasureDiversity, diversity, self_bleu, step_bleu
from espalier.analysis.analyzers.problem_hits import CountHits
from espalier.data.bleu import bleu, grams
from espalier.data.jsonl import write_records
from espalier.data.records import BadInput, SampledRollout, Trajectory
from espalier.pipeline.stage import StageContext, run_stage
from espalier.runtime.schemas import StageConfig


def context(folder: Path) -> StageContext:
    return StageContext(None, folder / "out.json", 10.0)


def solution(name: str, steps: list[str], answer: str | None = "1", *, is_correct: bool = True) -> Trajectory:
    return Trajectory(name, name.partition("/")[0], "Q", "".join(steps), steps, [], [], [], "stop", "1", answer,
                      is_correct)  # fmt: skip


def test_bleu_is_papinenis_by_hand() -> None:
    def score(text: str, *references: str) -> float:
        return bleu(grams(text), [grams(reference) for reference in references])

    assert score("a b c d e", "a b c d f") == pytest.approx((4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    assert score("a b c", "a b c d e") == pytest.approx(math.exp(1 - 5 / 3))  # too short; orders 1 to 3
    assert score("a b c", "a b c d e", "x y z") == pytest.approx(1.0)  # the nearest reference has three words
    assert score("a a b", "a b") == 0.0  # no common run of three words
    assert score("a a", "a", "b a") == 0.0
    assert score("a", "b a") == pytest.approx(math.exp(1 - 2))
    assert score("", "a") == score("\n", "a") == 0.0
    assert score("5*2", "5 * 2") == pytest.approx(1.0)  # signs are words


def test_self_bleu_holds_each_solution_against_all_others() -> None:
    texts = [grams("a b"), grams("a b"), grams("c d")]
    assert self_bleu(texts) == pytest.approx(2 / 3)


def test_diversity_of_two_solutions_by_hand(tmp_path: Path) -> None:
    """Words a b c d and a b c e: distinct 5/8, 4/6, 3/4, 2/2; p4 = 0 makes both BLEUs 0; 1.0 is the answer 1."""
    group = [solution("p/0", ["a b\n", "c d\n"]), solution("p/1", ["a b\n", "c e\n"], "1.0"), solution("q/0", ["x"])]
    write_records(tmp_path / "samples.jsonl", group)
    found = MeasureDiversity({"sft": str(tmp_path / "samples.jsonl")}).run("", context(tmp_path))["samples"]["sft"]
    assert (found["problems"], found["solutions_per_problem"]) == (1, 2.0)
    assert found["distinct_answers"]["mean"] == 1.0
    assert found["distinct_responses"]["mean"] == 1.0
    assert found["self_bleu"]["mean"] == 0.0
    assert [found[f"distinct_{n}"]["mean"] for n in (1, 2, 3, 4)] == [5 / 8, pytest.approx(2 / 3, abs=1e-5), 0.75, 1.0]
    assert found["step_bleu_by_depth"] == {"0": 1.0, "1": 0.0}
    assert found["step_bleu"] == found["step_bleu_over_depths"] == 0.5


def test_next_steps_are_compared_where_the_steps_before_are_the_same() -> None:
    three = [solution(f"p/{n}", steps) for n, steps in enumerate([["a b", "c"], ["a b", "c"], ["x y", "c"]])]
    assert step_bleu([three]) == {0: [pytest.approx(1 / 3)], 1: [pytest.approx(1.0)]}


def test_one_solution_of_a_problem_has_no_diversity() -> None:
    with pytest.raises(BadInput, match=r"f\.jsonl: no problem has two solutions"):
        diversity([solution("p/0", ["a"])], "f.jsonl")
    with pytest.raises(BadInput, match="names no file"):
        MeasureDiversity("").inputs()


def sampled(
    name: str, iteration: int, advantages: list[float], values: list[float], is_correct: bool
) -> SampledRollout:
    steps = ["s\n"] * len(advantages)
    return SampledRollout(
        name, name, iteration, iteration - 1, "Q", steps, values, advantages, [], float(is_correct), {}, 5, "stop", "1",
        "1", is_correct,
    )  # fmt: skip


def write_samples(run: Path, rows: list[SampledRollout]) -> Path:
    (run / "samples").mkdir(parents=True, exist_ok=True)
    for iteration in {row.iteration for row in rows}:
        path = run / "samples" / f"iteration-{iteration:06d}.jsonl"
        write_records(path, [row for row in rows if row.iteration == iteration])
    return run


def test_hits_add_up_over_the_rounds(tmp_path: Path) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    wrong = [solution(name, ["a"], is_correct=False) for name in ("q/0", "q/1", "r/0")]
    write_records(one, [solution("p/0", ["a"]), *wrong[:2]])
    write_records(two, [solution("q/2", ["a"]), wrong[2]])
    found = CountHits([str(one), str(two)]).run("", context(tmp_path))
    first = {"round": "one", "attempts": 3, "accuracy": 0.333333, "solved_once": 0.5, "problems_so_far": 2,
             "new_hits": 1, "once_hit": 0.5}  # fmt: skip
    second = {"round": "two", "attempts": 2, "accuracy": 0.5, "solved_once": 0.5, "problems_so_far": 3, "new_hits": 1,
              "once_hit": 0.666667}  # fmt: skip
    assert found == {"problems": 3, "rounds": [first, second], "never_hit": {"r": 1}}


def test_hits_of_a_run_are_those_of_its_sampled_rollouts(tmp_path: Path) -> None:
    run = write_samples(tmp_path / "run", [sampled("p", 1, [0.0], [], False), sampled("p", 2, [0.0], [], True)])
    found = CountHits(str(run)).run("", context(tmp_path))
    assert [row["once_hit"] for row in found["rounds"]] == [0.0, 1.0]
    assert found["never_hit"] == {}


@pytest.mark.parametrize("is_hits", [True, False])
def test_the_figures_of_a_run_that_has_gone_on_are_made_anew(is_hits: bool, tmp_path: Path) -> None:
    rows = [sampled("p", at, [0.0] * 3, [0.5] * 3, True) for at in (1, 2)]
    run = write_samples(tmp_path / "run", rows[:1])
    stage = CountHits(str(run)) if is_hits else MeasureStepCredit(str(run), 2)
    made = StageConfig(output=str(tmp_path / "out.json"), input="", stage={"_target_": "x"})
    for number, seen in enumerate((rows[:1], rows), 1):
        write_samples(run, seen)
        assert run_stage(stage, None, made) == 0
        found = json.loads((tmp_path / "out.json").read_text())
        assert len(found["rounds" if is_hits else "iterations"]) == number


def test_hits_of_a_run_that_wrote_one_of_eight_rollouts_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = write_samples(tmp_path / "run", [sampled("p", 1, [0.0], [], False)])
    config = {"rollout": {"group_size": 8}, "samples": {"rollouts_per_problem": 1}}
    (run / "config.yaml").write_text(json.dumps(config))
    CountHits(str(run)).run("", context(tmp_path))
    assert "7 rollouts of every group were not written down" in caplog.text
    caplog.clear()
    (run / "config.yaml").write_text(json.dumps({**config, "samples": {"rollouts_per_problem": 0}}))
    CountHits(str(run)).run("", context(tmp_path))
    assert not caplog.records


def test_credit_along_the_way_by_hand(tmp_path: Path) -> None:
    """Four steps begin in the tenths 0, 2, 5 and 7; a solution of two steps is left out."""
    rows = [
        sampled("p", 1, [0.0, 0.5, -0.5, 1.0], [0.2, 0.4, 0.6, 0.8], True),
        sampled("q", 1, [0.0, -1.0, 0.0, 0.0], [0.1, 0.1, 0.1, 0.1], False),
        sampled("r", 1, [9.0, 9.0], [9.0, 9.0], True),
    ]
    run = write_samples(tmp_path / "run", rows)
    found: dict[str, Any] = MeasureStepCredit(str(run), 5).run("", context(tmp_path))["iterations"]["1"]
    assert list(found) == ["0", "2", "5", "7"]
    assert found["2"] == {"steps": 2, "advantage": -0.25, "advantage_size": 0.75, "advantage_std": 0.75,
                          "advantage_zero": 0.0, "value_right": 0.4, "value_wrong": 0.1}  # fmt: skip
    assert found["0"]["advantage_zero"] == 1.0


def test_a_run_without_values_has_advantages_all_the_same(tmp_path: Path) -> None:
    run = write_samples(tmp_path / "run", [sampled("p", 1, [1.0, 1.0, 1.0], [], True)])
    found = MeasureStepCredit(str(run), 5).run("", context(tmp_path))["iterations"]["1"]
    assert found["0"]["advantage"] == 1.0
    assert found["0"]["value_right"] is None


def test_iterations_are_spread_with_the_first_and_the_last() -> None:
    assert spread_evenly(list(range(1, 14)), 5) == [1, 4, 7, 10, 13]
    assert spread_evenly([3], 2) == [3]


def test_runs_without_samples_end_in_one_line(tmp_path: Path) -> None:
    short = write_samples(tmp_path / "short", [sampled("p", 1, [1.0], [], True)])
    with pytest.raises(BadInput, match="none of 1 rollouts has 3 steps"):
        MeasureStepCredit(str(short), 5).run("", context(tmp_path))
    with pytest.raises(BadInput, match="holds no samples/iteration"):
        CountHits(str(tmp_path)).inputs()
    with pytest.raises(BadInput, match="max_iterations must be at least 2"):
        MeasureStepCredit(str(short), 1).run("", context(tmp_path))
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(BadInput, match="empty: leave it out"):
        CountHits([str(tmp_path / "empty.jsonl")]).run("", context(tmp_path))
    (short / "samples" / "iteration-000001.jsonl").write_text("")
    with pytest.raises(BadInput, match="no rollout in any file"):
        MeasureStepCredit(str(short), 5).run("", context(tmp_path))
