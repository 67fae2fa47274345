"""Problems → rollout groups, through the sampling client: token ids and log-probs, nothing re-tokenised.

Requests run concurrently, `num_in_flight` at most. A wait has a deadline: a server that died, or from which
nothing came for `stall_seconds`, ends the run.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from data.prompts import encode_prompt
from data.records import BadInput, Problem
from data.tasks.task import Task
from rewards.outcome import OutcomeReward
from rl.types import Rollout, RolloutGroup
from sampling.client import Client, Refused, SampleRequest, SamplingParams, ServerGone
from sampling.requests import cut_at_text, make_trajectory


class BadSampling(ValueError):
    """Sampling parameters that group-relative learning cannot use."""

    exit_code = 2


def check_params(params: SamplingParams, group_size: int) -> None:
    """Raise BadSampling unless log-probs come back and are those of the distribution that is trained."""
    for is_good, need in (
        (params.n == group_size, f"params.n must be group_size ({group_size}), got {params.n}"),
        (
            group_size >= 2,
            f"group_size must be at least 2, got {group_size}: a rollout needs others to compare",
        ),
        (params.has_logprobs, "params.has_logprobs must be true"),
        (params.temperature > 0, "params.temperature must be above 0: a greedy policy explores nothing"),
        (
            params.top_p == 1,
            f"params.top_p must be 1, got {params.top_p}: log-probs are of the whole vocabulary",
        ),
    ):
        if not is_good:
            raise BadSampling(need)


def draw_problems(problems: Sequence[Problem], count: int, seed: int, iteration: int) -> list[Problem]:
    """`count` distinct problems: a function of (seed, iteration) alone, so that a resume draws the same.

    Raises BadInput where there are fewer.
    """
    if not 1 <= count <= len(problems):
        raise BadInput(f"num_problems must be 1 to {len(problems)} (what the task has), got {count}")
    return random.Random(f"{seed}/{iteration}").sample(list(problems), count)


def score(groups: Sequence[RolloutGroup], task: Task, reward: OutcomeReward) -> list[RolloutGroup]:
    """The groups with their rewards."""
    scored = []
    for group in groups:
        trajectories = [rollout.trajectory for rollout in group.rollouts]
        rewards = [reward.score(task, t.gold, t.response, t.finish_reason, t.num_options) for t in trajectories]
        scored.append(replace(group, rewards=rewards))
    return scored


@dataclass
class Sampler:
    """Asks `client` (open, and bound to the running event loop) for rollouts of `task`."""

    client: Client
    task: Task
    tokenizer: Any
    num_in_flight: int
    stall_seconds: float
    check_server: Callable[[], None] = lambda: None
    _last_result: float = field(default=0.0, init=False)

    async def rollout(
        self, problems: Sequence[Problem], params: SamplingParams, name: str, policy_version: int
    ) -> list[RolloutGroup]:
        """One group a problem, in order; ids are `{name}/{problem}/{k}`. Raises ServerGone, BadInput."""
        gate = asyncio.Semaphore(self.num_in_flight)

        async def ask(problem: Problem) -> RolloutGroup:
            async with gate:
                return await self._group(problem, params, name, policy_version)

        self._last_result = time.monotonic()
        asked = [asyncio.create_task(ask(problem)) for problem in problems]
        everyone = asyncio.gather(*asked)
        watch = asyncio.create_task(self._watch())
        try:
            waited: list[asyncio.Future[Any]] = [everyone, watch]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not everyone.done():
                await watch
            return await everyone
        finally:
            for task in (*asked, watch):
                task.cancel()
            await asyncio.gather(*asked, watch, everyone, return_exceptions=True)

    async def _group(self, problem: Problem, params: SamplingParams, name: str, policy_version: int) -> RolloutGroup:
        prompt = encode_prompt(self.task, self.tokenizer, problem)
        request = SampleRequest(f"{name}/{problem.id}", prompt.text, prompt.ids)
        try:
            samples = await self.client.sample(request, params)
        except Refused as error:
            raise BadInput(f"problem {problem.id} cannot be sampled: {error}") from None
        self._last_result = time.monotonic()
        rollouts = []
        for index, answered in enumerate(samples):
            if answered.logprobs is None or len(answered.logprobs) != len(answered.token_ids):
                raise BadInput(f"the sampler gave no log-probs for {request.id}: choose a client that does")
            sample = cut_at_text(answered, self.tokenizer)
            assert sample.logprobs is not None
            # grading can take a second where an answer needs symbolic work: not in the event loop
            trajectory = await asyncio.to_thread(
                make_trajectory, self.task, self.tokenizer, problem, request, index, sample
            )
            rollouts.append(Rollout(trajectory, sample.logprobs, policy_version))
        return RolloutGroup(problem, rollouts, rewards=[])

    async def _watch(self) -> None:
        """Ends only by raising ServerGone."""
        while True:
            await asyncio.sleep(0.5)
            self.check_server()
            if time.monotonic() - self._last_result > self.stall_seconds:
                raise ServerGone(
                    f"the server gave no answer for {self.stall_seconds:g} s: run the same command to go on"
                )
