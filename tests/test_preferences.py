"""Preference pairs by outcome, by process rewards and from a shared state, by hand."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data.jsonl import write_records
from data.records import BadInput, PreferencePair, StepScores, StepValues, Trajectory
from pipeline.build_preferences import OutcomePreferences, ProcessPreferences, StepPreferences, outcome_pairs
from pipeline.process_pairs import ProcessRule, Scored, process_pairs, rejection_sample
from pipeline.stage import StageContext
from pipeline.state_pairs import step_pairs
from pipeline.trajectory_groups import group_distinct, sample_order
from rewards.aggregate import BadAggregate, aggregate


def trajectory(number: int, is_correct: bool, *steps: list[int], problem: str = "p", **changes: Any) -> Trajectory:
    """A trajectory whose steps are these token ids; its text names them."""
    ends = [sum(map(len, steps[: index + 1])) for index in range(len(steps))]
    texts = [".".join(map(str, step)) + "\n" for step in steps]
    ids = [token for step in steps for token in step]
    answer = "7" if is_correct else "8"
    identity, response = f"{problem}/{number}", "".join(texts)
    made = Trajectory(identity, problem, "Q\n", response, texts, [90, 91], ids, ends, "stop", "7", answer, is_correct)
    return replace(made, **changes)


RIGHT = [trajectory(0, True, [1], [2]), trajectory(1, True, [1], [3])]
WRONG = [trajectory(2, False, [1], [4]), trajectory(3, False, [5], [6])]


def ids_of(pairs: list[PreferencePair]) -> list[str]:
    return [pair.id for pair in pairs]


def context() -> StageContext:
    return StageContext(None, Path("unused"), 10.0)


def paired(scored: Sequence[Scored], seed: int = 0, **rule: Any) -> list[PreferencePair]:
    return process_pairs(scored, ProcessRule(**rule), random.Random(seed))


# --- which trajectories -------------------------------------------------------------------------------------


def test_trajectories_with_the_same_tokens_are_one_and_the_first_stays() -> None:
    again = replace(RIGHT[0], id="p/9")
    assert group_distinct([RIGHT[0], again, WRONG[0]]) == {"p": [RIGHT[0], WRONG[0]]}


def test_the_same_tokens_for_another_problem_are_another_trajectory() -> None:
    other = trajectory(0, True, [1], [2], problem="q")
    assert group_distinct([RIGHT[0], other]) == {"p": [RIGHT[0]], "q": [other]}


def test_cut_and_empty_trajectories_are_left_out() -> None:
    cut = trajectory(4, False, [7], finish_reason="length")
    empty = trajectory(5, False, response_ids=[0])
    assert group_distinct([cut, empty, RIGHT[0]]) == {"p": [RIGHT[0]]}


def test_trajectories_without_token_ids_are_refused_not_merged_into_one() -> None:
    with pytest.raises(BadInput, match="trajectory 'p/0' has 2 steps and 0 token ends"):
        group_distinct([replace(RIGHT[0], response_ids=[], step_ends=[])])


# --- by outcome ---------------------------------------------------------------------------------------------


def test_outcome_pairs_are_all_right_over_wrong() -> None:
    pairs = outcome_pairs([*WRONG, *RIGHT], 10, random.Random(0))
    assert sorted(ids_of(pairs)) == ["p/0>p/2", "p/0>p/3", "p/1>p/2", "p/1>p/3"]


def test_an_outcome_pair_written_out() -> None:
    (pair,) = outcome_pairs([RIGHT[0], WRONG[0]], 10, random.Random(0))
    assert pair == PreferencePair(
        "p/0>p/2", "p", "outcome", "Q\n", "1\n2\n", "1\n4\n", [90, 91], [1, 2], [1, 4], 1.0, 0.0
    )


def test_outcome_pairs_are_capped_and_drawn_by_the_seed() -> None:
    group = [*RIGHT, *WRONG]
    drawn = [ids_of(outcome_pairs(group, 2, random.Random(seed))) for seed in range(20)]
    assert all(len(set(ids)) == 2 for ids in drawn)
    assert len({tuple(ids) for ids in drawn}) > 5
    assert drawn[3] == ids_of(outcome_pairs(group, 2, random.Random(3)))


def test_no_pair_where_all_are_right_or_all_are_wrong() -> None:
    assert outcome_pairs(RIGHT, 4, random.Random(0)) == []
    assert outcome_pairs(WRONG, 4, random.Random(0)) == []


# --- by process rewards -------------------------------------------------------------------------------------

SCORED = [(RIGHT[0], 0.9), (RIGHT[1], 0.4), (WRONG[0], 0.3), (WRONG[1], 0.6)]


def test_process_pairs_are_the_best_right_over_the_hardest_wrong_and_over_worse_right_ones() -> None:
    pairs = paired(SCORED, max_chosen=1, max_rejected=1, margin=0.4)
    assert ids_of(pairs) == ["p/0>p/3", "p/0>p/1"]
    assert [(pair.chosen_score, pair.rejected_score) for pair in pairs] == [(0.9, 0.6), (0.9, 0.4)]
    assert [pair.kind for pair in pairs] == ["process", "process_correct"]


def test_every_chosen_one_meets_every_rejected_one() -> None:
    pairs = paired(SCORED, max_chosen=2, max_rejected=2, margin=0.4)
    assert ids_of(pairs) == ["p/0>p/3", "p/0>p/2", "p/0>p/1", "p/1>p/3", "p/1>p/2"]


@pytest.mark.parametrize(("better", "worse"), [(0.9, 0.4), (1.0, 0.5), (0.5, 0.0)])
def test_a_gap_of_just_the_margin_makes_no_pair_of_right_ones(better: float, worse: float) -> None:
    assert paired([(RIGHT[0], better), (RIGHT[1], worse)], margin=0.5) == []
    assert ids_of(paired([(RIGHT[0], better), (RIGHT[1], worse)], margin=0.499)) == ["p/0>p/1"]


def test_the_margin_is_strict_in_tenths_too() -> None:
    """0.9 - 0.6 is 0.30000000000000004 in floats."""
    assert paired([(RIGHT[0], 0.9), (RIGHT[1], 0.6)], margin=0.3) == []


def test_the_cap_keeps_the_first_pairs_of_a_problem() -> None:
    assert ids_of(paired(SCORED, margin=0.4, max_pairs=3)) == ["p/0>p/3", "p/0>p/2", "p/0>p/1"]


def test_equal_scores_are_ordered_by_id_whatever_the_order_read() -> None:
    scored = [(one, 0.5) for one in (*RIGHT, *WRONG)]
    assert ids_of(paired(scored, max_chosen=1, max_rejected=1, margin=0.0)) == ["p/0>p/2"]
    assert ids_of(paired(scored[::-1], max_chosen=1, max_rejected=1, margin=0.0)) == ["p/0>p/2"]


@pytest.mark.parametrize(("how", "value"), [("product", 0.1), ("minimum", 0.25), ("last", 0.5), ("mean", 31 / 60)])
def test_step_scores_make_one_score(how: str, value: float) -> None:
    assert aggregate([0.8, 0.25, 0.5], how) == pytest.approx(value)


def test_a_trajectory_without_steps_scores_zero_and_an_unknown_aggregate_is_refused() -> None:
    assert aggregate([], "product") == 0.0
    with pytest.raises(BadAggregate, match="no aggregate 'median': there are product, minimum, last, mean"):
        aggregate([0.5], "median")


# --- from a state -------------------------------------------------------------------------------------------

A = trajectory(0, True, [1, 2], [3], [4, 5])
B = trajectory(1, False, [1, 2], [6, 7], [8])
C = trajectory(2, False, [1, 2], [3], [9])
VALUES = {"p/0": [0.5, 0.75, 1.0], "p/1": [0.5, 0.25, 0.0], "p/2": [0.5, 0.75, 0.0]}


def test_step_pairs_are_the_best_over_the_worst_next_step_of_every_shared_state() -> None:
    pairs = step_pairs([A, B, C], VALUES, margin=0.4)
    assert ids_of(pairs) == ["p/0#1>p/1#1", "p/0#2>p/2#2"]
    assert [(pair.chosen_score, pair.rejected_score) for pair in pairs] == [(0.75, 0.25), (1.0, 0.0)]


def test_a_step_pair_written_out_with_its_prompt_in_mid_solution() -> None:
    pair = step_pairs([A, B, C], VALUES, margin=0.4)[1]
    assert pair == PreferencePair(
        "p/0#2>p/2#2", "p", "step", "Q\n1.2\n3\n", "4.5\n", "9\n", [90, 91, 1, 2, 3], [4, 5], [9], 1.0, 0.0
    )


def test_a_step_pair_joins_back_to_the_trajectories() -> None:
    for pair in step_pairs([A, B, C], VALUES, margin=0.4):
        for side, ids, text in zip(pair.id.split(">"), (pair.chosen_ids, pair.rejected_ids),
                                   (pair.chosen, pair.rejected), strict=True):  # fmt: skip
            name, _, step = side.partition("#")
            source = {"p/0": A, "p/1": B, "p/2": C}[name]
            whole = source.prompt_ids + source.response_ids[: source.step_ends[int(step)]]
            assert pair.prompt_ids + ids == whole
            assert pair.prompt + text == source.prompt + "".join(source.steps[: int(step) + 1])


def test_a_gap_of_just_the_margin_makes_no_step_pair() -> None:
    assert ids_of(step_pairs([A, B, C], VALUES, margin=0.5)) == ["p/0#2>p/2#2"]
    assert step_pairs([A, B, C], VALUES, margin=1.0) == []
    tenths = {"p/0": [0.5, 0.9, 1.0], "p/1": [0.5, 0.6, 0.0], "p/2": [0.5, 0.9, 0.0]}
    assert ids_of(step_pairs([A, B, C], tenths, margin=0.3)) == ["p/0#2>p/2#2"]


def test_a_first_step_is_paired_at_the_prompt() -> None:
    other = trajectory(3, False, [8], [9])
    (pair,) = step_pairs([A, other], {**VALUES, "p/3": [0.0, 0.0]}, margin=0.4)
    assert (pair.id, pair.prompt, pair.prompt_ids) == ("p/0#0>p/3#0", "Q\n", [90, 91])


def test_the_same_next_step_of_two_trajectories_is_one_option() -> None:
    again = trajectory(3, True, [1, 2], [3], [4, 5], [1])
    values = {"p/0": [0.5, 0.75, 1.0], "p/3": [0.5, 0.75, 1.0, 1.0]}
    assert step_pairs([A, again], values, margin=0.0) == []


# --- the stages on files ------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Trajectories of two problems, one of them all right, with their scores and values."""
    other = trajectory(0, True, [1], [2], problem="q")
    cut = trajectory(4, False, [9], finish_reason="length")
    names = {name: str(tmp_path / f"{name}.jsonl") for name in ("trajectories", "scores", "values")}
    write_records(names["trajectories"], [A, B, C, cut, replace(B, id="p/5"), other])
    write_records(names["scores"], [
        StepScores("p/0", "p", [0.5, 1.0, 1.0]), StepScores("p/1", "p", [0.5, 0.5, 0.5]),
        StepScores("p/2", "p", [0.5, 1.0, 0.5]), StepScores("p/5", "p", [1.0, 1.0, 1.0]),
        StepScores("q/0", "q", [1.0, 1.0]),
    ])  # fmt: skip
    write_records(names["values"], [
        StepValues(t.id, "p", t.prompt, t.steps, t.prompt_ids, t.response_ids, t.step_ends,
                   VALUES[t.id], [1, 1, 1], [1, 1, 1], t.is_correct)
        for t in (A, B, C)
    ])  # fmt: skip
    return names


def test_the_outcome_stage_reads_each_distinct_whole_trajectory_once(files: dict[str, str]) -> None:
    counted = context()
    pairs = OutcomePreferences(max_pairs=4).run(files["trajectories"], counted)
    assert sorted(ids_of(pairs)) == ["p/0>p/1", "p/0>p/2"]
    assert counted.counts == {
        "read": 6, "cut": 1, "repeated": 1, "problems": 2, "problems_all_right": 1, "problems_all_wrong": 0,
        "pairs": 2, "pairs_outcome": 2, "problems_with_pairs": 1, "most_pairs_of_a_problem": 2,
        "distinct_chosen": 1, "distinct_rejected": 2,
        "margin_mean": 1.0, "margin_lowest": 1.0, "margin_median": 1.0, "margin_highest": 1.0,
        "chosen_tokens_mean": 5, "chosen_tokens_lowest": 5, "chosen_tokens_median": 5, "chosen_tokens_highest": 5,
        "rejected_tokens_mean": 4.5, "rejected_tokens_lowest": 4, "rejected_tokens_median": 4.5,
        "rejected_tokens_highest": 5, "chosen_is_longer": 0.5,
    }  # fmt: skip


def test_one_problem_draws_the_same_pairs_whatever_stands_beside_it(tmp_path: Path) -> None:
    path = str(tmp_path / "t.jsonl")
    stage = OutcomePreferences(max_pairs=2)
    write_records(path, [*RIGHT, *WRONG])
    alone = stage.run(path, context())
    write_records(path, [trajectory(0, True, [1], problem="q"), trajectory(1, False, [2], problem="q"), *RIGHT, *WRONG])
    assert [pair for pair in stage.run(path, context()) if pair.problem_id == "p"] == alone


def test_the_process_stage_ranks_by_aggregated_scores(files: dict[str, str]) -> None:
    counted = context()
    stage = ProcessPreferences(scores=files["scores"], max_chosen=1, max_rejected=1, margin=0.4)
    (pair,) = stage.run(files["trajectories"], counted)
    assert (pair.id, pair.chosen_score, pair.rejected_score) == ("p/0>p/2", 0.5, 0.25)
    assert (counted.counts["pairs_process"], counted.counts["margin_mean"]) == (1, 0.25)


def test_the_process_stage_counts_pairs_over_right_ones(tmp_path: Path) -> None:
    trajectories, scores = str(tmp_path / "t.jsonl"), str(tmp_path / "s.jsonl")
    write_records(trajectories, [*RIGHT, WRONG[0]])
    write_records(scores, [StepScores(one.id, "p", [1.0, score]) for one, score in SCORED])
    counted = context()
    stage = ProcessPreferences(scores=scores, how="last", max_chosen=1, max_rejected=1, margin=0.4)
    pairs = stage.run(trajectories, counted)
    assert ids_of(pairs) == ["p/0>p/2", "p/0>p/1"]
    assert (counted.counts["pairs_process"], counted.counts["pairs_process_correct"]) == (1, 1)


def test_a_trajectory_without_scores_is_refused(files: dict[str, str], tmp_path: Path) -> None:
    scores = str(tmp_path / "few.jsonl")
    write_records(scores, [StepScores("p/0", "p", [1.0, 1.0, 1.0])])
    with pytest.raises(BadInput, match=r"few.jsonl: no scores for trajectory 'p/1'"):
        ProcessPreferences(scores=scores).run(files["trajectories"], context())


def test_the_step_stage_joins_values_by_id(files: dict[str, str]) -> None:
    pairs = StepPreferences(values=files["values"], margin=0.4).run(files["trajectories"], context())
    assert ids_of(pairs) == ["p/0#1>p/1#1", "p/0#2>p/2#2"]
