"""What an iteration measures: every second counts for one phase."""

import pytest

from espalier.rl import iteration_metrics
from espalier.rl.iteration_metrics import Clock, IterationMetrics


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
