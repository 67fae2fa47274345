"""Groups scored, and valued, while others of their batch are still drawn."""

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.cluster.overlap import NoDelivery
from espalier.data.records import BadInput, Trajectory
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.rewards.calibration import LinguisticCalibrationReward, StatedForecasts
from espalier.rewards.composed import ComposedReward
from espalier.rewards.outcome import OutcomeReward
from espalier.rewards.score import Score
from espalier.rl.advantages.vineppo import VinePPO
from espalier.rl.estimator_context import EstimatorContext
from espalier.rl.group_scores import computes_here
from espalier.rl.iteration_metrics import Clock, IterationMetrics
from espalier.rl.probes.checks import ProbeFailed
from espalier.rl.rollout import Sampler
from espalier.rl.rollout_source import SampledGroups
from espalier.rl.types import RolloutGroup
from espalier.runtime.background_loop import BackgroundLoop
from espalier.runtime.schemas import RLConfig
from espalier.sampling.client import Refused, Sample, SampleRequest, SamplingParams
from tests.support.rl_cases import PARAMS, FakeClient
from tests.support.root_config import root_config

NUM = 6


class OneAfterAnother(FakeClient):
    """Answers the first problem at once, and each of the others only when the one before is scored."""

    scored: set[str]
    asked: int = 0
    is_in_order: bool = True

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        number = self.asked
        self.asked += 1
        end = time.monotonic() + 10
        while self.is_in_order and len(self.scored) < number:
            assert time.monotonic() < end, "nothing is scored before all is drawn"
            await asyncio.sleep(0.005)
        return await super().sample(request, params)


class Noting:
    """Says which problems were scored, by how many calls; its own value for each."""

    def __init__(self, client: OneAfterAnother, value: float = 1.0):
        self.client, self.value = client, value
        self.num_calls, self.threads = 0, set[str]()

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        self.num_calls += 1
        self.threads.add(threading.current_thread().name)
        self.client.scored |= {trajectory.problem_id for trajectory in trajectories}
        return [Score(self.value * len(trajectory.response_ids)) for trajectory in trajectories]


class OnTheDevice(Noting):
    """The same, with a network of its own."""

    def to(self, device: torch.device) -> None: ...

    def networks(self) -> dict[str, Any]:
        return {"judge": torch.nn.Linear(1, 1)}


def source_of(client: FakeClient, task: WordArithmetic, tokenizer: Any, reward: Any, loop: Any) -> SampledGroups:
    config = root_config(RLConfig, output_dir="", rollout_num_problems=NUM, num_iterations=1, max_staleness=0, seed=3)
    sampler = Sampler(client, task, tokenizer, concurrency=NUM, stall_seconds=60)
    problems = list(task.problems("train"))[:20]
    delivery: Any = NoDelivery()
    return SampledGroups(config, problems, sampler, PARAMS, reward, delivery, loop, IterationMetrics())


@pytest.fixture
def client(tokenizer: Any) -> OneAfterAnother:
    found = OneAfterAnother(tokenizer)
    found.scored = set()
    return found


def test_a_group_is_scored_while_others_are_drawn_and_all_come_in_the_order_of_drawing(
    client: OneAfterAnother, task: WordArithmetic, tokenizer: Any
) -> None:
    reward = Noting(client)
    with BackgroundLoop() as loop:
        source = source_of(client, task, tokenizer, reward, loop)
        groups = source(0)
    assert reward.num_calls == NUM
    ids = [trajectory.problem_id for group in groups for trajectory in [group.rollouts[0].trajectory]]
    assert len(set(ids)) == NUM
    for group in groups:
        assert [score.total for score in group.scores] == [len(r.trajectory.response_ids) for r in group.rollouts]


class OutcomesOfANetwork(OutcomeReward):
    """Waits for whole parts of a batch."""

    def to(self, device: torch.device) -> None: ...

    def networks(self) -> dict[str, Any]:
        return {"judge": torch.nn.Linear(1, 1)}


class MovedForecasts(StatedForecasts):
    """Has networks to move."""

    def to(self, device: torch.device) -> None:
        pass


def test_a_reward_with_a_network_here_gets_the_whole_batch_at_once(
    client: OneAfterAnother, task: WordArithmetic, tokenizer: Any
) -> None:
    """Its numbers depend on which rows stand beside one another: not on what finishes first."""
    client.is_in_order = False
    reward = OnTheDevice(client)
    assert computes_here(reward)
    assert not computes_here(OutcomeReward())
    stated, read = (LinguisticCalibrationReward(one) for one in (StatedForecasts(), MovedForecasts()))
    assert not computes_here(stated)
    assert computes_here(read), "its reader's networks are named to nobody"
    assert computes_here(ComposedReward({"calibration": read}, {}))
    assert not computes_here(ComposedReward({"calibration": stated, "outcome": OutcomeReward()}, {}))
    with BackgroundLoop() as loop:
        source_of(client, task, tokenizer, reward, loop)(0)
    assert reward.num_calls == 1


def test_a_reward_that_is_no_number_ends_the_run_and_nothing_more_is_drawn(
    client: OneAfterAnother, task: WordArithmetic, tokenizer: Any
) -> None:
    reward = Noting(client, float("nan"))
    with BackgroundLoop() as loop:
        source = source_of(client, task, tokenizer, reward, loop)
        with pytest.raises(ProbeFailed, match="the reward of trajectory rl-0/"):
            source(0)
    assert 1 <= reward.num_calls <= 3


# --- completions of groups that are scored --------------------------------------------------------------------------


class CompletionsInBetween(FakeClient):
    """Answers each problem only when completions of every one before it have been asked for; notes all requests."""

    order: list[str]

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        is_state, end = "#" in request.id, time.monotonic() + 10
        number = sum("#" not in name for name in self.order)
        self.order.append(request.id)
        while (
            not is_state and len({name.split("#")[0].rsplit("/", 1)[0] for name in self.order if "#" in name}) < number
        ):
            assert time.monotonic() < end, "no completion is asked for before all rollouts are drawn"
            await asyncio.sleep(0.005)
        return await super().sample(request, params)


def vineppo_context(source: SampledGroups, loop: BackgroundLoop) -> EstimatorContext:
    return EstimatorContext(loop, source.sampler, source.reward, PARAMS, 0, Clock(), policy=None)


def estimate_with(estimator: VinePPO, groups: Sequence[RolloutGroup], context: EstimatorContext) -> Any:
    rows = [rollout.trajectory.response_ids for group in groups for rollout in group.rollouts]
    length = max(map(len, rows))
    mask = torch.tensor([[k < len(row) for k in range(length)] for row in rows])
    experience: Any = SimpleNamespace(response_mask=mask)
    return estimator(groups, experience, context)


def estimate_of(
    client: FakeClient, task: WordArithmetic, tokenizer: Any, estimator: VinePPO, is_early: bool
) -> tuple[Any, SampledGroups]:
    with BackgroundLoop() as loop:
        source = source_of(client, task, tokenizer, OutcomeReward(), loop)
        source.valued_by = estimator if is_early else None
        return estimate_with(estimator, source(0), vineppo_context(source, loop)), source


def test_completions_of_a_scored_group_are_asked_while_others_are_drawn_and_change_no_number(
    task: WordArithmetic, tokenizer: Any
) -> None:
    found: dict[bool, Any] = {}
    asked: dict[bool, list[str]] = {}
    for is_early in (True, False):
        client = CompletionsInBetween(tokenizer, num_lines=2) if is_early else FakeClient(tokenizer, num_lines=2)
        asked[is_early] = client.order = []
        found[is_early], source = estimate_of(client, task, tokenizer, VinePPO(2, "sampled"), is_early)
        assert source.sampler.generated_tokens > 0
        assert asyncio.run(source.sampler.begun.give_up(0)) == 0
    assert torch.equal(found[True].advantages, found[False].advantages)
    assert found[True].metrics == found[False].metrics
    assert found[True].metrics["num_states"] >= NUM
    states = [name for name in asked[True] if "#" in name]
    assert len(states) == len(set(states)) == found[True].metrics["num_states"]  # nothing is asked twice


class Half:
    """A filter."""

    num_kept = 1

    def __call__(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        return [replace(group, rollouts=group.rollouts[:1], scores=group.scores[:1]) for group in groups]


def test_nothing_is_completed_early_where_a_filter_chooses_rollouts_later(task: WordArithmetic, tokenizer: Any) -> None:
    estimator = VinePPO(2, "sampled")
    estimator.first_completions = None  # type: ignore[assignment]  # who asks it fails
    with BackgroundLoop() as loop:
        source = source_of(FakeClient(tokenizer, num_lines=2), task, tokenizer, OutcomeReward(), loop)
        source.valued_by, source.rollout_filter = estimator, Half()
        assert len(source(0)) == NUM


class FewRight:
    """A fifth of the solutions are right."""

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        return [Score(float(sum(trajectory.response_ids) % 5 == 0)) for trajectory in trajectories]


class FewRightOfANetwork(FewRight, OutcomesOfANetwork):
    """The same, by whole parts of a batch."""


class Noted(FakeClient):
    """Notes all requests; each takes a while that its id draws."""

    def __init__(self, tokenizer: Any):
        super().__init__(tokenizer, num_lines=1)
        self.asked = list[str]()

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        self.asked.append(request.id)
        await asyncio.sleep(0.02 * random.Random(f"of {request.id}").random())
        return await super().sample(request, params)

    def problems_of_states(self, iteration: int) -> set[str]:
        """The problems whose states were completed for a batch."""
        states = (name for name in self.asked if "#" in name and name.startswith(f"rl-{iteration}"))
        return {state.split("#")[0].rsplit("/", 1)[0].split("/", 1)[1] for state in states}


@pytest.mark.parametrize("waits", [False, True])
def test_only_groups_that_are_trained_on_are_completed_where_others_are_replaced(
    waits: bool, task: WordArithmetic, tokenizer: Any
) -> None:
    """And nearly all of them before the estimator asks; groups that only fill up wait for it."""
    client = Noted(tokenizer)
    with BackgroundLoop() as loop:
        source = source_of(client, task, tokenizer, FewRightOfANetwork() if waits else FewRight(), loop)
        source.config = replace(source.config, rollout=replace(source.config.rollout, dynamic_sampling_rounds=2))
        source.valued_by = VinePPO(2, "sampled")
        groups = source(0)
        loop.run(asyncio.sleep(0.2))
        drawn = {name.split("/", 1)[1] for name in client.asked if "#" not in name}
        differ = {group.problem.id for group in groups if len(set(group.rewards)) == 2}
        assert len(drawn) > NUM == len(groups) >= len(differ) > 2
        assert client.problems_of_states(0) == differ


def test_batches_that_are_drawn_ahead_are_completed_while_the_policy_is_trained(
    task: WordArithmetic, tokenizer: Any
) -> None:
    """By the versions it has until then; the estimator waits for those answers, asks nothing twice, and the balance of
    completions closes."""
    client, estimator = Noted(tokenizer), VinePPO(2, "sampled")
    with BackgroundLoop() as loop:
        source = source_of(client, task, tokenizer, OutcomeReward(), loop)
        rollout = replace(source.config.rollout, max_staleness=1)
        source.config = replace(source.config, rollout=rollout, num_iterations=3)
        source.valued_by = estimator
        rows = []
        for iteration in range(3):
            groups = source(iteration)
            context = replace(vineppo_context(source, loop), policy_version=iteration)
            estimate_with(estimator, groups, context)
            end = time.monotonic() + 10
            while iteration == 0 and not source.sampler.begun.waiting_tokens:
                assert time.monotonic() < end, "no completion of the next batch comes before this one is trained on"
                time.sleep(0.005)
            rows.append(source.value(context.num_completion_tokens))
            assert client.problems_of_states(iteration) == {group.problem.id for group in groups}
            end = time.monotonic() + 10
            while iteration < 2 and len(client.problems_of_states(iteration + 1)) < NUM:  # "training"
                assert time.monotonic() < end, "nothing of the next batch is completed before this one is trained on"
                time.sleep(0.005)
            with source.at_rest(iteration + 1):
                pass
        assert len(client.asked) == len(set(client.asked))
        waited = [row["ledger/completions_waiting"] for row in rows]
        assert waited[0] > 0 == waited[-1]
        came, valued = (sum(row[f"ledger/{name}"] for row in rows) for name in ("completions", "completions_valued"))
        assert came == valued == source.sampler.completion_tokens > 0


def test_completions_that_were_begun_and_are_not_asked_for_end_the_run(task: WordArithmetic, tokenizer: Any) -> None:
    with BackgroundLoop() as loop:
        source = source_of(FakeClient(tokenizer, num_lines=2), task, tokenizer, OutcomeReward(), loop)
        source.valued_by = VinePPO(2, "sampled")
        source(0)
        with pytest.raises(RuntimeError, match="were begun, and the estimator did not ask for them"):
            source(1)


def test_completions_that_fail_early_end_the_run_where_they_are_asked_for(task: WordArithmetic, tokenizer: Any) -> None:
    class Refuses(FakeClient):
        async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
            if "#" in request.id:
                raise Refused("too long")
            return await super().sample(request, params)

    with pytest.raises(BadInput, match=r"state rl-0/.* cannot be completed: too long"):
        estimate_of(Refuses(tokenizer, num_lines=2), task, tokenizer, VinePPO(2, "sampled"), True)
