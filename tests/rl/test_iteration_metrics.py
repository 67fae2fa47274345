"""What an iteration measures: every second counts for one phase."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from espalier.data.records import Problem
from espalier.rewards.score import Score
from espalier.rl import iteration_metrics
from espalier.rl.iteration_metrics import Clock, IterationMetrics
from espalier.rl.metrics import describe_subjects, speeds, subjects_of
from espalier.rl.types import RolloutGroup


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be moved by hand."""
    time = [100.0]
    monkeypatch.setattr(iteration_metrics.time, "monotonic", lambda: time[0])
    return time


def test_a_phase_within_another_pauses_it(now: list[float]) -> None:
    clock = Clock()
    with clock.phase("update"):
        now[0] += 1
        with clock.phase("forward"):
            now[0] += 10
            with clock.phase("probes"):
                now[0] += 100
        now[0] += 2
        with clock.phase("probes"):
            now[0] += 200
    now[0] += 1000  # of no phase
    with clock.phase("update"):
        now[0] += 4
    assert clock.take() == {"seconds/update": 7, "seconds/forward": 10, "seconds/probes": 300}
    assert clock.take() == {}


def test_a_phase_that_fails_is_counted_and_closed(now: list[float]) -> None:
    clock = Clock()

    def fail() -> None:
        with clock.phase("probes"):
            now[0] += 3
            raise ValueError

    with clock.phase("update"):
        with pytest.raises(ValueError):
            fail()
        now[0] += 5
    assert clock.has("probes")
    assert clock.take("probes") == {"seconds/probes": 3}
    assert not clock.has("probes")
    assert clock.take() == {"seconds/update": 5}


def test_what_is_measured_between_two_iterations_belongs_to_the_later_one(now: list[float]) -> None:
    metrics = IterationMetrics()
    metrics.add({"gap": 0.5}, "engine/")
    assert metrics.take() == {"engine/gap": 0.5}
    with metrics.clock.phase("save"):
        now[0] += 2
    metrics.add({"rollout/reward": 1.0})
    assert metrics.take() == {"rollout/reward": 1.0, "seconds/save": 2}


def group_of(subject: object, rights: Sequence[bool], rewards: Sequence[float]) -> RolloutGroup:
    rollouts = [SimpleNamespace(trajectory=SimpleNamespace(is_correct=right)) for right in rights]
    problem = Problem("p", "q", "a", {} if subject is None else {"subject": subject})
    made: Any = SimpleNamespace(problem=problem, rollouts=rollouts, scores=[Score(reward) for reward in rewards])
    return cast(RolloutGroup, made)


def test_accuracy_and_reward_are_given_by_subject() -> None:
    groups = [
        group_of("number theory", [True, False], [1.0, 0.0]), group_of("a/b", [True, True], [2.0, 4.0]),
        group_of("number theory", [False, False], [0.0, 3.0]), group_of(None, [True], [9.0]),
    ]  # fmt: skip
    assert describe_subjects(groups, {"number_theory", "a_b", "not_drawn"}) == {
        "accuracy_of/number_theory": 0.25, "reward_of/number_theory": 1.0,
        "accuracy_of/a_b": 1.0, "reward_of/a_b": 3.0,
    }  # fmt: skip
    assert describe_subjects([group_of("a/b", [True], [])], {"a_b"}) == {"accuracy_of/a_b": 1.0}, "nobody scored it"
    assert describe_subjects(groups, ()) == {}
    # two spellings of one name are one subject, and a number is a name
    of = (("a/b", True), ("a b", False), (1, True), (0, False))
    groups = [group_of(subject, [right], []) for subject, right in of]
    named = subjects_of([group.problem for group in groups for _ in range(4)])
    assert describe_subjects(groups, named) == {"accuracy_of/a_b": 0.5, "accuracy_of/1": 1.0, "accuracy_of/0": 0.0}


def test_completions_are_begun_beside_rollouts_and_count_with_them() -> None:
    values = {"rollout/drawn_tokens": 600.0, "forward/tokens": 900.0, "seconds/rollout": 2.0, "seconds/forward": 3.0}
    assert speeds(values, 0.0) == {"tokens_per_second/rollout": 300, "tokens_per_second/forward": 300}
    more = values | {"estimate/completion_tokens": 1000.0, "seconds/completions": 0.5}
    assert speeds(more, 0.0)["tokens_per_second/rollout"] == pytest.approx(640)
    ahead = {"queue/batch_seconds": 4.0}
    assert speeds(values | ahead, 0.0)["tokens_per_second/rollout"] == 150
    assert "tokens_per_second/rollout" not in speeds(more | ahead, 0.0), "completions come while others are trained on"
    assert not any("completions" in name for name in speeds(more, 0.0))


@pytest.mark.parametrize(("subjects", "kept"), [
    (["a"] * 4 + ["b"] * 4, {"a", "b"}), (["a"] * 8, set()), (["a"] * 4 + [None] * 4, {"a"}), ([None] * 8, set()),
    (["a", "b", "c", "d"], set()), ([], set()),
])  # fmt: skip
def test_a_data_set_of_one_subject_or_of_nearly_as_many_as_problems_has_none(
    subjects: list[str | None], kept: set[str]
) -> None:
    assert subjects_of([group_of(subject, [], []).problem for subject in subjects]) == kept
