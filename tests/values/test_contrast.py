"""Labels by contrast: hand-made trees, a simulated task whose truth is known, and the stages on files."""

import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from espalier.data.jsonl import read_records, write_records
from espalier.data.records import BadInput, Completion, State, StepValues, Trajectory
from espalier.data.tasks.rule_logic import RuleLogic
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.pipeline.pairs.state_pairs import step_pairs
from espalier.pipeline.stage import StageContext
from espalier.pipeline.values.cut_states import CutStates
from espalier.pipeline.values.join_completions import JoinCompletions
from espalier.pipeline.values.label_by_contrast import LabelByContrast
from espalier.values.contrast import Continuation, Contrast, contrast_labels, count_behind, hold_back, prior_of
from espalier.values.first_error import states_on_right_ways
from espalier.values.monte_carlo import Count
from espalier.values.value_prior import ValuePrior
from tests.support.slow import slow_unless

FLAT = ValuePrior(1.0, 1.0)


def solution(identity: str, ways: str, is_correct: bool, problem: str = "p") -> Trajectory:
    """Return a solution of one token and one step per letter."""
    return Trajectory(
        id=identity,
        problem_id=problem,
        prompt="?",
        response=ways,
        steps=list(ways),
        prompt_ids=[1],
        response_ids=[ord(letter) for letter in ways],
        step_ends=list(range(1, len(ways) + 1)),
        finish_reason="stop",
        gold="",
        answer="",
        is_correct=is_correct,
    )


def labels_of(continuations: list[Continuation], rule: Contrast) -> list[list[float | None]]:
    """Label as the stage does."""
    return contrast_labels(
        continuations,
        count_behind(continuations),
        states_on_right_ways([continuation.solution for continuation in continuations]),
        rule,
    )


def test_the_probability_of_half_the_value_is_that_of_two_beta_posteriors() -> None:
    """Against 200,000 draws: 0 of 8 beside 6 of 8, from a flat prior."""
    rng = random.Random(0)
    draws = [rng.betavariate(1, 9) < 0.5 * rng.betavariate(7, 3) for _ in range(200_000)]
    found = Contrast(FLAT).prob_below(Count(0, 8), Count(6, 8))
    assert found == pytest.approx(sum(draws) / len(draws), abs=0.005)


def test_samples_count_for_the_states_behind_the_one_they_were_sampled_from_alone() -> None:
    continuations = [Continuation(solution("a", "xyz", True), 0), Continuation(solution("a#1/0", "xyw", False), 1)]
    counts = {ids: count for (_, ids), count in count_behind(continuations).items()}
    assert counts[(ord("x"),)] == Count(1, 1)  # the second was sampled because the first was right
    assert counts[(ord("x"), ord("y"))] == Count(1, 2)


def test_a_step_beside_a_far_better_one_is_wrong_and_so_is_what_follows() -> None:
    continuations = [Continuation(solution(f"r{k}", "rab", True), 0) for k in range(6)]
    continuations += [Continuation(solution(f"w{k}", "wab", False), 0) for k in range(6)]
    labels = labels_of(continuations, Contrast(FLAT))
    assert labels[0] == [1.0, 1.0, 1.0]
    assert labels[-1] == [0.0, 0.0, 0.0]


def test_a_step_of_which_little_is_known_has_no_label_but_the_outcome_has() -> None:
    continuations = [Continuation(solution("r", "rab", True), 0), Continuation(solution("w", "wab", False), 0)]
    assert labels_of(continuations, Contrast(FLAT))[1] == [None, None, 0.0]


def test_a_wrong_solution_is_right_as_far_as_it_went_with_a_right_one() -> None:
    continuations = [Continuation(solution("r", "rab", True), 0), Continuation(solution("r#2/0", "rac", False), 2)]
    assert labels_of(continuations, Contrast(FLAT))[1] == [1.0, 1.0, 0.0]


def test_where_nothing_is_right_nothing_but_the_outcome_is_labelled() -> None:
    continuations = [Continuation(solution(f"w{k}", "ab" if k % 2 else "cb", False), 0) for k in range(40)]
    assert labels_of(continuations, Contrast(FLAT)) == [[None, 0.0]] * 40


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(BadInput, match=r"stage\.drop"):
        Contrast(FLAT, drop=1.0)
    with pytest.raises(BadInput, match=r"stage\.confidence"):
        Contrast(FLAT, confidence=0.5)


def test_the_prior_has_the_mean_of_the_counts() -> None:
    prior = prior_of({Count(0, 8): 6, Count(8, 8): 2, Count(1, 1): 50})
    assert prior.alpha / (prior.alpha + prior.beta) == pytest.approx(0.25)


def simulated(rng: random.Random, number: int, prefix: str, k: int) -> list[Trajectory]:
    """Go on from `prefix` to six decisions, each right (r) with probability 0.45: right solutions are all r."""
    found = []
    for index in range(k):
        ways = prefix + "".join("r" if rng.random() < 0.45 else "w" for _ in range(6 - len(prefix)))
        found.append(solution(f"p{number}/{index}", ways, ways == "rrrrrr", f"p{number}"))
    return found


def test_labels_agree_with_the_truth_where_one_solution_in_a_hundred_is_right(tmp_path: Path) -> None:
    """0.45 ** 6 = 0.8 %: shares of 8 completions are nearly all 0, and the labels that contrast gives are right."""
    rng = random.Random(1)
    trajectories = [row for number in range(200) for row in simulated(rng, number, "", 16)]
    path = tmp_path / "trajectories.jsonl"
    write_records(path, trajectories)
    context = StageContext(None, tmp_path / "states.jsonl", 60)
    states = list(CutStates(solutions="right").run(str(path), context))
    assert {state.trajectory_id for state in states} <= {row.id for row in trajectories if row.is_correct}
    write_records(tmp_path / "states.jsonl", states)
    completed = []
    for state in states:
        rows = simulated(rng, int(state.problem_id[1:]), state.prefix, 8)
        completed += [Trajectory(**{**vars(row), "id": f"{state.id}/{index}"}) for index, row in enumerate(rows)]
    write_records(tmp_path / "solutions.jsonl", completed)
    stage = LabelByContrast(str(path), str(tmp_path / "states.jsonl"))
    context = StageContext(None, tmp_path / "labelled.jsonl", 60)
    records = list(stage.run(str(tmp_path / "solutions.jsonl"), context))
    judged = [
        (label, set(row.steps[: place + 1]) == {"r"})
        for row in records
        for place, label in enumerate(row.labels[:-1])
        if label is not None
    ]
    wrong = [label for label, is_right in judged if label != float(is_right)]
    assert len(judged) > 200
    assert len(wrong) / len(judged) < 0.03
    starts = {state.id: state.step for state in states}
    for row in records:
        before = starts.get(row.id.rpartition("/")[0], 0)  # these steps are the trajectory's own record's
        assert row.weights == [float(label is not None and n >= before) for n, label in enumerate(row.labels)]
    kept = {row.id: [math.nan if label is None else label for label in row.labels] for row in records}
    pairs = []
    for problem in {row.problem_id for row in completed}:
        pairs += step_pairs([row for row in completed if row.id in kept and row.problem_id == problem], kept, 0.5)
    assert len(pairs) > 20
    assert all(pair.chosen == "r" and pair.rejected == "w" for pair in pairs)


def lucky(rng: random.Random, number: int, prefix: str, k: int) -> list[Trajectory]:
    """Go on from `prefix` to six steps of two ways: right with probability 0.1 whatever they are."""
    found = []
    for index in range(k):
        ways = prefix + "".join(rng.choice("ab") for _ in range(6 - len(prefix)))
        found.append(solution(f"p{number}/{index}", ways, rng.random() < 0.1, f"p{number}"))
    return found


@pytest.mark.parametrize("seed", slow_unless(lambda seed: seed == 3, range(4)))
def test_labels_of_luck_are_refused(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    write_records(tmp_path / "t.jsonl", [row for number in range(200) for row in lucky(rng, number, "", 8)])
    cutter = CutStates(solutions="right", first_step=0)
    states = list(cutter.run(str(tmp_path / "t.jsonl"), StageContext(None, tmp_path / "s.jsonl", 60)))
    completed = [
        Trajectory(**{**vars(row), "id": f"{state.id}/{index}"})
        for state in states
        for index, row in enumerate(lucky(rng, int(state.problem_id[1:]), state.prefix, 4))
    ]
    write_records(tmp_path / "s.jsonl", states)
    write_records(tmp_path / "c.jsonl", completed)
    stage = LabelByContrast(str(tmp_path / "t.jsonl"), str(tmp_path / "s.jsonl"))
    with pytest.raises(BadInput, match=r"right answers are luck here|below stage\.fewest_labels"):
        list(stage.run(str(tmp_path / "c.jsonl"), StageContext(None, tmp_path / "out.jsonl", 60)))


def test_samples_that_were_held_back_contradict_labels_of_luck_whatever_the_prior() -> None:
    """With a flat prior many steps look far worse than the best one; behind them a tenth is right as elsewhere."""
    rng = random.Random(0)
    continuations = [Continuation(row, 0) for number in range(300) for row in lucky(rng, number, "", 40)]
    found = hold_back(continuations, Contrast(FLAT, confidence=0.6))
    assert found.wrong.num_completions > 500
    assert found.wrong.value == pytest.approx(0.1, abs=0.04)
    assert found.contradicts(0.5)


def test_counts_that_differ_by_chance_alone_give_a_prior_beside_which_nothing_is_wrong() -> None:
    prior = prior_of({Count(1, 4): 8})
    assert Contrast(prior).prob_below(Count(0, 8), Count(6, 8)) < 0.01


def test_what_is_held_back_is_counted_by_hand() -> None:
    """Sixteen samples of one state: the even ones make r right (6 of 6) and w wrong (0 of 2), the odd ones have one
    right w of two."""
    ways = [("r", True)] * 12 + [("w", False)] * 3 + [("w", True)]
    continuations = [Continuation(solution(f"s{k}", way, is_correct), 0) for k, (way, is_correct) in enumerate(ways)]
    found = hold_back(continuations, Contrast(ValuePrior(0.2, 0.2)))
    assert (found.wrong, found.best) == (Count(1, 2), Count(6, 6))
    assert found.contradicts(0.5)
    assert not found.contradicts(0.51)


def test_too_few_labels_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    write_records(tmp_path / "t.jsonl", [solution("w", "ab", False)])
    write_records(tmp_path / "s.jsonl", list[State]())
    write_records(tmp_path / "c.jsonl", list[Trajectory]())
    stage = LabelByContrast(str(tmp_path / "t.jsonl"), str(tmp_path / "s.jsonl"))
    with pytest.raises(BadInput, match="sample more problems"):
        list(stage.run(str(tmp_path / "c.jsonl"), StageContext(None, tmp_path / "out.jsonl", 60)))


def test_a_solution_of_no_state_is_refused_by_its_id(tmp_path: Path) -> None:
    write_records(tmp_path / "t.jsonl", [solution("w", "ab", False)])
    write_records(tmp_path / "s.jsonl", list[State]())
    write_records(tmp_path / "c.jsonl", [solution("other#1/0", "ab", False)])
    stage = LabelByContrast(str(tmp_path / "t.jsonl"), str(tmp_path / "s.jsonl"))
    with pytest.raises(BadInput, match="'other#1/0' continues no state"):
        list(stage.run(str(tmp_path / "c.jsonl"), StageContext(None, tmp_path / "out.jsonl", 60)))


def test_records_of_labels_are_read_again_and_only_completions_count(tmp_path: Path) -> None:
    """The 60 trajectories after r were chosen for their success: of the completions 6 of 60 are right there."""
    rows = [solution(f"r{k}", "rab", True) for k in range(60)]
    state = state_of(rows[0], 0)
    done = [solution(f"{state.id}/{k}", "rab" if k < 6 else "rac", k < 6) for k in range(60)]
    done += [solution(f"{state.id}/{k}", "wab", False) for k in range(60, 120)]
    write_records(tmp_path / "t.jsonl", rows)
    write_records(tmp_path / "s.jsonl", [state])
    write_records(tmp_path / "c.jsonl", done)
    stage = LabelByContrast(str(tmp_path / "t.jsonl"), str(tmp_path / "s.jsonl"), fewest_labels=1, max_per_step=1)
    write_records(tmp_path / "v.jsonl", stage.run(str(tmp_path / "c.jsonl"), StageContext(None, tmp_path / "v", 60)))
    found = read_records(StepValues, str(tmp_path / "v.jsonl"))
    assert [row.labels for row in found[:1] + found[-1:]] == [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]
    assert (found[0].num_correct[0], found[0].num_completions[0], found[-1].values[0]) == (6, 60, 0.0)


def test_a_success_for_which_a_state_was_chosen_makes_no_sibling_wrong(tmp_path: Path) -> None:
    """Both first steps are worth 0.1. Each state has one trajectory that succeeded by chance; its completions have not
    heard of that."""
    rng, rows, done, states = random.Random(0), [], [], []
    for number in range(300):
        for index in range(8):
            rows += lucky(rng, number, "", 1)
            rows[-1] = replace(rows[-1], id=f"p{number}/{index}")
    for row in rows:
        if row.is_correct:
            states.append(state_of(row, 0))
            done += [
                replace(one, id=f"{states[-1].id}/{k}")
                for k, one in enumerate(lucky(rng, int(row.problem_id[1:]), "", 8))
            ]
    counts = count_behind([Continuation(row, 0) for row in done])
    continuations = [Continuation(row, 0, is_completion=False) for row in rows] + [Continuation(row, 0) for row in done]
    labels = contrast_labels(
        continuations, counts, states_on_right_ways(rows + done), Contrast(prior_of(Counter(counts.values())))
    )
    wrong = sum(label == 0.0 for row in labels for label in row[:-1])
    assert wrong < 0.01 * sum(len(row) - 1 for row in labels)


def test_a_solution_that_begins_otherwise_than_its_state_is_refused(tmp_path: Path) -> None:
    """States of trajectories that were sampled again have the same ids and other tokens."""
    write_records(tmp_path / "t.jsonl", [solution("a", "xyz", True)])
    state = State(id="a#1", problem_id="p", trajectory_id="a", step=1, prompt="?", prefix="x", prompt_ids=[1],
                  prefix_ids=[ord("x")], gold="")  # fmt: skip
    write_records(tmp_path / "s.jsonl", [state])
    write_records(tmp_path / "c.jsonl", [solution("a#1/0", "qyz", True)])
    stage = LabelByContrast(str(tmp_path / "t.jsonl"), str(tmp_path / "s.jsonl"))
    with pytest.raises(BadInput, match="'a#1/0' continues no state"):
        list(stage.run(str(tmp_path / "c.jsonl"), StageContext(None, tmp_path / "out.jsonl", 60)))


def state_of(row: Trajectory, step: int) -> State:
    """Return the state after `step` steps of a solution whose steps are tokens."""
    return State(f"{row.id}#{step}", row.problem_id, row.id, step, row.prompt, row.response[:step], row.prompt_ids,
                 row.response_ids[:step], "")  # fmt: skip


def test_states_of_other_trajectories_are_refused_and_so_are_states_without_completions(tmp_path: Path) -> None:
    own, other = solution("own", "ab", True), solution("other", "ab", True)
    write_records(tmp_path / "t.jsonl", [own])
    write_records(tmp_path / "c.jsonl", list[Trajectory]())
    stage = LabelByContrast(str(tmp_path / "t.jsonl"), str(tmp_path / "s.jsonl"))
    for row, message in ((other, "'other#1' is of no trajectory of"), (own, "no completion of 1 states")):
        write_records(tmp_path / "s.jsonl", [state_of(row, 1)])
        with pytest.raises(BadInput, match=message):
            list(stage.run(str(tmp_path / "c.jsonl"), StageContext(None, tmp_path / "out.jsonl", 60)))


def test_right_states_of_trajectories_that_are_all_wrong_are_refused(tmp_path: Path) -> None:
    write_records(tmp_path / "t.jsonl", [solution("w", "ab", False)])
    with pytest.raises(BadInput, match="none of 1 trajectories is right"):
        CutStates(solutions="right").run(str(tmp_path / "t.jsonl"), StageContext(None, tmp_path / "s.jsonl", 60))


def test_completions_are_joined_by_the_steps_of_their_task_and_of_no_other(
    tiny_policy: Path, tokenizer: Any, tmp_path: Path
) -> None:
    first, rest = "buys: 1 + 2 = 3\n", "#### 3"
    prompt_ids, ids, more = (tokenizer(text).input_ids for text in ("How many?\n", first, rest))
    write_records(tmp_path / "s.jsonl", [State("p/0#1", "p", "p/0", 1, "How many?\n", first, prompt_ids, ids, "3")])
    write_records(tmp_path / "c.jsonl", [Completion("p/0#1/0", "p/0#1", "p", rest, more, "stop", "3", True)])
    stage = JoinCompletions(str(tmp_path / "s.jsonl"), str(tiny_policy))

    def joined(task: Any) -> list[Trajectory]:
        return list(stage.run(str(tmp_path / "c.jsonl"), StageContext(task, tmp_path / "o.jsonl", 60)))

    assert joined(WordArithmetic())[0].steps == [first, rest]
    assert joined(WordArithmetic())[0].step_ends == [len(ids), len(ids) + len(more)]
    with pytest.raises(BadInput, match="1 of 1 completions begin within a step of task rule_logic"):
        joined(RuleLogic())
    with pytest.raises(BadInput, match="set task=NAME"):
        joined(None)
