"""timeline.jsonl: who did what when, in runs in turn and ahead of the policy, cut ones and resumed ones."""

import json
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cluster.overlap import PROGRAM, NoDelivery, sample_of
from benchmarks.processes.repeatable_server import RepeatableServer
from espalier.data.records import BadInput
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.data.timeline import (
    ASKED,
    DELIVERY,
    DRAWING,
    ITERATION,
    LEARNER,
    LOST,
    RUN,
    TimelineEvent,
    event_line,
    read_timeline,
)
from espalier.rewards.outcome import OutcomeReward
from espalier.rl.iteration_metrics import IterationMetrics
from espalier.rl.rollout import Sampler
from espalier.rl.rollout_source import SampledGroups
from espalier.rl.timeline import Timeline
from espalier.rl.types import RolloutGroup
from espalier.runtime.background_loop import BackgroundLoop
from espalier.runtime.schemas import RLConfig
from espalier.sampling.client import ServerGone
from espalier.sampling.data_parallel_engines import DataParallelEngines
from tests.rl.test_staleness import UNIT, InFlight, Timed, _Calls, run_ahead
from tests.support.rl_cases import PARAMS, make_trainer
from tests.support.root_config import root_config

ROUNDED = 2e-4  # two times of tenths of milliseconds


def events_of(run_dir: Path, lane: str) -> list[TimelineEvent]:
    return [event for event in read_timeline(run_dir / "timeline.jsonl") if event.lane == lane]


def seconds_by_phase(events: Sequence[TimelineEvent]) -> Counter[str]:
    found = Counter[str]()
    for event in events:
        found[event.name] += event.end - event.start  # type: ignore[assignment]
    return found


@pytest.mark.slow
def test_phases_of_an_iteration_lie_within_it_one_after_the_other_and_have_the_seconds_of_metrics(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    make_trainer(tiny_policy, task, tokenizer, tmp_path / "run", "").run()
    phases, wholes = events_of(tmp_path / "run", LEARNER), events_of(tmp_path / "run", ITERATION)
    assert [(event.iteration, event.name) for event in wholes] == [(k, f"iteration {k}") for k in range(1, 7)]
    assert all(one.end <= other.start + ROUNDED for one, other in pairwise(phases)), "in order, none over another"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    metrics = {row["step"]: row for row in rows if "seconds/iteration" in row}
    for whole in wholes:
        inside = [event for event in phases if whole.start - ROUNDED <= event.start < whole.end]
        assert {event.iteration for event in inside} == {whole.iteration}
        row, found = metrics[whole.iteration], seconds_by_phase(inside)
        assert {"rollout", "forward", "update", "weight_sync"} <= set(found)
        assert sum(found.values()) <= row["seconds/iteration"] + ROUNDED
        assert whole.end - whole.start == pytest.approx(row["seconds/iteration"], abs=ROUNDED)
        assert found["rollout"] == pytest.approx(row["seconds/rollout"] + row["seconds/reward"], abs=5 * ROUNDED)
        for name in ("forward", "update", "weight_sync"):
            assert found[name] == pytest.approx(row[f"seconds/{name}"], abs=5 * ROUNDED)
    assert {event.iteration for event in phases if event.name == "evaluate"} == {0, 2, 4, 6}
    assert {event.iteration for event in phases if event.name == "save"} == {2, 4}
    deliveries = events_of(tmp_path / "run", DELIVERY)
    assert [(event.name, event.engines) for event in deliveries] == [(f"version {k}", 1) for k in range(7)]
    assert [event.iteration for event in events_of(tmp_path / "run", RUN)] == [0]


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_the_next_batch_is_drawn_while_this_one_is_trained_on_only_where_a_run_is_ahead(
    max_staleness: int, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    config = root_config(
        RLConfig, output_dir="", rollout_num_problems=2, num_iterations=4, max_staleness=max_staleness, seed=3
    )
    client, metrics, delivery = Timed(tokenizer), IterationMetrics(), NoDelivery()
    client.begun = []
    sampler = Sampler(client, task, tokenizer, concurrency=8, stall_seconds=60)
    made: Any = delivery
    metrics.timeline.open(tmp_path, 0)
    with BackgroundLoop() as loop:
        problems = list(task.problems("train"))[:20]
        source = SampledGroups(config, problems, sampler, PARAMS, OutcomeReward(), made, loop, metrics)
        for iteration in range(4):
            metrics.timeline.begin(iteration + 1)
            source(iteration)
            with metrics.clock.phase("update"):
                time.sleep(UNIT)
            with source.at_rest(iteration + 1):
                pass
        metrics.timeline.write(loop.run(sampler.take_work()))
    batches = {event.iteration: event for event in events_of(tmp_path, DRAWING)}
    updates = {event.iteration: event for event in events_of(tmp_path, LEARNER) if event.name == "update"}
    assert [batches[k].name for k in range(1, 5)] == [f"batch {k}" for k in range(1, 5)]
    assert all((event.requests, event.samples) == (2, 8) and event.tokens > 0 for event in batches.values())
    for number in range(2, 4):  # the first two are begun at once
        after, update = batches[number + 1], updates[number]
        overlap = min(after.end, update.end) - max(after.start, update.start)
        assert overlap > UNIT / 2 if max_staleness else overlap <= 0
        assert batches[number].end <= update.start + ROUNDED, "no batch is trained on before it is there"


class Sleeping(DataParallelEngines):
    program = PROGRAM


def test_tokens_of_two_engines_are_those_that_were_drawn(task: WordArithmetic, tokenizer: Any, tmp_path: Path) -> None:
    config = root_config(RLConfig, output_dir="", rollout_num_problems=6, num_iterations=3, max_staleness=1, seed=3)
    options = {"seconds": 0.05, **sample_of(24, tokenizer)}
    client, metrics = Sleeping("policy", str(tmp_path / "engine.log"), options=options), IterationMetrics()
    sampler = Sampler(client, task, tokenizer, concurrency=8, stall_seconds=60)
    made: Any = NoDelivery()
    metrics.timeline.open(tmp_path, 0)
    with BackgroundLoop() as loop:
        loop.run(client.open())
        source = SampledGroups(
            config, list(task.problems("train"))[:20], sampler, PARAMS, OutcomeReward(), made, loop, metrics
        )  # fmt: skip
        for iteration in range(3):
            metrics.timeline.begin(iteration + 1)
            source(iteration)
            metrics.timeline.write(loop.run(sampler.take_work()))
        loop.run(client.close())
    engines = [events_of(tmp_path, f"engine {number} of 2") for number in range(2)]
    for events in engines:
        assert {event.name for event in events} == {ASKED}
        assert all(0 <= event.busy_seconds <= event.end - event.start + ROUNDED for event in events)
        assert all(one.end <= other.start + ROUNDED for one, other in pairwise(events))
    drawn = events_of(tmp_path, DRAWING)
    for name in ("requests", "samples", "tokens"):
        by_engine = [sum(getattr(event, name) for event in events) for events in engines]
        assert min(by_engine) > 0
        assert sum(by_engine) == sum(getattr(event, name) for event in drawn)
    assert [(event.requests, event.samples, event.tokens) for event in drawn] == [(6, 24, 24 * 24)] * 3


@pytest.fixture
def parts(tiny_policy: Path, task: WordArithmetic, tokenizer: Any) -> tuple[Path, WordArithmetic, Any, Any]:
    return tiny_policy, task, tokenizer, RepeatableServer(tiny_policy, 128)


@pytest.mark.slow
def test_a_run_that_is_cut_and_resumed_has_every_iteration_once(
    parts: tuple[Path, WordArithmetic, Any, RepeatableServer], tmp_path: Path
) -> None:
    """Checkpoints are of iterations 2 and 4; the first program dies in the fourth, the second makes it again."""
    run, path = tmp_path / "run", tmp_path / "run" / "timeline.jsonl"
    cut = run_ahead(InFlight, run, parts, max_staleness=1, save_every=2)[0]
    whole = cut.rollout_source

    def dies(iteration: int) -> list[RolloutGroup]:
        if iteration == 3:
            raise ServerGone("the server has died")
        return whole(iteration)

    cut.rollout_source = _Calls(whole, dies)
    with pytest.raises(ServerGone):
        cut.run()
    before = path.read_text()
    path.write_text(before + '{"iteration":4,"la')  # as a kill may leave it
    assert [event.iteration for event in events_of(run, ITERATION)] == [1, 2, 3]
    run_ahead(InFlight, run, parts, max_staleness=1, save_every=2)[0].run()
    assert path.read_text().startswith(before)
    assert [event.iteration for event in events_of(run, ITERATION)] == [1, 2, 3, 4, 5, 6]
    assert [event.iteration for event in events_of(run, DRAWING)] == [1, 2, 3, 4, 5, 6]
    assert [event.iteration for event in events_of(run, RUN)] == [0, 2]
    starts = [event.start for event in events_of(run, ITERATION)]
    assert starts == sorted(starts)
    phases = events_of(run, LEARNER)
    assert all(one.end <= other.start + ROUNDED for one, other in pairwise(phases))


def test_what_a_run_did_before_it_died_is_written(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    trainer = make_trainer(tiny_policy, task, tokenizer, tmp_path / "run", "rl-2")
    with pytest.raises(ServerGone):
        trainer.run()
    last = events_of(tmp_path / "run", LEARNER)[-1]
    assert (last.iteration, last.name) == (3, "rollout")


def test_a_timeline_that_is_not_open_keeps_nothing_and_short_phases_are_left_out(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.add_phase("update", 1.0, 2.0)
    timeline.add(DRAWING, "batch 1", 1.0, 2.0)
    timeline.write([])
    assert not timeline._events
    timeline.open(tmp_path, 0)
    timeline.begin(1)
    parts = [("update", 1.0, 2.0), ("update", 2.0, 3.0), ("probes", 3.0, 3.00005), ("update", 3.5, 4.0)]
    for name, begun, ended in parts:
        timeline.add_phase(name, begun, ended)
    timeline.write([])
    found = [(event.name, round(event.end - event.start, 3)) for event in events_of(tmp_path, LEARNER)]
    assert found == [("update", 2.0), ("update", 0.5)]


def test_an_event_is_a_short_line_and_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    event = TimelineEvent(3, "engine 1 of 2", LOST, 1790000000.12345, 1790000000.12345, "10.0.0.2", 3, 6, 18)
    path.write_text(event_line(event))
    assert len(path.read_text()) < 200
    assert '"engines"' not in path.read_text()
    (found,) = read_timeline(path)
    assert (found.start, found.tokens, found.node) == (1790000000.1235, 18, "10.0.0.2")
    path.write_text('{"iteration":1}\n')
    with pytest.raises(BadInput, match=r"timeline\.jsonl:1: TimelineEvent lacks the field 'lane'"):
        read_timeline(path)


def test_what_lost_engines_cost_is_counted_by_iteration(task: WordArithmetic, tokenizer: Any, tmp_path: Path) -> None:
    config = root_config(RLConfig, output_dir="", rollout_num_problems=6, num_iterations=3)
    client = Sleeping("policy", str(tmp_path / "engine.log"))
    sampler = Sampler(client, task, tokenizer, concurrency=8, stall_seconds=60)
    made: Any = NoDelivery()
    problems = list(task.problems("train"))[:20]
    source = SampledGroups(
        config, problems, sampler, PARAMS, OutcomeReward(), made, BackgroundLoop(), IterationMetrics()
    )  # fmt: skip
    client.num_moved, client.num_lost_samples, client.num_lost_tokens = 3, 6, 18
    assert source._count_gone() == {
        "rollout/asked_again": 3, "rollout/lost_samples": 6, "rollout/lost_tokens": 18,
    }  # fmt: skip
    client.num_lost_samples = 8
    assert source._count_gone() == {
        "rollout/asked_again": 0, "rollout/lost_samples": 2, "rollout/lost_tokens": 0,
    }  # fmt: skip
