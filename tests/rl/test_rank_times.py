"""Lanes of the other ranks in timeline.jsonl: in rank 0's time, with the rank that was waited for, few events of many;
and which rank was the slowest."""

import json
import socket
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed  # noqa: F401, loaded before the fork

from benchmarks.processes.forked import run_ranks
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.data.timeline import LANES, TimelineEvent, read_timeline
from espalier.rl.iteration_metrics import IterationMetrics
from espalier.rl.rank_times import clock_offset, in_few, slowest
from espalier.rl.timeline import Timeline
from tests.support.rl_cases import make_trainer
from tests.support.rl_ranks import SLOWER, TIMES

ROOT = Path(__file__).resolve().parent.parent.parent


def run(policy: Path, run_dir: Path, *settings: str) -> tuple[list[int], list[TimelineEvent]]:
    """Two ranks; their exit codes, and what the run's timeline holds then."""
    log = run_dir.with_suffix(".log")
    codes = run_ranks("tests/support/rl_ranks.py", [str(policy), str(run_dir), *settings], log, 2)
    return codes, read_timeline(run_dir / "timeline.jsonl")


def seconds_of(events: Sequence[TimelineEvent], lane: str, name: str, iteration: int) -> float:
    chosen = (event for event in events if (event.lane, event.name, event.iteration) == (lane, name, iteration))
    return sum(event.end - event.start for event in chosen)


def test_two_ranks_have_lanes_in_one_time_also_of_a_run_that_was_killed_and_goes_on(
    tiny_policy: Path, tmp_path: Path
) -> None:
    """Rank 1 is slow, on a machine with other clocks. All die in the third iteration, behind the checkpoint of the
    second."""
    folder = tmp_path / "run"
    codes, events = run(tiny_policy, folder, "slow", "killed")
    assert 0 not in codes
    path = folder / "timeline.jsonl"
    before = path.read_text()
    assert before.endswith("\n"), "no torn line"
    path.write_text(before + '{"iteration":3,"la')  # as a kill may leave it
    codes, events = run(tiny_policy, folder, "slow")
    assert codes == [0, 0], (tmp_path / "run.log").read_text()[-3000:]
    assert path.read_text().startswith(before)

    assert {event.lane for event in events} == {"run", "iteration", "learner", "learner 1", "delivery", "drawing"}
    of_rank_1 = [event for event in events if event.lane == "learner 1"]
    assert {event.node for event in of_rank_1} == {socket.gethostname()}
    assert {event.node for event in events if event.lane == "learner"} == {""}
    updates = {k: [event for event in of_rank_1 if (event.name, event.iteration) == ("update", k)] for k in (1, 2, 3)}
    steps = [float(text) for text in (folder / TIMES).read_text().split()]
    assert len(steps) == 7, "the third update was begun again behind its first step"
    for k, truly in zip((1, 2, 3), (steps[0], steps[2], steps[5]), strict=True):
        assert updates[k][0].start == pytest.approx(truly, abs=0.3), "another clock; as a rule some ms apart"
        waited = seconds_of(events, "learner", "waiting for rank 1", k)
        assert waited > SLOWER, "two minibatches, less what a busy machine makes rank 0 wait otherwise"
        assert seconds_of(events, "learner 1", "waiting for rank 0", k) > 0, "the rollouts, at least"

    rows = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["ranks/slowest"] for row in rows] == [1, 1, 1]
    assert all(1 < row["ranks/slowest_over_mean"] < 2 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero1", "zero2"])
def test_with_deepspeed_a_slow_rank_is_waited_for_too(engine: str, tiny_policy: Path, tmp_path: Path) -> None:
    codes, events = run(tiny_policy, tmp_path / "run", "slow", f"deepspeed={engine}")
    assert codes == [0, 0]
    for k in (1, 2, 3):
        assert seconds_of(events, "learner", "waiting for rank 1", k) > SLOWER


def test_one_process_has_no_lane_and_no_number_of_ranks(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    settings = {"num_iterations": 1, "num_epochs": 1, "rollout_num_problems": 2, "evaluation_num_problems": 2}
    trainer = make_trainer(tiny_policy, task, tokenizer, tmp_path / "run", "", **settings)
    trainer.run()
    events = read_timeline(tmp_path / "run" / "timeline.jsonl")
    assert {event.lane for event in events} <= set(LANES)
    assert not [event for event in events if event.name.startswith("waiting") or event.busy_seconds]
    assert "ranks/" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert trainer.metrics.clock.take_computed(["forward"]) == 0


def test_the_slowest_rank_is_compared_with_the_mean_of_all() -> None:
    assert slowest([2.0, 5.0, 2.0, 3.0]) == {"ranks/slowest_over_mean": 5 / 3, "ranks/slowest": 1.0}
    assert slowest([0.0, 0.0]) == {}


def test_clocks_are_compared_by_most_meetings_not_by_the_one_that_a_rank_woke_up_late_for() -> None:
    here = [10.0, 20.0, 30.0, 40.0, 50.0]
    there = [1010.001, 1020.001, 1034.0, 1040.001, 1050.002]
    assert clock_offset(here, there) == pytest.approx(-1000.001)
    assert clock_offset([], []) == 0


def test_a_wait_is_a_part_of_its_own_and_its_seconds_stay_with_the_phase(tmp_path: Path) -> None:
    metrics = IterationMetrics()
    metrics.timeline.open(None, 4)
    metrics.timeline.begin(5)
    parts: list[tuple[str, float, float]] = []
    metrics.clock._on_part = lambda *part: parts.append(part)
    with metrics.clock.phase("update"), metrics.clock.call("update"):
        begun = metrics.clock._since
        metrics.wait(3, begun + 1.0, begun + 5.0)
        metrics.wait(2, begun + 5.0, begun + 5.001)  # too short for a part of its own
        metrics.clock._since = begun + 6.0
        # of the call that runs, so far: waits, which are no part of what is computed
        assert metrics.clock._computed == {"update": pytest.approx(-4.001)}
    assert parts[:2] == [("update", begun, begun + 1.0), ("waiting for rank 3", begun + 1.0, begun + 5.0)]
    metrics.wait(1, 90.0, 91.0)  # between phases
    assert parts[-1] == ("waiting for rank 1", 90.0, 91.0)
    # what is waited between calls is none of theirs
    assert metrics.clock.take_computed(["update", "forward"]) == pytest.approx(-4.001, abs=0.5)
    assert metrics.clock.take_computed(["update"]) == 0
    assert list(metrics.timeline.meetings) == [begun + 5.0, begun + 5.001, 91.0]


def test_a_call_counts_for_the_phase_that_is_open_or_for_its_own() -> None:
    clock = IterationMetrics().clock
    with clock.call("forward"):
        assert clock.current == "forward"
        time.sleep(0.02)
    with clock.phase("probes"), clock.call("probes"):
        time.sleep(0.01)
    with clock.call(""):
        assert clock.current == ""
    assert 0.02 <= clock.take_computed(["forward"]) < 0.3
    assert {name: seconds > 0.005 for name, seconds in clock.take().items()} == {
        "seconds/forward": True, "seconds/probes": True
    }  # fmt: skip


def test_what_another_rank_did_is_handed_over_once_and_moved_to_this_ones_clock(tmp_path: Path) -> None:
    there, here = Timeline(), Timeline()
    there.open(None, 6)
    there.begin(7)
    there.add_phase("update", 1000.0, 1002.0)
    there.add("delivery", "version 7", 1.0, 2.0)  # of rank 0 alone
    events = there.take_phases()
    assert [(event.lane, event.name, event.iteration, event.start) for event in events] == [
        ("learner", "update", 7, 1e3)
    ]
    assert there.take_phases() == []
    here.open(tmp_path, 6)
    here._offset = 5e8
    here.add_of_rank(12, "node-3", events, -990.0)
    here.write([])
    (found,) = (event for event in read_timeline(tmp_path / "timeline.jsonl") if event.lane != "run")
    assert found == TimelineEvent(7, "learner 12", "update", 5e8 + 10, 5e8 + 12, "node-3")


def test_however_many_minibatches_a_rank_hands_over_few_events() -> None:
    def phases(wait: float) -> list[TimelineEvent]:
        events = [TimelineEvent(1, "learner", "waiting for rank 0", 0.0, 100.0)]
        for at in range(1000):  # each waits for rank 2 at its end
            start = 100 + at
            events.append(TimelineEvent(1, "learner", "update", start, start + 1 - wait))
            events.append(TimelineEvent(1, "learner", "waiting for rank 2", start + 1 - wait, start + 1))
        return [*events, TimelineEvent(1, "learner", "save", 1100.0, 1100.5)]

    drawn, update = in_few(phases(0.25))
    assert (drawn.name, drawn.end) == ("waiting for rank 0", 100.0)
    assert (update.name, update.start, update.end) == ("update", 100.0, 1100.0)
    assert update.busy_seconds == pytest.approx(750)
    long = in_few([*phases(0.25)[:21], TimelineEvent(1, "learner", "waiting for rank 2", 110.0, 200.0)])
    assert Counter(event.name for event in long)["waiting for rank 2"] == 1, "a hundredth of all and more is shown"
    assert in_few([]) == []
