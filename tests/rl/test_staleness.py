"""Rollouts that are drawn ahead of the policy: when, by which version, and where every token ends."""

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from benchmarks.cluster.overlap import NoDelivery
from benchmarks.processes.repeatable_server import RepeatableServer
from espalier.data.prompts import encode_prompt
from espalier.data.records import Problem
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.rewards.outcome import OutcomeReward
from espalier.rl.advantages.vineppo import VinePPO
from espalier.rl.combinations import check_staleness
from espalier.rl.delivery.weight_sync import WeightSync
from espalier.rl.engines_from_config import engines_of
from espalier.rl.estimator_context import EstimatorContext
from espalier.rl.iteration_metrics import Clock, IterationMetrics
from espalier.rl.ledger import Ledger, LedgerOpen, read_waiting
from espalier.rl.probes import watch
from espalier.rl.probes.checks import VERSION, ProbeFailed
from espalier.rl.rollout import Sampler
from espalier.rl.rollout_source import SampledGroups
from espalier.rl.trainer import Trainer
from espalier.rl.types import Rollout, RolloutGroup
from espalier.runtime.background_loop import BackgroundLoop
from espalier.runtime.entrypoint import BadConfig
from espalier.runtime.schemas import RLConfig
from espalier.sampling.client import Sample, SampleRequest, SamplingParams, ServerGone
from espalier.sampling.data_parallel_engines import DataParallelEngines
from tests.rl.test_group_scores import estimate_with
from tests.support.made_up_time import MadeUpTime
from tests.support.metrics_page import is_defined
from tests.support.rl_cases import PARAMS, FakeClient, Repeatable, make_trainer, read_metrics, share_of_even_tokens
from tests.support.root_config import root_config

Engine = TypeVar("Engine", bound="Drained")
UNIT = 0.2
VINEPPO = {"_target_": "espalier.rl.advantages.vineppo.VinePPO", "completions_per_state": 2}
AGES = ("engine/token_age", "engine/compared_share")
AHEAD: dict[str, Any] = {"tis_cap": 2.0, "evaluation_every": 0, "save_every": 0, "num_epochs": 1}


class Timed(FakeClient):
    """Every response takes a unit of time."""

    def __init__(self, tokenizer: Any, num_lines: int = 0):
        super().__init__(tokenizer, num_lines=num_lines)
        self.begun, self.asked = list[str](), list[str]()

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        self.begun.append(request.id.split("/")[0])
        self.asked.append(request.id)
        await asyncio.sleep(UNIT)
        return await super().sample(request, params)


def timed_source(client: FakeClient, task: WordArithmetic, loop: BackgroundLoop, **settings: Any) -> SampledGroups:
    config = root_config(RLConfig, output_dir="", rollout_num_problems=2, seed=3, **settings)
    sampler = Sampler(client, task, client.tokenizer, concurrency=1000, stall_seconds=60)
    delivery: Any = NoDelivery()
    problems = list(task.problems("train"))[:20]
    return SampledGroups(config, problems, sampler, PARAMS, OutcomeReward(), delivery, loop, IterationMetrics())


@pytest.mark.parametrize(("max_staleness", "units"), [(0, 14), (1, 8)])
def test_seven_iterations_of_a_unit_each_way_take_eight_units_ahead_and_fourteen_in_turn(
    max_staleness: int, units: int, task: WordArithmetic, tokenizer: Any
) -> None:
    """The published example of one-step-off-policy training, but that no batch is drawn or trained on twice."""
    client, events = Timed(tokenizer), list[str]()
    with MadeUpTime() as loop:
        source = timed_source(client, task, loop, num_iterations=7, max_staleness=max_staleness)
        for iteration in range(7):
            groups = source(iteration)
            ages = {iteration - r.policy_version for group in groups for r in group.rollouts}
            events.append(f"{iteration} trains on age {ages.pop()}, drawn: {len(set(client.begun))}")
            loop.pass_time(UNIT)
            with source.at_rest(iteration + 1):
                pass
        assert loop.now == pytest.approx(units * UNIT)
    if max_staleness:
        ahead = [f"{k} trains on age 1, drawn: {min(k + 2, 7)}" for k in range(1, 7)]
        assert events == ["0 trains on age 0, drawn: 2", *ahead]
    else:
        assert events == [f"{k} trains on age 0, drawn: {k + 1}" for k in range(7)]


@pytest.mark.parametrize(("max_staleness", "units"), [(0, 4 * 7), (1, 4 + 2 * 6)])
def test_values_of_states_of_a_batch_ahead_take_no_time_beside_training(
    max_staleness: int, units: int, task: WordArithmetic, tokenizer: Any
) -> None:
    """Rollouts take a unit, completions of their states another one, and training two: with batches ahead an iteration
    takes as long as the longer of both sides."""
    client, estimator = Timed(tokenizer, num_lines=2), VinePPO(2, "sampled")
    with MadeUpTime() as loop:
        source = timed_source(client, task, loop, num_iterations=7, max_staleness=max_staleness)
        source.valued_by = estimator
        for iteration in range(7):
            groups = source(iteration)
            context = EstimatorContext(loop, source.sampler, source.reward, PARAMS, iteration, Clock(), policy=None)
            estimate_with(estimator, groups, context)
            loop.pass_time(2 * UNIT)
            with source.at_rest(iteration + 1):
                pass
        assert loop.now == pytest.approx(units * UNIT)


def test_what_an_iteration_waits_for_is_asked_before_rollouts_that_are_drawn_ahead(
    task: WordArithmetic, tokenizer: Any
) -> None:
    """One request at a time: as soon as its group is scored a state stands before all that is for the next batch."""
    client = Timed(tokenizer, num_lines=2)
    with MadeUpTime() as loop:
        source = timed_source(client, task, loop, num_iterations=2, max_staleness=1)
        source.sampler = Sampler(client, task, tokenizer, concurrency=1, stall_seconds=60)
        source.valued_by = VinePPO(2, "sampled")
        source(0)
        loop.pass_time(1000 * UNIT)
    states = [place for place, name in enumerate(client.asked) if name.startswith("rl-0/") and "#" in name]
    ahead = [place for place, name in enumerate(client.asked) if name.startswith("rl-1/") and "#" not in name]
    assert (len(ahead), len(states) > 4) == (2, True)
    assert sum(place < states[-1] for place in ahead) <= 1  # while a group is scored another one may be asked


class Drained(Repeatable):
    """Has to be left alone while it takes weights, and does not say which version drew what; some requests are slow,
    and those of them whose id begins with `holds` are not answered. With `crosses` the slow ones of later batches wait
    for new weights."""

    holds = ""
    crosses = False

    def __init__(self, server: RepeatableServer):
        super().__init__(server)
        self.version, self.num_open, self.open_at_load = "default", 0, list[int]()
        self.asked: list[tuple[str, str]] = []
        self.loaded = asyncio.Event()

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        self.asked.append((request.id, self.version))
        self.num_open += 1
        is_slow = sum(map(ord, request.id)) % 2 and request.id.startswith("rl-")
        is_held = is_slow and self.holds and request.id.startswith(self.holds)
        if is_slow and self.crosses and not request.id.startswith("rl-0/"):
            await asyncio.wait_for(self.loaded.wait(), 60)
        else:
            await asyncio.sleep(60 if is_held else 0.3 if is_slow else 0.0)
        samples = await super().sample(request, params)
        self.num_open -= 1
        return samples

    async def load(self, key: str, number: int) -> None:
        self.open_at_load.append(self.num_open)
        await super().load(key, number)

    async def stamp(self, version: str) -> None:
        self.version = version
        self.loaded.set()
        self.loaded = asyncio.Event()

    async def served_version(self) -> str:
        return self.version

    async def cached_tokens(self, ids: list[int]) -> int | None:
        return None


class InFlight(Drained):
    """Takes weights in the middle of requests, and says which version drew which token."""

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        first = self.version
        samples = await super().sample(request, params)
        spans = ((0, first),) if self.version == first else ((0, first), (1, self.version))
        return [replace(sample, versions=spans if len(sample.token_ids) > 1 else spans[-1:]) for sample in samples]

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...


def run_ahead(
    kind: type[Engine], run_dir: Path, parts: tuple[Path, WordArithmetic, Any, RepeatableServer], **more: Any
) -> tuple[Trainer, Engine]:
    tiny_policy, task, tokenizer, server = parts
    trainer = make_trainer(tiny_policy, task, tokenizer, run_dir, "", **{**AHEAD, **more})
    engine = kind(server)
    source = trainer.rollout_source
    source.sampler.client = engine
    trainer.delivery.sync.engines = [engine]
    source.reward = share_of_even_tokens
    source.params = replace(source.params, max_tokens=6)
    return trainer, engine


def test_what_engines_and_trainer_wait_for_is_measured(task: WordArithmetic, tokenizer: Any) -> None:
    """Drawing takes one unit and training three: engines that may be one batch ahead stand still for two of them."""
    client, rows = Timed(tokenizer), []
    with BackgroundLoop() as loop:
        source = timed_source(client, task, loop, num_iterations=5, max_staleness=1)
        for iteration in range(4):
            source(iteration)
            time.sleep(3 * UNIT)
            rows.append(source.metrics.take())
    for row in rows[2:]:
        assert row["queue/engines_idle_seconds"] == pytest.approx(2 * UNIT, abs=UNIT / 2)
        assert row["queue/batch_seconds"] == pytest.approx(UNIT, abs=UNIT / 2)
        assert row["seconds/rollout"] < UNIT / 2
    assert rows[0]["seconds/rollout"] == pytest.approx(UNIT, abs=UNIT / 2)


@pytest.fixture
def parts(tiny_policy: Path, task: WordArithmetic, tokenizer: Any) -> tuple[Path, WordArithmetic, Any, Any]:
    return tiny_policy, task, tokenizer, RepeatableServer(tiny_policy, 128)


def test_tokens_are_never_older_than_allowed_and_every_one_ends_in_the_ledger(
    parts: tuple[Path, WordArithmetic, Any, RepeatableServer], tmp_path: Path
) -> None:
    trainer, engine = run_ahead(InFlight, tmp_path / "run", parts, max_staleness=2)
    engine.crosses = True
    trainer.run()
    rows = read_metrics(tmp_path / "run")
    assert max(row["engine/version_lag"] for row in rows) == 2
    assert any(engine.open_at_load[3:])  # weights came in the middle of requests
    generated = trained = 0.0
    for row in rows:
        generated += row["ledger/generated"]
        trained += sum(row[f"ledger/trained_age_{age}"] for age in range(3))
        assert generated == trained + row["ledger/waiting"]
        assert sum(row[f"ledger/trained_age_{age}"] for age in range(3)) == row["rollout/tokens"]
    assert rows[-1]["ledger/waiting"] == 0
    assert any(0 < row["ledger/trained_age_1"] < row["rollout/tokens"] for row in rows)  # versions within a batch
    asked = [name.split("/")[0] for name, _ in engine.asked if name.startswith("rl-")]
    assert sorted(asked) == sorted(f"rl-{k}" for k in range(6) for _ in range(6))  # each batch once, whole


@pytest.mark.parametrize("kind", [InFlight, Drained])
def test_states_of_a_batch_that_is_drawn_ahead_are_completed_before_the_policy_is_trained_on_it(
    kind: type[Engine], parts: tuple[Path, WordArithmetic, Any, RepeatableServer], tmp_path: Path
) -> None:
    estimator = VinePPO(2, "sampled")
    trainer, engine = run_ahead(kind, tmp_path / "run", parts, max_staleness=1, num_iterations=3, estimator=estimator)
    trainer.rollout_source.valued_by = estimator
    trainer.run()
    assert kind is InFlight or not any(engine.open_at_load)
    states = [(int(name.split("/")[0].removeprefix("rl-")), int(version))
              for name, version in engine.asked if name.startswith("rl-") and "#" in name]  # fmt: skip
    assert {batch - version for batch, version in states} == {0, 1}
    assert sum(batch > version for batch, version in states) > len(states) / 4
    rows = read_metrics(tmp_path / "run")
    assert rows[0]["ledger/completions_waiting"] > 0 == rows[-1]["ledger/completions_waiting"]
    for row in rows:
        assert row["ledger/completions_valued"] == row["estimate/completion_tokens"] > 0
    sampled = sum(row["ledger/generated"] + row["ledger/completions"] for row in rows)
    assert sampled == pytest.approx(sum(row["sampling/tokens"] for row in rows), rel=0.02)


@pytest.mark.slow
def test_engines_that_cannot_take_weights_in_flight_are_left_alone_meanwhile(
    parts: tuple[Path, WordArithmetic, Any, RepeatableServer], tmp_path: Path
) -> None:
    trainer, engine = run_ahead(Drained, tmp_path / "run", parts, max_staleness=1)
    trainer.run()
    assert not any(engine.open_at_load)
    rows = read_metrics(tmp_path / "run")
    assert [row["engine/version_lag"] for row in rows] == [0, 1, 1, 1, 1, 1]
    # half a batch may wait for the weights, and is then of their version, as the engine knows
    of_version = {(name.split("/")[0], version) for name, version in engine.asked if name.startswith("rl-")}
    assert {int(version) - int(batch.removeprefix("rl-")) for batch, version in of_version} <= {-1, 0}


class Caching(InFlight):
    """Has a prefix cache, and is slow to answer the first question after a delivery."""

    is_cached, is_slow = False, False

    async def cached_tokens(self, ids: list[int]) -> int | None:
        was_slow, self.is_slow = self.is_slow, False
        await asyncio.sleep(0.3 if was_slow else 0.0)
        was_cached, self.is_cached = self.is_cached, True
        return len(ids) if was_cached else 0

    async def load(self, key: str, number: int) -> None:
        await super().load(key, number)
        self.is_cached, self.is_slow = False, True


@pytest.mark.slow
def test_the_proof_of_an_empty_cache_is_not_overtaken_by_who_fills_it(
    parts: tuple[Path, WordArithmetic, Any, RepeatableServer], tmp_path: Path
) -> None:
    trainer, _ = run_ahead(Caching, tmp_path / "run", parts, max_staleness=1)
    trainer.run()
    assert len(read_metrics(tmp_path / "run")) == 6


CUT: dict[str, Any] = {"max_staleness": 1, "save_every": 1, "num_iterations": 5}


def cut_short(
    parts: tuple[Path, WordArithmetic, Any, RepeatableServer], run: Path, estimator: VinePPO | None = None
) -> list[tuple[str, str]]:
    """Begin five iterations one batch ahead, of which the fourth (from 0: 3) does not begin before the server dies;
    return (request, version) of all that was asked."""
    trainer, engine = run_ahead(InFlight, run, parts, estimator=estimator, **CUT)
    whole = trainer.rollout_source
    whole.valued_by = estimator

    def dies(iteration: int) -> list[RolloutGroup]:
        if iteration == 3:
            raise ServerGone("the server has died")
        return whole(iteration)

    engine.holds = "rl-3/"  # so that some of that batch has come when the checkpoint is written, and some has not
    trainer.rollout_source = _Calls(whole, dies)
    with pytest.raises(ServerGone):
        trainer.run()
    return engine.asked


def go_on(
    parts: tuple[Path, WordArithmetic, Any, RepeatableServer], run: Path, changed: str = "",
    estimator: VinePPO | None = None,
) -> list[tuple[str, str]]:  # fmt: skip
    """Run what `cut_short` left; return (request, version) of all that was asked."""
    settings = {**CUT, "max_staleness": 0} if changed == "staleness" else CUT
    trainer, engine = run_ahead(InFlight, run, parts, estimator=estimator, **settings)
    source = trainer.rollout_source
    source.valued_by = estimator
    if changed == "params":
        source.params = replace(source.params, max_tokens=5)
    trainer.run()
    return engine.asked


@dataclass(frozen=True)
class Cut:
    """A run without estimator that was cut short, and what it had asked."""

    run: Path
    asked: list[tuple[str, str]]


@pytest.fixture(scope="module")
def cut(tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Cut:
    run = tmp_path_factory.mktemp("cut") / "run"
    return Cut(run, cut_short((tiny_policy, task, tokenizer, RepeatableServer(tiny_policy, 128)), run))


def test_a_run_that_is_cut_and_resumed_asks_for_what_had_not_come_of_batches_ahead(
    cut: Cut, parts: tuple[Path, WordArithmetic, Any, RepeatableServer], tmp_path: Path
) -> None:
    shutil.copytree(cut.run, tmp_path / "run")
    asked = [cut.asked, go_on(parts, tmp_path / "run")]
    ahead = [{name for name, _ in rows if name.startswith("rl-3/")} for rows in asked]
    assert len(ahead[0] | ahead[1]) == 6
    assert ahead[1] < ahead[0], "half of it had come, and is not asked again"
    assert {name.split("/")[0] for name, _ in asked[1] if name.startswith("rl-")} == {"rl-3", "rl-4"}
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, 6))
    assert rows[3]["ledger/trained_age_1"] > 0 < rows[3]["ledger/trained_age_0"]
    assert not any(row["ledger/drawn_again"] for row in rows)
    assert balance(rows) == 0


@pytest.mark.parametrize("changed", ["params", "staleness", "prompt"])
def test_what_was_kept_of_batches_ahead_is_drawn_again_where_it_is_no_answer_any_more(
    changed: str,
    cut: Cut,
    parts: tuple[Path, WordArithmetic, Any, RepeatableServer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if changed == "prompt":
        task = parts[1]
        monkeypatch.setitem(vars(task), "prompt", lambda problem: f"Solve: {WordArithmetic.prompt(task, problem)}")
    shutil.copytree(cut.run, tmp_path / "run")
    asked = go_on(parts, tmp_path / "run", changed)
    assert len({name for name, _ in asked if name.startswith("rl-3/")}) == 6
    rows = read_metrics(tmp_path / "run")
    assert rows[3]["ledger/trained_age_0"] == rows[3]["rollout/tokens"]
    assert rows[3]["ledger/drawn_again"] >= rows[2]["ledger/waiting"] > 0
    assert balance(rows) == 0


def test_completions_of_batches_ahead_come_back_with_the_checkpoint(
    parts: tuple[Path, WordArithmetic, Any, RepeatableServer], tmp_path: Path
) -> None:
    estimator = VinePPO(2, "sampled")
    asked = [cut_short(parts, tmp_path / "run", estimator), go_on(parts, tmp_path / "run", estimator=estimator)]
    states = [{name for name, _ in rows if name.startswith("rl-3/") and "#" in name} for rows in asked]
    assert len(states[0]) > len(states[0] & states[1])
    rows = read_metrics(tmp_path / "run")
    assert not any(row["ledger/completions_drawn_again"] for row in rows)
    assert sum(row["ledger/completions"] - row["ledger/completions_valued"] for row in rows) == 0
    assert balance(rows) == 0
    sampled = sum(row["ledger/generated"] + row["ledger/completions"] for row in rows)
    assert sampled == pytest.approx(sum(row["sampling/tokens"] for row in rows), rel=0.02)


def balance(rows: Sequence[dict[str, float]]) -> float:
    """Return the rollout tokens of a whole run that came and ended nowhere."""
    ends = ("rollout/tokens", "ledger/drawn_again", "ledger/agreeing", "ledger/filtered")
    return sum(row.get("ledger/generated", 0) - sum(row.get(name, 0) for name in ends) for row in rows)


def test_what_waited_when_a_program_ended_came_once_and_is_kept_or_drawn_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_waiting(path) == (0, 0)
    last = {"ledger/waiting": 7.0, "ledger/completions_waiting": 4.0}
    path.write_text("".join(json.dumps(row) + "\n" for row in ({"ledger/waiting": 9.0}, last, {"a": 1})))
    ledger = Ledger(1)
    ledger.go_on(*read_waiting(path), kept=3, kept_completions=6)
    ledger.generated += 5
    ledger.valued += 2
    first, second = (ledger.close(8) | ledger.close_completions(8, 11, dropped=1) for _ in range(2))
    assert (first["ledger/generated"], first["ledger/drawn_again"], first["ledger/waiting"]) == (5, 4, 8)
    assert (second["ledger/generated"], second["ledger/drawn_again"]) == (0, 0)
    completions = [f"ledger/completions{name}" for name in ("", "_valued", "_waiting", "_drawn_again")]
    assert [first[name] for name in completions] == [10, 2, 11, 1]
    assert [second[name] for name in completions] == [0, 0, 11, 0]


class _Calls:
    """A source whose call is another function's."""

    def __init__(self, source: Any, call: Any):
        self._source, self._call = source, call

    def __call__(self, iteration: int) -> list[RolloutGroup]:
        found: list[RolloutGroup] = self._call(iteration)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


@pytest.mark.slow
def test_a_sampler_that_dies_in_a_batch_drawn_ahead_ends_the_run(
    parts: tuple[Path, WordArithmetic, Any, RepeatableServer], tmp_path: Path
) -> None:
    trainer, engine = run_ahead(InFlight, tmp_path / "run", parts, max_staleness=1)
    engine.dies_at = "rl-2"
    with pytest.raises(ServerGone, match="the server has died"):
        trainer.run()
    assert len(read_metrics(tmp_path / "run")) <= 2
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize(("versions", "what"), [
    ({"policy_version": 0}, "rollouts of policy version 0 are to train version 4 .rollout.max_staleness=2."),
    ({"policy_version": 5}, "rollouts of policy version 5 are to train version 4"),
    ({"policy_version": -1, "version_starts": ((0, 4), (1, -1))}, "rollouts of an unknown policy version"),
])  # fmt: skip
def test_a_token_that_is_too_old_from_the_future_or_of_nobody_is_never_trained_on(
    versions: dict[str, Any], what: str, parts: tuple[Path, WordArithmetic, Any, RepeatableServer], tmp_path: Path
) -> None:
    trainer, _ = run_ahead(InFlight, tmp_path / "run", parts, max_staleness=2, on_fault="stop")
    groups = some_groups(trainer)
    first = groups[0].rollouts[0]
    groups[0].rollouts[0] = replace(first, **versions)
    trainer.config.probes.on_fault = "stop"
    with pytest.raises(ProbeFailed, match=what) as caught:
        trainer.make_experience(groups, 4)
    assert caught.value.fault.kind == VERSION


def some_groups(trainer: Trainer) -> list[RolloutGroup]:
    source, problems = trainer.rollout_source, trainer.problems.train[:2]

    async def draw() -> list[RolloutGroup]:
        sampler = Sampler(FakeClient(source.sampler.tokenizer), source.sampler.task, source.sampler.tokenizer, 4, 60)
        return await sampler.rollout(problems, PARAMS, "rl-4", 4)

    groups = asyncio.run(draw())
    return [replace(group, scores=share_of_even_tokens([r.trajectory for r in group.rollouts])) for group in groups]


def test_only_tokens_of_the_version_at_hand_are_compared_with_the_trainers(
    parts: tuple[Path, WordArithmetic, Any, RepeatableServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This sampler's log-probs are no policy's: it is a fault that tokens of an older version do not show."""
    trainer, _ = run_ahead(InFlight, tmp_path / "run", parts, max_staleness=2)
    trainer.config.probes.on_fault, trainer.watch._has_reported = "stop", False
    groups = some_groups(trainer)
    older = [replace(g, rollouts=[replace(r, policy_version=3) for r in g.rollouts]) for g in groups]
    trainer.make_experience(older, 4).old_logprobs.sum()
    one = older[0].rollouts[0]
    older[0].rollouts[0] = replace(one, version_starts=((0, 3), (len(one.drawn_ids) - 1, 4)))
    experience = trainer.make_experience(older, 4)
    own = trainer.watch._own
    assert own.sum() == 1
    assert own[0].nonzero().item() == len(one.trajectory.prompt_ids) + len(one.drawn_ids) - 1
    assert torch.equal(own & ~experience.response_mask, torch.zeros_like(own))
    (share,) = trainer.watch.compare(experience).items()  # one token says nothing of a mean
    assert share == ("engine/compared_share", pytest.approx(1 / int(experience.response_mask.sum())))
    monkeypatch.setattr(watch, "_FEWEST", 1)
    with pytest.raises(ProbeFailed):
        trainer.watch.compare(experience)


def test_versions_of_tokens_follow_their_starts(parts: tuple[Path, WordArithmetic, Any, Any], tmp_path: Path) -> None:
    rollout: Rollout = some_groups(run_ahead(InFlight, tmp_path / "run", parts)[0])[0].rollouts[0]
    num = len(rollout.drawn_ids)
    assert rollout.token_versions == [4] * num
    assert replace(rollout, version_starts=((0, 2), (1, 3))).token_versions == [2] + [3] * (num - 1)


def test_a_ledger_that_does_not_close_ends_the_run(
    parts: tuple[Path, WordArithmetic, Any, RepeatableServer], tmp_path: Path
) -> None:
    groups = some_groups(run_ahead(InFlight, tmp_path / "run", parts)[0])
    num = sum(len(rollout.drawn_ids) for group in groups for rollout in group.rollouts)
    ledger = Ledger(1)
    ledger.generated = 2 * num
    ledger.train(groups, 5)
    assert ledger.close(num) == {
        "ledger/trained_age_0": 0, "ledger/trained_age_1": num, "ledger/agreeing": 0, "ledger/filtered": 0,
        "ledger/generated": 2 * num, "ledger/waiting": num, "ledger/drawn_again": 0,
    }  # fmt: skip
    ledger.train(groups, 5)  # twice
    with pytest.raises(LedgerOpen, match=f"{2 * num} tokens came, and {2 * num} are trained on, 0 dropped"):
        ledger.close(num)
    with pytest.raises(LedgerOpen, match="9 tokens of completions came, and 0 have valued states, 0 are"):
        Ledger(1).close_completions(9, 8)


def test_older_rollouts_without_a_correction_and_trees_are_refused() -> None:
    def config(**settings: Any) -> RLConfig:
        return root_config(RLConfig, output_dir="", **settings)

    check_staleness(config(max_staleness=0, tis_cap=0.0))
    check_staleness(config(max_staleness=1, tis_cap=2.0))
    check_staleness(config(max_staleness=1, tis_cap=0.0, correction="none"))
    refused: list[tuple[dict[str, Any], str]] = [
        ({"max_staleness": 1, "tis_cap": 0.0}, "update.tis_cap=0 corrects nothing: set update.tis_cap=2"),
        ({"max_staleness": 1, "tis_cap": 2.0, "branches": [2]}, "a tree compares siblings of one version"),
        ({"max_staleness": -1}, "must be at least 0"),
        ({"max_staleness": 1, "tis_cap": 2.0, "estimators": {"v": VINEPPO}}, "samples.estimators.v asks for samples"),
    ]
    for settings, what in refused:
        with pytest.raises(BadConfig, match=what):
            check_staleness(config(**settings))


def test_a_loop_in_the_background_ends_with_what_it_was_asked_and_nothing_stays() -> None:
    ended: list[str] = []

    async def long() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("long")

    left: list[asyncio.Task[None]] = []

    async def leave_behind(problems: Sequence[Problem]) -> int:
        left.append(asyncio.create_task(long()))
        await asyncio.sleep(0)
        return len(problems)

    with BackgroundLoop() as loop:
        assert loop.run(leave_behind([])) == 0
        with pytest.raises(ZeroDivisionError):
            loop.run(fails())
        assert ended == []
    assert ended == ["long"]
    loop.close()


def test_a_loop_that_is_interrupted_waits_for_what_its_task_does_at_its_end() -> None:
    ended: list[str] = []

    async def cleans_up() -> None:
        try:
            os.kill(os.getpid(), signal.SIGUSR1)
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)
            ended.append("cleaned up")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with BackgroundLoop() as loop, pytest.raises(KeyboardInterrupt):
            loop.run(cleans_up())
        assert ended == ["cleaned up"]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_engines_that_another_rank_runs_are_not_asked_whether_they_take_weights_in_flight() -> None:
    sync = WeightSync(engines_of(DataParallelEngines("model", "log", 2), None))  # nobody has opened it here
    assert sync.takes_in_flight


def test_versions_of_what_a_stop_string_took_off_are_not_the_rollouts(
    parts: tuple[Path, WordArithmetic, Any, RepeatableServer], tmp_path: Path
) -> None:
    sampler = run_ahead(InFlight, tmp_path / "run", parts)[0].rollout_source.sampler
    problem = next(iter(sampler.task.problems("train")))
    prompt = encode_prompt(sampler.task, sampler.tokenizer, problem)
    request = SampleRequest("x", prompt.text, prompt.ids, problem_id=problem.id)
    ids = sampler.tokenizer("#### 4\n\n").input_ids
    num_kept = len(sampler.tokenizer("#### 4").input_ids)
    cut = Sample("#### 4", ids, "stop", [-1.0] * len(ids), "\n\n", versions=((0, "3"), (num_kept + 1, "2")))
    rollout = sampler._make_rollout(problem, request, 1, 0, cut)
    assert len(rollout.token_versions) == len(rollout.drawn_ids) < len(ids)
    assert (rollout.policy_version, set(rollout.token_versions)) == (3, {3})


@pytest.mark.slow
def test_tokens_of_rollouts_that_come_during_an_evaluation_are_counted_and_those_of_the_evaluation_are_not(
    parts: tuple[Path, WordArithmetic, Any, RepeatableServer], tmp_path: Path
) -> None:
    trainer, _ = run_ahead(InFlight, tmp_path / "run", parts, max_staleness=2, evaluation_every=1)
    trainer.run()
    rows = [row for row in read_metrics(tmp_path / "run") if "sampling/tokens" in row]
    assert sum(row["sampling/tokens"] for row in rows) == sum(row["ledger/generated"] for row in rows) > 0


async def fails() -> float:
    return 1 / 0


@pytest.mark.slow
def test_metrics_of_an_asynchronous_run_are_defined(
    parts: tuple[Path, WordArithmetic, Any, RepeatableServer], tmp_path: Path
) -> None:
    trainer, _ = run_ahead(InFlight, tmp_path / "run", parts, max_staleness=1, num_iterations=2)
    trainer.run()
    (row, _) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    page = (Path(__file__).parent.parent.parent / "docs" / "metrics.md").read_text()
    names = [name for name in row if name.startswith(("ledger/", "queue/")) or name in AGES]
    assert len(names) == 16
    assert [name for name in names if not is_defined(name, page)] == []
