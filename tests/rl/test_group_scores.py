"""Groups scored while others of their batch are still drawn."""

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from benchmarks.cluster.overlap import NoDelivery
from espalier.data.records import Trajectory
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.rewards.outcome import OutcomeReward
from espalier.rewards.score import Score
from espalier.rl.group_scores import computes_here
from espalier.rl.iteration_metrics import IterationMetrics
from espalier.rl.probes.checks import ProbeFailed
from espalier.rl.rollout import Sampler
from espalier.rl.rollout_source import SampledGroups
from espalier.runtime.background_loop import BackgroundLoop
from espalier.runtime.schemas import RLConfig
from espalier.sampling.client import Sample, SampleRequest, SamplingParams
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


def source_of(client: OneAfterAnother, task: WordArithmetic, tokenizer: Any, reward: Any, loop: Any) -> SampledGroups:
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


def test_a_reward_with_a_network_here_gets_the_whole_batch_at_once(
    client: OneAfterAnother, task: WordArithmetic, tokenizer: Any
) -> None:
    """Its numbers depend on which rows stand beside one another: not on what finishes first."""
    client.is_in_order = False
    reward = OnTheDevice(client)
    assert computes_here(reward)
    assert not computes_here(OutcomeReward())
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
