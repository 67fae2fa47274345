"""States of trajectories and their Monte-Carlo values, by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from espalier.data.jsonl import write_records
from espalier.data.records import BadInput, Completion, State, StepValues, Trajectory
from espalier.pipeline.stage import StageContext
from espalier.pipeline.values.cut_states import CutStates
from espalier.values.labels import wilson_interval
from espalier.values.monte_carlo import Count, StateKey, count_sampled, distinct_states, state_key, states_of
from espalier.values.step_values import counted, inner_estimates, step_values, with_intervals, without_gaps

# Three steps of 2, 3 and 1 tokens; the second trajectory shares the first step, the third all but the answer.
ONE = Trajectory(
    "p/0",
    "p",
    "Q\n",
    "a\nb\nc",
    ["a\n", "b\n", "c"],
    [90, 91],
    [1, 2, 3, 4, 5, 6],
    [2, 5, 6],
    "stop",
    "7",
    "7",
    True,
)
TWO = replace(ONE, id="p/1", response="a\nd", steps=["a\n", "d"], response_ids=[1, 2, 8, 9], step_ends=[2, 4],
              answer="8", is_correct=False)  # fmt: skip
THREE = replace(ONE, id="p/2", response="a\nb\ne", steps=["a\n", "b\n", "e"], response_ids=[1, 2, 3, 4, 5, 7],
                answer="9", is_correct=False)  # fmt: skip


def completions(state_id: str, *rights: bool) -> list[Completion]:
    return [
        Completion(f"{state_id}/{k}", state_id, "p", "x", [5], "stop", None, right) for k, right in enumerate(rights)
    ]


def values_of(trajectory: Trajectory, counts: dict[StateKey, Count]) -> StepValues:
    estimates = {key: counted(count) for key, count in counts.items()}
    return step_values(trajectory, inner_estimates(trajectory, estimates))


def context() -> StageContext:
    return StageContext(None, Path("unused"), 10.0)


def test_the_states_of_a_trajectory_are_its_prefixes_without_the_whole() -> None:
    assert states_of(ONE) == [
        State("p/0#1", "p", "p/0", 1, "Q\n", "a\n", [90, 91], [1, 2], "7"),
        State("p/0#2", "p", "p/0", 2, "Q\n", "a\nb\n", [90, 91], [1, 2, 3, 4, 5], "7"),
    ]


def test_from_step_zero_on_the_prompt_is_a_state() -> None:
    first = states_of(ONE, first_step=0)[0]
    assert (first.id, first.prefix, first.prefix_ids) == ("p/0#0", "", [])


def test_a_trajectory_of_one_step_or_none_has_no_state_between() -> None:
    assert states_of(replace(ONE, steps=["a"], step_ends=[6])) == []
    assert states_of(replace(ONE, response="", steps=[], response_ids=[0], step_ends=[])) == []
    assert states_of(replace(ONE, response="", steps=[], step_ends=[]), first_step=0) == []


def test_states_that_trajectories_share_are_cut_once() -> None:
    assert [state.id for state in distinct_states([ONE, TWO, THREE])] == ["p/0#1", "p/0#2"]


def test_the_same_tokens_after_another_problem_are_another_state() -> None:
    other = replace(TWO, id="q/0", problem_id="q")
    assert [state.id for state in distinct_states([TWO, other])] == ["p/1#1", "q/0#1"]


def test_the_same_text_in_other_tokens_is_another_state() -> None:
    other = replace(TWO, id="p/3", response_ids=[1, 3, 8, 9])
    assert [state.id for state in distinct_states([TWO, other])] == ["p/1#1", "p/3#1"]


def test_a_trajectory_without_token_ids_cannot_be_cut() -> None:
    with pytest.raises(BadInput, match="trajectory 'p/0' has 3 steps and 0 token ends"):
        states_of(replace(ONE, response_ids=[], step_ends=[]))


def test_values_by_hand() -> None:
    states = distinct_states([ONE, TWO, THREE])
    sampled = [
        *completions("p/0#1", True, False, False, True),
        *completions("p/0#2", True, True, True, False),
    ]
    counts = count_sampled(states, sampled)
    assert counts == {state_key("p", [1, 2]): Count(2, 4), state_key("p", [1, 2, 3, 4, 5]): Count(3, 4)}
    assert values_of(ONE, counts).values == [0.5, 0.75, 1.0]
    assert values_of(TWO, counts).values == [0.5, 0.0]
    assert values_of(THREE, counts).values == [0.5, 0.75, 0.0]


def test_the_value_after_the_last_step_is_the_outcome_counted_once() -> None:
    row = values_of(THREE, count_sampled(distinct_states([THREE]), [
        *completions("p/2#1", True), *completions("p/2#2", True, True)
    ]))  # fmt: skip
    assert (row.values, row.num_correct, row.num_completions) == ([1.0, 1.0, 0.0], [1, 2, 0], [1, 2, 1])
    assert (row.id, row.problem_id, row.step_ends, row.is_correct) == ("p/2", "p", [2, 5, 6], False)


def test_a_record_without_intervals_gets_those_of_its_counts() -> None:
    row = values_of(TWO, {state_key("p", [1, 2]): Count(1, 4)})
    low, high = wilson_interval(1, 4)
    assert (row.low, row.high) == ([low, 0.0], [high, 0.0]), "the outcome is known"
    assert with_intervals(replace(row, low=[], high=[])) == with_intervals(row) == row


def test_records_with_an_unknown_value_are_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    row = values_of(TWO, {state_key("p", [1, 2]): Count(1, 4)})
    unknown = replace(row, values=[None, 0.0])
    with caplog.at_level("WARNING"):
        assert without_gaps([unknown, row], "v.jsonl") == [(row, [0.25, 0.0])]
    assert "v.jsonl: 1 of 2 trajectories pass through a state whose value is not known and are left out" in caplog.text


def test_a_trajectory_without_steps_has_no_values() -> None:
    row = values_of(replace(ONE, response="", steps=[], response_ids=[0], step_ends=[]), {})
    assert (row.values, row.num_correct, row.num_completions) == ([], [], [])


def test_a_completion_of_no_state_is_refused() -> None:
    with pytest.raises(BadInput, match="completion 'p/9#1/0': there is no state 'p/9#1'"):
        count_sampled(distinct_states([ONE]), completions("p/9#1", True))


def test_a_state_of_which_nothing_is_known_has_no_value_and_never_0() -> None:
    row = values_of(TWO, {})
    assert row.values == [*[None] * (len(TWO.steps) - 1), float(TWO.is_correct)]
    assert row.num_completions[:-1] == [0] * (len(TWO.steps) - 1)


def test_the_stage_cuts_distinct_states(tmp_path: Path) -> None:
    write_records(tmp_path / "t.jsonl", [ONE, TWO, THREE])
    counted_rows = context()
    states = list(CutStates().run(str(tmp_path / "t.jsonl"), counted_rows))
    assert states == distinct_states([ONE, TWO, THREE])
    tokens = {"prompt_tokens": 11, "distinct_prompt_tokens": 7}
    assert counted_rows.counts == {"trajectories": 3, "states": 5, "distinct_states": 2, **tokens}
