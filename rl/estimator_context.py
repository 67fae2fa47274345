"""The running engine as the estimators see it: calls that block until the sampler has answered, made on every rank and
answered by rank 0."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from espalier.data.records import Completion, Problem, State, Trajectory
from espalier.data.steps import Decode
from espalier.rewards.score import Reward, Score
from espalier.rl.iteration_metrics import Clock
from espalier.rl.rollout import Sampler, score
from espalier.rl.types import RolloutGroup
from espalier.runtime.distributed import from_main_rank
from espalier.sampling.client import SamplingParams
from espalier.sampling.requests import decode


@dataclass
class EstimatorContext:
    """One iteration's `rl.types.Live`: `policy_version` is what the engine serves now.

    `clock` counts the phases completions and reward.
    """

    loop: asyncio.Runner
    sampler: Sampler
    reward: Reward
    params: SamplingParams
    policy_version: int
    clock: Clock

    @property
    def decode(self) -> Decode:
        """The tokenizer's."""
        return decode(self.sampler.tokenizer)

    def rollout(self, problems: Sequence[Problem], params: SamplingParams, name: str) -> list[RolloutGroup]:
        """One scored group a problem."""
        with self.clock.phase("completions"):
            groups = from_main_rank(
                lambda: self.loop.run(self.sampler.rollout(problems, params, name, self.policy_version))
            )
        with self.clock.phase("reward"):
            return from_main_rank(lambda: score(groups, self.reward))

    def complete(
        self, states: Sequence[State], params: Sequence[SamplingParams], round_number: int
    ) -> list[list[Completion]]:
        """Graded completions of every state."""
        with self.clock.phase("completions"):
            return from_main_rank(lambda: self.loop.run(self.sampler.complete(states, params, round_number)))

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """By the run's reward."""
        with self.clock.phase("reward"):
            return from_main_rank(lambda: self.reward(trajectories))
