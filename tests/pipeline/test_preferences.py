"""Preference pairs by outcome, by process rewards and from a shared state, by hand."""

import gzip
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from espalier.data.jsonl import read_records, write_records
from espalier.data.records import BadInput, PreferencePair, StepScores, StepValues, Trajectory
from espalier.pipeline.pairs.build_preferences import (
    OutcomePreferences,
    PartialPreferences,
    ProcessPreferences,
    StepPreferences,
    outcome_pairs,
)
from espalier.pipeline.pairs.process_pairs import (
    ProcessRule,
    Scored,
    process_pairs,
    rejection_sample,
    up_to_first_error,
)
from espalier.pipeline.pairs.state_pairs import step_pairs
from espalier.pipeline.pairs.trajectory_groups import group_distinct, sample_order
from espalier.pipeline.stage import StageContext
from espalier.rewards.aggregate import BadAggregate, aggregate


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


def test_a_wrong_solution_may_end_with_its_first_step_that_scores_low(tmp_path: Path) -> None:
    """Scores 0.9, 0.2, 0.8: the second step is the error. Right solutions and those without one stay whole."""
    good, bad = trajectory(0, True, [1], [2], [3]), trajectory(1, False, [1], [4, 5], [6])
    assert up_to_first_error(bad, [0.9, 0.2, 0.8], 0.5).response_ids == [1, 4, 5]
    assert up_to_first_error(bad, [0.9, 0.6, 0.4], 0.5) == bad
    assert up_to_first_error(good, [0.9, 0.2, 0.8], 0.5) == good
    write_records(tmp_path / "t.jsonl", [good, bad])
    write_records(tmp_path / "s.jsonl", [StepScores("p/0", "p", [0.9] * 3, False),
                                         StepScores("p/1", "p", [0.9, 0.2, 0.8], False)])  # fmt: skip
    stage = ProcessPreferences(scores=str(tmp_path / "s.jsonl"), how="minimum", cut_wrong_below=0.5)
    (pair,) = list(stage.run(str(tmp_path / "t.jsonl"), context()))
    assert (pair.chosen, pair.rejected, pair.rejected_ids, pair.rejected_score) == (
        "1\n2\n3\n", "1\n4.5\n", [1, 4, 5], 0.2,
    )  # fmt: skip
    with pytest.raises(BadInput, match=r"stage\.cut_wrong_below cuts wrong solutions, and stage\.wrong_margin"):
        ProcessPreferences(scores="s", cut_wrong_below=0.5, wrong_margin=0.1)


def test_what_is_left_of_two_wrong_solutions_is_paired_once_and_never_with_a_solution_that_begins_so() -> None:
    """Cut behind 1, 4 both wrong solutions are one; cut behind 1 the third is how the right one begins: no contrast."""
    good = trajectory(0, True, [1], [2], [3])
    cut = [
        up_to_first_error(trajectory(number, False, *steps), scores, 0.5)
        for number, steps, scores in (
            (1, ([1], [4], [6]), [0.9, 0.2, 0.1]),
            (2, ([1], [4], [7]), [0.9, 0.3, 0.1]),
            (3, ([1], [5], [6]), [0.4, 0.3, 0.1]),
        )
    ]
    scored = [(good, 0.9), (cut[0], 0.2), (cut[1], 0.3), (cut[2], 0.4)]
    assert ids_of(paired(scored, max_rejected=2)) == ["p/0>p/2"]


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


def test_the_better_step_may_go_on_to_the_end_of_a_right_solution() -> None:
    """After 1.2 the step 3 is shared by A and C, which ends wrong and comes first here: A goes on behind it."""
    first, second = step_pairs([C, A, B], VALUES, margin=0.4, chosen="solution")
    assert (first.id, first.chosen_ids, first.rejected_ids) == ("p/0#1>p/1#1", [3, 4, 5], B.response_ids[2:4])
    assert first.chosen == "3\n4.5\n"
    assert (second.id, second.chosen_ids, second.rejected_ids) == ("p/0#2>p/2#2", [4, 5], [9])
    wrong = replace(A, is_correct=False)
    assert step_pairs([C, wrong, B], VALUES, margin=0.4, chosen="solution") == []


def test_of_equally_good_steps_the_one_with_a_right_solution_is_chosen() -> None:
    first = [trajectory(n, n == 7, [n], [1]) for n in (6, 7, 8, 9)]
    values = {row.id: [float(row.id != "p/9"), math.nan] for row in first}
    (pair,) = step_pairs(first, values, margin=0.4, chosen="solution")
    assert pair.id == "p/7#0>p/9#0"


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
    pairs = list(OutcomePreferences(max_pairs=4).run(files["trajectories"], counted))
    assert sorted(ids_of(pairs)) == ["p/0>p/1", "p/0>p/2"]
    assert counted.counts == {
        "read": 6, "cut": 1, "repeated": 1, "problems": 2, "problems_all_right": 1, "problems_all_wrong": 0,
        "pairs": 2, "pairs_outcome": 2, "problems_with_pairs": 1, "most_pairs_of_a_problem": 2,
        "distinct_chosen": 1, "distinct_rejected": 2, "against_scores": 0,
        "margin_mean": 1.0, "margin_lowest": 1.0, "margin_median": 1.0, "margin_highest": 1.0,
        "chosen_tokens_mean": 5, "chosen_tokens_lowest": 5, "chosen_tokens_median": 5, "chosen_tokens_highest": 5,
        "rejected_tokens_mean": 4.5, "rejected_tokens_lowest": 4, "rejected_tokens_median": 4.5,
        "rejected_tokens_highest": 5, "chosen_is_longer": 0.5,
    }  # fmt: skip


def test_one_problem_draws_the_same_pairs_whatever_stands_beside_it(tmp_path: Path) -> None:
    path = str(tmp_path / "t.jsonl")
    stage = OutcomePreferences(max_pairs=2)
    write_records(path, [*RIGHT, *WRONG])
    alone = list(stage.run(path, context()))
    write_records(path, [trajectory(0, True, [1], problem="q"), trajectory(1, False, [2], problem="q"), *RIGHT, *WRONG])
    assert [pair for pair in list(stage.run(path, context())) if pair.problem_id == "p"] == alone


def test_the_process_stage_ranks_by_aggregated_scores(files: dict[str, str]) -> None:
    counted = context()
    stage = ProcessPreferences(scores=files["scores"], max_chosen=1, max_rejected=1, margin=0.4)
    (pair,) = list(stage.run(files["trajectories"], counted))
    assert (pair.id, pair.chosen_score, pair.rejected_score) == ("p/0>p/2", 0.5, 0.25)
    assert (counted.counts["pairs_process"], counted.counts["margin_mean"]) == (1, 0.25)


def test_problems_that_the_reward_model_was_trained_on_make_no_pair_and_are_counted(
    files: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    rows = read_records(StepScores, files["scores"])
    settings = {"scores": files["scores"], "max_chosen": 1, "max_rejected": 1, "margin": 0.4}
    for is_seen, excludes_seen, num_pairs, message in (
        (False, True, 1, ""),
        (True, True, 0, "2 of 2 problems were in the reward model's training set and make no pair"),
        (
            True,
            False,
            1,
            "2 of 2 problems were in the reward model's training set and are ranked by scores that flatter",
        ),
        (None, True, 1, "of 2 of 2 problems nobody knows whether the reward model was trained on them"),
    ):
        write_records(files["scores"], [replace(row, is_seen=is_seen) for row in rows])
        caplog.clear()
        counted = context()
        pairs = list(ProcessPreferences(**settings, excludes_seen=excludes_seen).run(files["trajectories"], counted))
        assert len(pairs) == num_pairs
        assert counted.counts["problems_seen_by_the_reward_model"] == (2 if is_seen else 0)
        assert message in caplog.text
        assert bool(message) == ("training" in caplog.text or "trained" in caplog.text)


def test_the_process_stage_counts_pairs_over_right_ones(tmp_path: Path) -> None:
    trajectories, scores = str(tmp_path / "t.jsonl"), str(tmp_path / "s.jsonl")
    write_records(trajectories, [*RIGHT, WRONG[0]])
    write_records(scores, [StepScores(one.id, "p", [1.0, score]) for one, score in SCORED])
    counted = context()
    stage = ProcessPreferences(scores=scores, how="last", max_chosen=1, max_rejected=1, margin=0.4)
    pairs = list(stage.run(trajectories, counted))
    assert ids_of(pairs) == ["p/0>p/2", "p/0>p/1"]
    assert (counted.counts["pairs_process"], counted.counts["pairs_process_correct"]) == (1, 1)


def test_a_trajectory_without_scores_is_refused(files: dict[str, str], tmp_path: Path) -> None:
    scores = str(tmp_path / "few.jsonl")
    write_records(scores, [StepScores("p/0", "p", [1.0, 1.0, 1.0])])
    with pytest.raises(BadInput, match=r"few.jsonl: no scores for trajectory 'p/1'"):
        list(ProcessPreferences(scores=scores).run(files["trajectories"], context()))


def test_the_step_stage_joins_values_by_id(files: dict[str, str]) -> None:
    pairs = list(StepPreferences(values=files["values"], margin=0.4).run(files["trajectories"], context()))
    assert ids_of(pairs) == ["p/0#1>p/1#1", "p/0#2>p/2#2"]


# --- every option of the process rule -----------------------------------------------------------------------

THIRD = trajectory(4, True, [1], [7], [8])
FOUR = [(RIGHT[0], 0.9), (RIGHT[1], 0.4), (THIRD, 0.3), (WRONG[0], 0.3), (WRONG[1], 0.6)]


def test_right_over_right_alone() -> None:
    assert ids_of(paired(SCORED, over_wrong=False, margin=0.4)) == ["p/0>p/1"]


def test_right_over_wrong_alone() -> None:
    assert ids_of(paired(SCORED, over_correct="none", max_chosen=1)) == ["p/0>p/3", "p/0>p/2"]


def test_among_the_chosen_only_the_best_stand_over_worse_right_ones_or_all_do() -> None:
    rule = {"over_wrong": False, "max_chosen": 1, "margin": 0.05}
    assert ids_of(paired(FOUR, **rule)) == ["p/0>p/1", "p/0>p/4"]
    assert ids_of(paired(FOUR, over_correct="all", **rule)) == ["p/0>p/1", "p/0>p/4", "p/1>p/4"]
    assert ids_of(paired(FOUR, max_worse=1, over_correct="all", **rule)) == ["p/0>p/1", "p/1>p/4"]


def test_wrong_ones_are_paired_among_each_other_by_their_own_margin() -> None:
    pairs = paired(SCORED, over_wrong=False, over_correct="none", wrong_margin=0.2)
    assert [(pair.id, pair.kind) for pair in pairs] == [("p/3>p/2", "process_wrong")]
    assert paired(SCORED, over_wrong=False, over_correct="none", wrong_margin=0.3) == []


def test_who_lost_to_a_right_one_is_never_chosen() -> None:
    pairs = paired(FOUR, margin=0.05, over_correct="all", drops_losers=True, wrong_margin=0.0)
    assert ids_of(pairs) == ["p/0>p/3", "p/0>p/2", "p/0>p/1", "p/0>p/4", "p/3>p/2"]


def test_up_sampling_repeats_the_pairs_of_two_right_ones_under_ids_of_their_own() -> None:
    pairs = paired(SCORED, max_chosen=1, max_rejected=1, margin=0.4, up_sampling=3)
    assert ids_of(pairs) == ["p/0>p/3", "p/0>p/1", "p/0>p/1~2", "p/0>p/1~3"]
    assert replace(pairs[3], id="p/0>p/1") == pairs[1]


def test_no_pair_of_two_right_ones_where_nothing_is_wrong_if_so_asked() -> None:
    right = SCORED[:2]
    assert ids_of(paired(right, margin=0.4)) == ["p/0>p/1"]
    assert paired(right, margin=0.4, needs_wrong=True) == []
    assert "p/0>p/1" in ids_of(paired(SCORED, margin=0.4, needs_wrong=True))


def test_short_solutions_take_no_part() -> None:
    assert ids_of(paired(FOUR, min_chosen_steps=3)) == ["p/4>p/3", "p/4>p/2"]
    assert ids_of(paired(FOUR, min_rejected_steps=3, margin=0.4)) == ["p/0>p/1", "p/0>p/4"]


def test_no_cap_is_zero_for_every_count_and_below_zero_is_refused() -> None:
    assert len(paired(FOUR, max_chosen=0, max_rejected=0, max_worse=0, max_pairs=0, margin=0.0)) == 6 + 3 - 0
    assert outcome_pairs([*RIGHT, *WRONG], 0, random.Random(0)) == outcome_pairs([*RIGHT, *WRONG], 9, random.Random(0))
    for name in ("max_chosen", "max_rejected", "max_worse", "max_pairs", "drop_last"):
        with pytest.raises(BadInput, match=f"stage.{name} must be 0"):
            ProcessPreferences(scores="s", **{name: -1})
    with pytest.raises(BadInput, match=r"stage.max_pairs must be 0 \(no cap\) or more, got -1"):
        OutcomePreferences(max_pairs=-1)


# --- rejection sampling -------------------------------------------------------------------------------------


def test_rejection_sampling_takes_its_share_and_the_best_first_when_it_is_cold() -> None:
    scored = [(trajectory(number, True, [number]), number / 10) for number in range(8)]
    taken = rejection_sample(scored, beta=1e-6, share=0.5, rng=random.Random(0))
    assert taken == [False] * 4 + [True] * 4
    assert sum(rejection_sample(scored, 0.5, 0.3, random.Random(1))) == 3  # ceil(2.4)


def test_rejection_sampling_accepts_with_the_published_probability() -> None:
    """Two candidates, one wanted: the better one stands second, so it is taken unless the worse one was,
    whose chance is exp((0.2 - 0.3) / 0.1) = 0.3679."""
    scored = [(trajectory(0, True, [0]), 0.2), (trajectory(1, True, [1]), 0.3)]
    rng = random.Random(0)
    worse = sum(rejection_sample(scored, 0.1, 0.5, rng)[0] for _ in range(4000)) / 4000
    assert worse == pytest.approx(0.3679, abs=0.03)


def test_sampled_pairs_never_stand_against_the_scores() -> None:
    for seed in range(30):
        pairs = paired(FOUR, seed, over_correct="sampled", over_wrong=False, beta=10.0, accepted_share=0.5)
        assert all(pair.chosen_score > pair.rejected_score for pair in pairs)
        assert len({pair.chosen for pair in pairs} & {pair.rejected for pair in pairs}) == 0


def test_products_of_many_steps_are_apart_too() -> None:
    """25 steps of about 0.4 are 1e-10 together."""
    tiny = [(row, 1e-10 * score) for row, score in FOUR]
    assert [ids_of(paired(tiny, seed, over_correct="sampled", over_wrong=False, beta=1e-9, accepted_share=0.5)) for seed
            in range(8)] == [ids_of(paired(FOUR, seed, over_correct="sampled", over_wrong=False, beta=10.0,
                                           accepted_share=0.5)) for seed in range(8)]  # fmt: skip


# --- against the definition, on random groups ---------------------------------------------------------------


def by_definition(scored: Sequence[Scored], rule: ProcessRule) -> set[str]:
    """Every pair of two solutions, asked one by one whether the rule makes it."""

    def rank(one: Scored) -> int:
        return sum(
            o[0].is_correct == one[0].is_correct
            and (o[1] > one[1] or (o[1] == one[1] and sample_order(o[0].id) < sample_order(one[0].id)))
            for o in scored
        )

    def beats(a: Scored, b: Scored) -> bool:
        chosen = not rule.max_chosen or rank(a) < rule.max_chosen
        if a[0].is_correct and not b[0].is_correct:
            return rule.over_wrong and chosen and (not rule.max_rejected or rank(b) < rule.max_rejected)
        if a[0].is_correct and b[0].is_correct:
            return (chosen or rule.over_correct == "all") and a[1] - b[1] > rule.margin + 1e-9
        both_wrong = not a[0].is_correct and not b[0].is_correct
        return both_wrong and rule.wrong_margin is not None and a[1] - b[1] > rule.wrong_margin + 1e-9

    pairs = {(a[0].id, b[0].id) for a in scored for b in scored if beats(a, b)}
    right = {one[0].id for one in scored if one[0].is_correct}
    lost = {b for a, b in pairs if {a, b} <= right} if rule.drops_losers else set()
    return {f"{a}>{b}" for a, b in pairs if a not in lost}


@pytest.mark.parametrize("seed", range(40))
def test_the_rule_equals_its_definition_whatever_the_order(seed: int) -> None:
    rng = random.Random(seed)
    scored = [
        (trajectory(number, rng.random() < 0.5, [number], [rng.randrange(9)]), rng.randrange(11) / 10)
        for number in range(rng.randrange(14))
    ]
    rule = ProcessRule(
        max_chosen=rng.choice([0, 1, 3]),
        max_rejected=rng.choice([0, 1, 3]),
        margin=rng.choice([0.0, 0.2, 0.5]),
        over_wrong=rng.random() < 0.7,
        over_correct=rng.choice(["chosen", "all"]),
        wrong_margin=rng.choice([None, 0.0, 0.3]),
        drops_losers=rng.random() < 0.5,
    )
    pairs = process_pairs(scored, rule, random.Random(0))
    assert sorted(ids_of(pairs)) == sorted(by_definition(scored, rule))
    rng.shuffle(scored)
    assert process_pairs(scored, rule, random.Random(0)) == pairs


# --- the stages again: order, parts, borders ----------------------------------------------------------------


def many(tmp_path: Path, seed: int) -> tuple[list[Trajectory], dict[str, str]]:
    """Random trajectories of 12 problems with scores and values, written in a random order."""
    rng = random.Random(0)
    rows = [
        trajectory(k, rng.random() < 0.5, [rng.randrange(2)], [rng.randrange(3)], [rng.randrange(3)], problem=f"q{p}")
        for p in range(12)
        for k in range(11)
    ]
    scores = [StepScores(t.id, t.problem_id, [rng.randrange(100) / 100 for _ in t.steps]) for t in rows]
    shuffled = random.Random(seed)
    names = {name: str(tmp_path / f"{name}{seed}.jsonl") for name in ("trajectories", "scores")}
    for name, records in (("trajectories", rows), ("scores", scores)):
        write_records(names[name], shuffled.sample(records, len(records)))  # type: ignore[type-var]
    return rows, names


STAGES: list[Callable[[dict[str, str]], Any]] = [
    lambda names: OutcomePreferences(max_pairs=3, seed=5),
    lambda names: ProcessPreferences(scores=names["scores"], over_correct="sampled", max_pairs=7, seed=5),
    lambda names: StepPreferences(scores=names["scores"], which="all", max_pairs=2, margin=0.1),
    lambda names: PartialPreferences(scores=names["scores"], max_pairs=5, max_rejected=2, margin=0.1, seed=5),
]


@pytest.mark.parametrize("make", STAGES)
def test_the_order_of_the_rows_changes_nothing(make: Callable[[dict[str, str]], Any], tmp_path: Path) -> None:
    made = []
    for seed in range(3):
        _, names = many(tmp_path, seed)
        told = context()
        made.append((list(make(names).run(names["trajectories"], told)), told.counts))
    assert made[0][0]
    assert made[0] == made[1] == made[2]


@pytest.mark.parametrize("make", STAGES)
def test_train_and_held_out_share_no_problem_and_make_the_whole(
    make: Callable[[dict[str, str]], Any], tmp_path: Path
) -> None:
    _, names = many(tmp_path, 0)
    parts = {
        part: list(replace(make(names), part=part, held_out_share=0.4).run(names["trajectories"], context()))
        for part in ("all", "train", "held_out")
    }
    problems = {part: {pair.problem_id for pair in pairs} for part, pairs in parts.items()}
    assert problems["train"]
    assert problems["held_out"]
    assert not problems["train"] & problems["held_out"]
    assert sorted(ids_of(parts["train"] + parts["held_out"])) == sorted(ids_of(parts["all"]))


def test_cut_responses_are_wrong_ones_where_the_published_pairs_take_them(tmp_path: Path) -> None:
    path = str(tmp_path / "t.jsonl")
    cut = trajectory(4, False, [9], finish_reason="length")
    write_records(path, [RIGHT[0], cut])
    assert list(OutcomePreferences().run(path, context())) == []
    told = context()
    assert ids_of(list(OutcomePreferences(keeps_cut=True).run(path, told))) == ["p/0>p/4"]


def test_steps_can_be_left_out_of_the_score() -> None:
    react = trajectory(0, True, [1], [2], [3])
    react = replace(react, steps=["think\n", "Action 1: look\n", "Thought 2: so\n"])
    scores = [0.5, 0.1, 0.8]
    made = {name: ProcessPreferences(scores="s", **options).score(react, scores) for name, options in {
        "all": {}, "types": {"skips_types": ["Action"]}, "first": {"drop_first": 1}, "last": {"drop_last": 1},
        "nothing left": {"drop_first": 3}}.items()}  # fmt: skip
    assert made == pytest.approx({"all": 0.04, "types": 0.4, "first": 0.08, "last": 0.05, "nothing left": 0.04})


def test_excluded_problems_make_no_pair_of_two_right_ones(tmp_path: Path) -> None:
    trajectories, scores, known = (str(tmp_path / f"{name}.jsonl") for name in ("t", "s", "known"))
    write_records(trajectories, [*RIGHT, WRONG[0]])
    write_records(scores, [StepScores(one.id, "p", [1.0, score]) for one, score in SCORED])
    write_records(known, [StepScores("p/0", "p", [1.0])])
    stage = ProcessPreferences(scores=scores, exclude=known, margin=0.4)
    told = context()
    assert ids_of(list(stage.run(trajectories, told))) == ["p/0>p/2", "p/1>p/2"]
    assert told.counts["problems_excluded"] == 1
    write_records(known, [{"id": "x"}])
    with pytest.raises(BadInput, match=r"known.jsonl:1: no problem_id"):
        list(stage.run(trajectories, context()))


@pytest.mark.parametrize(("row", "said"), [
    (StepScores("p/0", "q", [1.0, 1.0]), "'p/0' has 2 steps of problem 'q', its trajectory 2 of 'p'"),
    (StepScores("p/0", "p", [1.0]), "'p/0' has 1 steps of problem 'p', its trajectory 2"),
])  # fmt: skip
def test_scores_of_other_trajectories_are_refused(row: StepScores, said: str, tmp_path: Path) -> None:
    trajectories, scores = str(tmp_path / "t.jsonl"), str(tmp_path / "s.jsonl")
    write_records(trajectories, [RIGHT[0]])
    write_records(scores, [row])
    with pytest.raises(BadInput, match=said):
        list(ProcessPreferences(scores=scores).run(trajectories, context()))


def test_one_problem_asked_in_two_ways_is_refused() -> None:
    with pytest.raises(BadInput, match="'p/0' and 'p/2' answer problem 'p' after different prompts"):
        group_distinct([RIGHT[0], replace(WRONG[0], prompt_ids=[90])])


def test_ids_are_ordered_as_they_were_given_out() -> None:
    ids = ["p2/0", "p10/1", "p/9", "p/9#2", "p/10"]
    assert sorted(set(ids), key=sample_order) == ids
    assert sample_order("p/" + "9" * 5000) > sample_order("p/10")
    others = ["", "0", "01", "1", "a", "a1", "a1\0", "a1b", "a2", "a\0", "a\0b", "ab", "\u00e9", "\ud800"]
    shuffled = random.Random(0).sample(others, len(others))
    assert sorted(shuffled, key=sample_order) == others  # an id that begins another one stands before it


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[:-20],
    "gzip": gzip.compress,
    "utf-16": lambda data: data.decode().encode("utf-16"),
    "array": lambda data: b"[" + data.replace(b"\n", b",") + b"1]",
    "a wrong type": lambda data: data.replace(b'"is_correct":true', b'"is_correct":1'),
    "a doubled id": lambda data: data + data,
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_named_with_its_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_records(path, [RIGHT[0], WRONG[0]])
    path.write_bytes(DAMAGES[name](path.read_bytes()))
    with pytest.raises(BadInput, match=r"t\.jsonl(:\d: |: is a gzip file)"):
        list(OutcomePreferences().run(str(path), context()))


def test_line_ends_and_a_mark_of_windows_are_no_damage_and_an_empty_file_makes_no_pair(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_records(path, [RIGHT[0], WRONG[0]])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert ids_of(list(OutcomePreferences().run(str(path), context()))) == ["p/0>p/2"]
    path.write_bytes(b"")
    told = context()
    assert list(OutcomePreferences().run(str(path), told)) == []
    assert (told.counts["pairs"], told.counts["problems"]) == (0, 0)
