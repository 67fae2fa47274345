"""Values and labels of steps by hand: intervals, rules, what is done with noisy ones, the stage that writes them."""

import itertools
import json
import logging
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from espalier.data.examples.label_balance import LabelBalance, check_balance, label_balance
from espalier.data.examples.step_examples import StepValueExamples
from espalier.data.failed_rows import write_failed
from espalier.data.jsonl import file_sha256, read_records, write_records
from espalier.data.records import BadInput, Completion, State, StepValues, Trajectory
from espalier.pipeline.stage import StageContext
from espalier.pipeline.values.estimate_values import EstimateValues
from espalier.training.guards import check_targets
from espalier.values.first_error import ErrorSearch, search_state, states_on_right_ways
from espalier.values.label_noise import NoiseRule
from espalier.values.labels import LabelRule, wilson_interval
from espalier.values.monte_carlo import Count, count_sampled, distinct_states, state_key
from espalier.values.smoothed import smoothed_values

# Four steps of one token, then the answer; p/0 and p/1 share two steps.
RIGHT = Trajectory(
    "p/0", "p", "Q\n", "abcd", ["a", "b", "c", "d"], [90], [1, 2, 3, 4], [1, 2, 3, 4], "stop", "7", "7", True
)
WRONG = replace(RIGHT, id="p/1", response="abxyz", steps=["a", "b", "x", "y", "z"], response_ids=[1, 2, 5, 6, 7],
                step_ends=[1, 2, 3, 4, 5], answer="8", is_correct=False)  # fmt: skip


def completions(state_id: str, *rights: int) -> list[Completion]:
    return [
        Completion(f"{state_id}/{k}", state_id, "p", "x", [5], "stop", None, bool(one)) for k, one in enumerate(rights)
    ]


def files(folder: Path, rows: list[Completion], name: str = "c.jsonl") -> tuple[str, str, str]:
    """(trajectories, states, completions)."""
    paths = tuple(str(folder / one) for one in ("t.jsonl", "s.jsonl", name))
    write_records(paths[0], [RIGHT, WRONG])
    write_records(paths[1], distinct_states([RIGHT, WRONG]))
    write_records(paths[2], rows)
    return paths  # type: ignore[return-value]


def label(folder: Path, rows: list[Completion], **settings: object) -> list[StepValues]:
    trajectories, states, sampled = files(folder, rows)
    stage = EstimateValues(trajectories, states, **settings)  # type: ignore[arg-type]
    return list(stage.run(sampled, StageContext(None, Path("unused"), 10.0)))


ALL = [
    *completions("p/0#1", 1, 1, 0, 0),
    *completions("p/0#2", 1, 0, 0, 0),
    *completions("p/0#3", 1, 1, 1, 1),
    *completions("p/1#3", 0, 0, 0, 0),
    *completions("p/1#4", 0, 0, 0, 0),
]


def test_wilsons_interval_against_published_numbers() -> None:
    """Wilson's interval of 81 of 263: 0.2553 to 0.3662 (Newcombe 1998, table I); of 0 of 20: 0 to 0.1611."""
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson_interval(20, 20) == pytest.approx((0.8389, 1.0), abs=5e-5)
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_labels_by_hand() -> None:
    assert LabelRule("soft").label(0.3) == 0.3
    assert [LabelRule("hard").label(value) for value in (0.0, 0.1, 1.0)] == [0.0, 1.0, 1.0]
    assert LabelRule("hard", threshold=0.5).label(0.5) == 0.0
    assert [LabelRule("classes", num_classes=4).label(value) for value in (0.1, 1 / 3, 0.5, 1.0)] == [
        0.0,
        1 / 3,
        2 / 3,
        1.0,
    ]


def test_a_label_is_settled_when_nothing_left_can_change_it() -> None:
    any_right = LabelRule("hard")
    assert any_right.is_settled(1, 2, 9)
    assert not any_right.is_settled(0, 8, 9)
    half = LabelRule("hard", threshold=0.5)
    assert half.is_settled(5, 5, 9)
    assert not half.is_settled(4, 8, 9)
    assert half.is_settled(3, 8, 9)
    assert not LabelRule("soft").is_settled(1, 8, 9)


@pytest.mark.parametrize("threshold", [0.0, 0.25, 0.5, 0.8])
def test_a_settled_label_is_the_label_of_every_way_to_go_on(threshold: float) -> None:
    rule = LabelRule("hard", threshold)
    for total in range(10):
        for right in range(total + 1):
            ends = {rule.label((right + more) / 9) for more in range(9 - total + 1)}
            assert rule.is_settled(right, total, 9) == (len(ends) == 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fuzzy",), "there are no labels of kind 'fuzzy'"),
        (("hard", 1.0), "threshold of hard labels"),
        (("classes", 0.0, 1), "num_classes must be at least 2"),
    ],
)
def test_impossible_rules_are_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        LabelRule(*arguments)  # type: ignore[arg-type]


def test_noise_is_kept_dropped_or_weighted() -> None:
    rule, values, low, high = LabelRule("hard", 0.5), [0.9, 0.6, None], [0.7, 0.3, 0.0], [1.0, 0.8, 1.0]
    assert NoiseRule("keep").apply(rule, values, low, high, 0.5, True) == ([1.0, 1.0, None], [1.0, 1.0, 0.0])
    assert NoiseRule("drop").apply(rule, values, low, high, 0.5, True)[0] == [1.0, None, None]
    assert NoiseRule("drop", max_width=0.2).apply(rule, values, low, high, 0.5, True)[0] == [None, None, None]
    weights = NoiseRule("weight").apply(rule, values, low, high, 0.5, True)[1]
    assert weights == pytest.approx([0.7, 0.5, 0.0])


def test_denoising_by_hand() -> None:
    """First value of 0 at step 3 (from 0): wrong; the two before it keep their value over the prompt's 0.8, at most 1;
    what follows has no label."""
    noise, rule = NoiseRule("denoise"), LabelRule("soft")
    span = [0.0] * 5
    values = [0.1, 0.9, 0.2, 0.0, 0.3]
    assert noise.apply(rule, values, span, span, 0.8, False) == (
        [1.0, 1.0, pytest.approx(0.25), 0.0, None],
        [1.0, 1.0, 1.0, 1.0, 0.0],
    )
    assert noise.apply(rule, values, span, span, 0.8, True) == ([1.0] * 5, [1.0] * 5)
    assert noise.apply(rule, values, span, span, 0.7, True) == ([None] * 5, [0.0] * 5), "below 0.75: left out"
    hard = NoiseRule("denoise", min_confidence=0.2, tolerance=0)
    assert hard.apply(rule, values, span, span, 0.5, False)[0] == [1.0, 1.0, 1.0, 0.0, None]
    early = [0.4, 0.0, 0.4, 0.0, 0.0]
    assert noise.apply(rule, early, span, span, 0.8, False)[0] == [pytest.approx(0.5), 0.0, None, None, None]
    unknown = noise.apply(rule, [0.1, None, 0.4, 0.0, 0.0], span, span, 0.8, False)
    assert unknown == ([1.0, None, pytest.approx(0.5), 0.0, None], [1.0, 0.0, 1.0, 1.0, 0.0])


def test_denoising_drops_a_wrong_trajectory_whose_only_zero_is_its_outcome() -> None:
    """The last value is the outcome, 0 in every wrong trajectory: it does not say where the error is."""
    span, none = [0.0] * 3, ([None] * 3, [0.0] * 3)
    assert NoiseRule("denoise").apply(LabelRule("soft"), [0.5, 0.25, 0.0], span, span, 0.8, False) == none
    assert NoiseRule("denoise").apply(LabelRule("soft"), [0.0], [0.0], [0.0], 0.8, False) == ([None], [0.0])


def denoised(values: list[float | None], prompt_value: float, tolerance: int, lost: float) -> list[float | None]:
    """The rule for a wrong trajectory, step by step, from its own words."""
    found: list[float | None] = []
    lost_states = [step for step in range(len(values) - 1) if values[step] is not None and values[step] <= lost]
    for step, value in enumerate(values):
        if not lost_states or step > lost_states[0]:
            found.append(None)
        elif step == lost_states[0]:
            found.append(0.0)
        elif lost_states[0] - step <= tolerance:
            found.append(None if value is None else min(1.0, value / prompt_value))
        else:
            found.append(1.0 if any(values[later] is not None for later in range(step, lost_states[0])) else None)
    return found


@pytest.mark.parametrize(("tolerance", "threshold"), [(0, 0.0), (1, 0.0), (2, 0.0), (1, 0.3), (2, 0.3)])
def test_denoising_is_the_rule_for_every_wrong_trajectory_of_up_to_five_steps(tolerance: int, threshold: float) -> None:
    noise, rule, terminal = NoiseRule("denoise", 0.6, 0.75, tolerance), LabelRule("soft", threshold), 0.0
    for num_inner in range(5):
        for inner in itertools.product((None, 0.0, 0.2, 0.6, 1.0), repeat=num_inner):
            values = [*inner, terminal]
            span = [0.0] * len(values)
            labels, weights = noise.apply(rule, values, span, span, 0.8, False)
            assert labels == denoised(values, 0.8, tolerance, threshold)
            assert weights == [float(label is not None) for label in labels]


def test_the_stage_keeps_counts_and_intervals(tmp_path: Path) -> None:
    right, wrong = label(tmp_path, ALL)
    assert right.labels == [0.5, 0.25, 1.0, 1.0]
    assert (right.num_correct, right.num_completions) == ([2, 1, 4, 1], [4, 4, 4, 1])
    assert (right.low[0], right.high[0]) == pytest.approx(wilson_interval(2, 4))
    assert (right.low[-1], right.high[-1], right.prompt_value) == (1.0, 1.0, 0.5)
    assert wrong.labels == [0.5, 0.25, 0.0, 0.0, 0.0]


def test_hard_labels_and_classes(tmp_path: Path) -> None:
    assert label(tmp_path, ALL, label="hard")[1].labels == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert label(tmp_path, ALL, label="classes", num_classes=3)[1].labels == [0.5, 0.5, 0.0, 0.0, 0.0]


SOME = [row for row in ALL if row.state_id != "p/0#2"]


def test_as_it_is_set_labels_are_the_values_and_count_in_full(tmp_path: Path) -> None:
    for row in label(tmp_path, ALL):
        assert row.labels == row.values
        assert row.weights == [1.0] * len(row.steps)


def test_a_state_without_completions_is_refused_unless_it_failed_or_others_speak_for_it(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"state 'p/0#2' has no completion \(1 such states\): finish sampling first"):
        label(tmp_path, SOME)
    smoothed = label(tmp_path, SOME, estimator="smoothed")[0]
    assert all(one is not None and 0 <= one <= 1 for one in smoothed.labels)
    first_error = label(tmp_path, SOME, estimator="first_error")[0]
    assert (first_error.values[1], first_error.labels[1]) == (None, 1.0), "a right trajectory passes through it"


@pytest.mark.parametrize("estimator", ["counted", "first_error"])
def test_a_state_without_completions_is_worth_nothing_not_zero_and_only_where_it_is_listed(
    estimator: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both trajectories pass through p/0#2; only the wrong one through p/1#3. The trajectories stay."""
    rows = [row for row in ALL if row.state_id not in ("p/0#2", "p/1#3")]
    trajectories, states, sampled = files(tmp_path, rows)
    context = StageContext(None, tmp_path / "v.jsonl", 10.0)
    write_failed(Path(sampled), [("p/0#2", "HTTP 400")])
    if estimator == "counted":
        with pytest.raises(BadInput, match=r"state 'p/1#3' has no completion \(1 such states\): finish sampling first"):
            list(EstimateValues(trajectories, states).run(sampled, context))
    write_failed(Path(sampled), [("p/0#2", "HTTP 400"), ("p/1#3", "HTTP 400")])
    with caplog.at_level(logging.WARNING):
        right, wrong = EstimateValues(trajectories, states, estimator).run(sampled, context)
    assert (right.values, wrong.values) == ([0.5, None, 1.0, 1.0], [0.5, None, None, 0.0, 0.0])
    assert (wrong.num_completions, wrong.low[2], wrong.high[2]) == ([4, 0, 0, 4, 1], 0.0, 1.0)
    if estimator == "counted":
        assert (wrong.labels, wrong.weights) == (wrong.values, [1.0, 0.0, 0.0, 1.0, 1.0])
        assert "c.jsonl: 2 of 5 states failed and are left out: 3 of 9 steps have no label" in caplog.text
        counts = {"states": 3, "states_failed": 2, "steps": 9, "labelled_steps": 6,
                  "trajectories_with_unlabelled_steps": 2}  # fmt: skip
        assert counts.items() <= context.counts.items()


def test_nothing_is_valued_where_all_states_failed(tmp_path: Path) -> None:
    trajectories, states, sampled = files(tmp_path, [])
    write_failed(Path(sampled), [(state.id, "HTTP 400") for state in distinct_states([RIGHT, WRONG])])
    for estimator in ("counted", "smoothed", "first_error"):
        with pytest.raises(BadInput, match=r"c\.jsonl: the completions of all 5 states failed.*see .*c\.failed\.jsonl"):
            list(EstimateValues(trajectories, states, estimator).run(sampled, StageContext(None, Path("v"), 10.0)))


def test_counts_say_what_was_read_and_what_is_known(tmp_path: Path) -> None:
    """Values 0.5, 0.25, 1, 0 and 0 of five states; as inner steps: 0.5, 0.25, 1 and 0.5, 0.25, 0, 0."""
    trajectories, states, sampled = files(tmp_path, ALL)
    context = StageContext(None, Path("unused"), 10.0)
    list(EstimateValues(trajectories, states).run(sampled, context))
    assert context.counts == {
        "trajectories": 2, "states": 5, "completions": 20, "steps": 9, "labelled_steps": 9, "unparseable": 1.0,
        "mean_value": 0.35, "mean_inner_label": 0.3571, "mean_inner_value": 0.3571,
    }  # fmt: skip


def test_the_terminal_step_can_be_left_out(tmp_path: Path) -> None:
    first = label(tmp_path, ALL, has_terminal=False)[0]
    assert (first.labels, first.weights) == ([0.5, 0.25, 1.0, None], [1.0, 1.0, 1.0, 0.0])
    assert first.values[-1] == 1.0, "the outcome is known all the same"
    for settings in ({"noise": "denoise", "min_confidence": 0.5}, {"estimator": "first_error"}):
        for row in label(tmp_path, ALL, has_terminal=False, **settings):
            assert (row.labels[-1], row.weights[-1]) == (None, 0.0)


def test_labels_by_a_search_of_the_first_error(tmp_path: Path) -> None:
    """The right trajectory passes steps 1 and 2; step 3 of the wrong one is lost."""
    rows = completions("p/1#3", 0, 0, 0, 0)
    right, wrong = label(tmp_path, rows, estimator="first_error")
    assert right.labels == [1.0] * 4
    assert wrong.labels == [1.0, 1.0, 0.0, 0.0, 0.0]
    none = label(tmp_path, [], estimator="first_error")[1]
    assert none.labels == [1.0, 1.0, None, None, 0.0]
    assert none.weights == [1.0, 1.0, 0.0, 0.0, 1.0]


def test_the_search_halves_what_is_not_known() -> None:
    good = states_on_right_ways([RIGHT, WRONG])
    assert search_state(WRONG, {}) == ErrorSearch(0, 5)
    assert search_state(WRONG, {}, good) == ErrorSearch(2, 5)
    assert search_state(WRONG, {}, good).middle == 3
    lost = {state_key("p", [1, 2, 5]): Count(0, 4)}
    assert search_state(WRONG, lost, good).is_over
    found = {state_key("p", [1, 2, 5, 6]): Count(1, 4), **lost}
    assert search_state(WRONG, found, good) == ErrorSearch(4, 5), "a right completion is a proof, none is not"
    assert search_state(RIGHT, {}, good).labels(4) == [1.0] * 4


def test_unknown_settings_and_files_of_others_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no estimator 'guessed': choose from counted"):
        label(tmp_path, ALL, estimator="guessed")
    with pytest.raises(BadInput, match=r"stage\.estimator=pooled is no longer there: choose smoothed"):
        label(tmp_path, ALL, estimator="pooled")
    with pytest.raises(BadInput, match="there is no noise policy 'ignore'"):
        label(tmp_path, ALL, noise="ignore")
    with pytest.raises(BadInput, match="completion 'p/9#1/0': there is no state 'p/9#1'"):
        label(tmp_path, completions("p/9#1", 1))
    with pytest.raises(BadInput, match=r"noise=drop does nothing to labels of stage\.estimator=first_error"):
        label(tmp_path, ALL, estimator="first_error", noise="drop")


# --- labels that are all alike -----------------------------------------------------------------------------------


def test_hard_labels_of_posterior_means_need_a_threshold_above_zero(tmp_path: Path) -> None:
    """A posterior mean is never 0: every step would be good."""
    for settings in ({"label": "hard"}, {"noise": "denoise"}):
        with pytest.raises(BadInput, match=r"of smoothed values needs stage\.threshold above 0 \(0\.5"):
            label(tmp_path, ALL, estimator="smoothed", **settings)
    labels = label(tmp_path, ALL, estimator="smoothed", label="hard", threshold=0.5)
    assert {one for row in labels for one in row.labels[:-1]} == {0.0, 1.0}
    assert all(one is not None and 0 < one < 1 for row in labels for one in row.values[:-1])


def many(folder: Path, num_right: int, **settings: object) -> list[StepValues]:
    """Ten right and ten wrong trajectories of one problem each, of three steps; `num_right` of the four completions of
    every inner state are right."""
    rows = [replace(RIGHT, id=f"{p}/0", problem_id=f"{p}", is_correct=p % 2 == 0) for p in range(20)]
    paths = [str(folder / name) for name in ("t.jsonl", "s.jsonl", "c.jsonl")]
    states = distinct_states(rows)
    sampled = [
        replace(one, problem_id=state.problem_id)
        for state in states
        for one in completions(state.id, *[k < num_right for k in range(4)])
    ]
    for path, records in zip(paths, (rows, states, sampled), strict=True):
        write_records(path, records)
    stage = EstimateValues(paths[0], paths[1], **settings)  # type: ignore[arg-type]
    return list(stage.run(paths[2], StageContext(None, Path("labels.jsonl"), 10.0)))


def test_relative_labels_are_of_the_value_of_the_prompt(tmp_path: Path) -> None:
    """Counted: half of the two trajectories are right, so that a quarter is half of the prompt's value; the prompt's
    own completions come before that where there are some. Smoothed: of the prompt's posterior mean."""
    right, wrong = label(tmp_path, ALL, label="relative", threshold=0.5)
    assert right.values[:3] == [0.5, 0.25, 1.0]
    assert right.labels == [1.0, 0.0, 1.0, 1.0]  # above a quarter
    assert wrong.labels == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert label(tmp_path, ALL, label="relative", threshold=0.4)[0].labels == [1.0, 1.0, 1.0, 1.0]
    trajectories, states, sampled = files(tmp_path, [*completions("p/0#0", 1, 1, 1, 1), *ALL])
    write_records(states, [State("p/0#0", "p", "p/0", 0, "Q\n", "", [90], [], "7"), *distinct_states([RIGHT, WRONG])])
    context = StageContext(None, Path("unused"), 10.0)
    stage = EstimateValues(trajectories, states, label="relative", threshold=0.5)
    assert next(iter(stage.run(sampled, context))).labels == [0.0, 0.0, 1.0, 1.0]  # above a half
    found = label(tmp_path, ALL, estimator="smoothed", label="relative", threshold=0.5)
    values = smoothed_values([RIGHT, WRONG], count_sampled(distinct_states([RIGHT, WRONG]), ALL))
    limit = values[state_key("p", [])].value / 2
    assert [row.labels[:-1] for row in found] == [[float(value > limit) for value in row.values[:-1]] for row in found]
    assert {0.0, 1.0} == {one for row in found for one in row.labels[:-1]}
    with pytest.raises(BadInput, match=r"label=relative needs stage\.threshold between 0 and 1"):
        label(tmp_path, ALL, label="relative")
    with pytest.raises(BadInput, match=r"does nothing beside stage\.noise=denoise"):
        label(tmp_path, ALL, label="relative", threshold=0.5, noise="denoise")
    with pytest.raises(BadInput, match=r"does nothing beside stage\.estimator=first_error"):
        label(tmp_path, ALL, label="relative", threshold=0.5, estimator="first_error")


@pytest.mark.parametrize("estimator", ["counted", "smoothed"])
def test_nothing_is_relative_to_the_prompt_of_a_problem_without_a_success(
    estimator: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No solution is right; of every second problem the completions of the first state are."""
    rows = [replace(RIGHT, id=f"{p}/0", problem_id=f"{p}", is_correct=False) for p in range(20)]
    states = distinct_states(rows)
    sampled = [
        replace(one, problem_id=state.problem_id)
        for state in states
        for one in completions(state.id, *[int(state.problem_id) % 2 == 0 and len(state.prefix_ids) == 1] * 4)
    ]
    paths = [str(tmp_path / name) for name in ("t.jsonl", "s.jsonl", "c.jsonl")]
    for path, records in zip(paths, (rows, states, sampled), strict=True):
        write_records(path, records)
    stage = EstimateValues(paths[0], paths[1], estimator, label="relative", threshold=0.5)
    for row in stage.run(paths[2], StageContext(None, Path("labels.jsonl"), 10.0)):
        is_solved = int(row.problem_id) % 2 == 0
        assert [label is not None for label in row.labels] == [is_solved] * 3 + [True]
        assert [weight > 0 for weight in row.weights] == [is_solved] * 3 + [True]
        assert row.labels[0] == (1.0 if is_solved else None)
    assert "10 of 20 problems have no right solution or completion" in caplog.text


def test_relative_labels_of_problems_that_are_all_unsolved_are_refused(tmp_path: Path) -> None:
    trajectories, states, sampled = files(tmp_path, [*completions("p/0#1", 0, 0), *ALL])
    wrong = [replace(one, is_correct=False) for one in ALL]
    write_records(trajectories, [replace(row, is_correct=False) for row in (RIGHT, WRONG)])
    write_records(sampled, wrong)
    context = StageContext(None, Path("labels.jsonl"), 10.0)
    with pytest.raises(BadInput, match="none of 1 problems has a right solution or completion"):
        list(EstimateValues(trajectories, states, "smoothed", label="relative", threshold=0.5).run(sampled, context))
    other = [State("q/0#1", "q", "q/0", 1, "Q\n", "", [90], [1], "7")]
    write_records(states, [*distinct_states([RIGHT, WRONG]), *other])
    write_records(sampled, [*wrong, *(replace(one, problem_id="q") for one in completions("q/0#1", 0, 0))])
    with pytest.raises(BadInput, match="lies on no trajectory"):  # a problem of another file's states
        list(EstimateValues(trajectories, states, label="relative", threshold=0.5).run(sampled, context))


def test_hard_labels_that_all_say_good_at_a_low_mean_value_are_refused(tmp_path: Path) -> None:
    """1 of 4 right everywhere: every label of an inner step is 1 at a mean value of 0.25; outcomes differ."""
    with pytest.raises(BadInput) as error:
        many(tmp_path, 1, label="hard")
    assert str(error.value).startswith(
        "labels.jsonl: 60 of 60 labels of inner steps are 1, at a mean value of their states of 0.25: labels that are "
        "all alike teach nothing: take another stage.threshold"
    )
    with pytest.raises(BadInput, match=r"60 of 60 labels of inner steps are 0, at a mean .* of 0\.75"):
        many(tmp_path, 3, label="hard", threshold=0.9)


def test_labels_that_are_alike_because_the_values_are_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        many(tmp_path, 3, label="hard", threshold=0.5)
    assert (
        "60 of 60 labels of inner steps are 1, at a mean value of their states of 0.75: there is nothing" in caplog.text
    )


def test_examples_of_labels_that_are_all_alike_are_refused_where_they_are_read(tmp_path: Path) -> None:
    rows = many(tmp_path, 1)
    path = str(tmp_path / "labels.jsonl")
    write_records(path, [replace(row, labels=[1.0, 1.0, 1.0, row.labels[-1]]) for row in rows])
    with pytest.raises(BadInput, match=r"labels\.jsonl: 60 of 60 labels of inner steps are 1, at a mean .* of 0\.25"):
        StepValueExamples(path, 100).load(None)
    write_records(path, rows)
    examples = StepValueExamples(path, 100).load(None)
    assert len(examples) == 20, "soft labels are the values themselves"
    with pytest.raises(BadInput, match=r"objective\.hard_above=0: 60 of 60 labels of inner steps are 1"):
        check_targets(examples, 0.0, path)
    check_targets(StepValueExamples(path, 100).load(None), None, path)
    apart = StepValueExamples(path, 100, one_example_per="prefix").load(None)
    with pytest.raises(BadInput, match=r"objective\.hard_above=0: 60 of 60 labels of inner steps are 1"):
        check_targets(apart, 0.0, path)


def test_the_balance_of_labels_by_hand() -> None:
    assert label_balance([], []) is None
    assert label_balance([None], [0.5]) is None
    assert label_balance([1.0, None, 0.0, 1.0], [0.5, 0.9, 0.0, None]) == LabelBalance(3, 2, 1.0, 0.25)
    assert not LabelBalance(19, 19, 1.0, 0.1).is_contradicted, "few labels can be alike by chance"
    assert LabelBalance(100, 99, 1.0, 0.5).is_contradicted
    assert not LabelBalance(100, 98, 1.0, 0.1).is_contradicted
    assert not LabelBalance(100, 100, 1.0, 0.51).is_contradicted
    assert not LabelBalance(100, 100, 1.0, None).is_contradicted
    assert LabelBalance(100, 90, 1.0, 0.5).is_doubtful
    assert not LabelBalance(100, 89, 1.0, 0.1).is_doubtful
    assert not LabelBalance(100, 90, 1.0, 0.51).is_doubtful, "most states of a policy that is mostly right are good"


def test_labels_that_nearly_all_say_good_where_little_succeeds_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    check_balance([1.0] * 95 + [0.0] * 5, [0.1] * 100, "v.jsonl", "take another policy")
    assert "v.jsonl: 95 of 100 labels of inner steps are 1, at a mean value of their states of 0.10" in caplog.text
    assert "such labels teach little: take another policy" in caplog.text


def test_bad_lines_are_told_with_their_place(tmp_path: Path) -> None:
    trajectories, states, sampled = files(tmp_path, ALL)
    stage, context = EstimateValues(trajectories, states), StageContext(None, Path("unused"), 10.0)
    good = Path(sampled).read_bytes()
    for content, message in (
        (b"\x00" + good, r"c.jsonl:1: not a JSON object"),
        (good[:-20], r"c.jsonl:20: not a JSON object"),
        (good.replace(b'"is_correct":true', b'"is_correct":1', 1), r"c.jsonl:1: is_correct must be bool, got '1'"),
        (good + good.splitlines(keepends=True)[0], r"c.jsonl:21: id 'p/0#1/0' stands already"),
    ):
        Path(sampled).write_bytes(content)
        with pytest.raises(BadInput, match=message):
            list(stage.run(sampled, context))
    for content in (good.replace(b"\n", b"\r\n"), b"\xef\xbb\xbf" + good):
        Path(sampled).write_bytes(content)
        assert next(iter(stage.run(sampled, context))).labels == [0.5, 0.25, 1.0, 1.0]


def test_labelled_steps_become_examples_of_the_steps_that_have_labels(tmp_path: Path) -> None:
    path = str(tmp_path / "labels.jsonl")
    write_failed(tmp_path / "c.jsonl", [("p/0#2", "HTTP 400")])
    write_records(path, label(tmp_path, SOME))
    assert [row.id for row in read_records(StepValues, path)] == ["p/0", "p/1"]
    first = StepValueExamples(path, 100).load(None)[0]
    assert (first.ids, first.positions, first.values) == ([90, 1, 2, 3, 4], [1, 3, 4], [0.5, 1.0, 1.0])
    with pytest.raises(BadInput, match=r"no example is left \(of 2 read\)"):
        StepValueExamples(path, 3).load(None)


def test_states_cut_from_other_trajectories_are_refused_or_give_no_label(tmp_path: Path) -> None:
    state = State("q/0#1", "q", "q/0", 1, "Q", "a", [90], [1], "7")
    trajectories, states, sampled = files(tmp_path, [Completion("q/0#1/0", "q/0#1", "q", "", [], "stop", None, True)])
    write_records(states, [state])
    context = StageContext(None, Path("unused"), 10.0)
    with pytest.raises(BadInput, match=r"s\.jsonl: state 'q/0#1' lies on no trajectory of .*t\.jsonl: name the traj"):
        list(EstimateValues(trajectories, states).run(sampled, context))
    rows = list(EstimateValues(trajectories, states, "first_error").run(sampled, context))
    assert rows[1].labels == [1.0, 1.0, None, None, 0.0]


def test_a_state_that_was_not_cut_has_no_value_and_the_step_into_it_no_label(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """States from the third step on (stage.first_step=3): of five inner ones the first two are left."""
    caplog.set_level(logging.INFO)
    trajectories, states, sampled = files(tmp_path, [row for row in ALL if row.state_id in ("p/0#3", "p/1#3", "p/1#4")])
    write_records(states, [state for state in distinct_states([RIGHT, WRONG]) if state.step >= 3])
    context = StageContext(None, Path("unused"), 10.0)
    rows = list(EstimateValues(trajectories, states).run(sampled, context))
    assert [row.values for row in rows] == [[None, None, 1.0, 1.0], [None, None, 0.0, 0.0, 0.0]]
    assert [row.labels for row in rows] == [row.values for row in rows]
    assert context.counts["states_not_cut"] == 2
    assert "2 of 5 inner states were not cut and are left out: 4 of 9 steps have no label" in caplog.text
    write_records(sampled, completions("p/0#3", 1))
    with pytest.raises(BadInput, match=r"state 'p/1#3' has no completion \(2 such states\): finish sampling first"):
        list(EstimateValues(trajectories, states).run(sampled, context))


def test_trajectories_without_a_state_beside_others_are_warned_of_unless_the_states_were_cut_from_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A third trajectory of the problem, sampled when the states were there: of its three steps two have no label."""
    trajectories, states, sampled = files(tmp_path, ALL)
    context = StageContext(None, tmp_path / "v.jsonl", 10.0)
    list(EstimateValues(trajectories, states).run(sampled, context))
    assert "have no state" not in caplog.text
    later = replace(RIGHT, id="p/2", response="qrs", steps=["q", "r", "s"], response_ids=[8, 9, 4], step_ends=[1, 2, 3])
    write_records(trajectories, [RIGHT, WRONG, later])
    list(EstimateValues(trajectories, states).run(sampled, context))
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "t.jsonl: 1 of 3 trajectories have no state in" in warning
    assert "2 of 12 steps have no label: cut the states of these" in warning
    caplog.clear()
    cut_from = {"inputs": {"t.jsonl": file_sha256(trajectories)}}
    (tmp_path / "s.meta.json").write_text(json.dumps(cut_from))  # as stage.keep_ratio makes it
    list(EstimateValues(trajectories, states).run(sampled, context))
    assert "have no state" not in caplog.text


@pytest.mark.parametrize("estimator", ["counted", "smoothed", "first_error"])
def test_completions_may_come_in_any_order_and_records_keep_that_of_the_trajectories(
    estimator: str, tmp_path: Path
) -> None:
    """Two problems of the same shape, their trajectories interleaved and their completions shuffled."""

    def other(row: Any, **names: str) -> Any:
        return replace(row, problem_id="q", **{name: value.replace("p/", "q/") for name, value in names.items()})

    trajectories = [RIGHT, other(RIGHT, id=RIGHT.id), WRONG, other(WRONG, id=WRONG.id)]
    sampled = ALL + [other(row, id=row.id, state_id=row.state_id) for row in ALL]
    results = []
    for name, order in (("a", [0, 2, 1, 3]), ("b", [0, 1, 2, 3])):
        folder = tmp_path / name
        folder.mkdir()
        rows = [trajectories[place] for place in order]
        paths = [str(folder / one) for one in ("t.jsonl", "s.jsonl", "c.jsonl")]
        shuffled = random.Random(3).sample(sampled, len(sampled)) if name == "b" else sampled
        for path, content in zip(paths, (rows, distinct_states(rows), shuffled), strict=True):
            write_records(path, content)
        stage = EstimateValues(paths[0], paths[1], estimator)
        results.append(list(stage.run(paths[2], StageContext(None, folder / "v.jsonl", 10.0))))
        assert [row.id for row in results[-1]] == [row.id for row in rows]
    assert {row.id: row for row in results[0]} == {row.id: row for row in results[1]}
