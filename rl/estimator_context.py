"""The running engine as the estimators see it: calls that block until the sampler has answered."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from espalier.data.records import Completion, Problem, State, Trajectory
from espalier.data.steps import Decode
from espalier.rewards.score import Reward, Score
from espalier.rl.metrics import timed
from espalier.rl.rollout import Sampler, score
from espalier.rl.types import RolloutGroup
from espalier.sampling.client import SamplingParams
from espalier.sampling.requests import decode


@dataclass
class LiveSampler:
    """One iteration's `rl.types.Live`: `policy_version` is what the engine serves now.

    `times` gathers `seconds/completions` and `seconds/reward`.
    """

    loop: asyncio.Runner
    sampler: Sampler
    reward: Reward
    params: SamplingParams
    policy_version: int
    times: dict[str, float] = field(default_factory=dict)

    @property
    def decode(self) -> Decode:
        """The tokenizer's."""
        return decode(self.sampler.tokenizer)

    def rollout(self, problems: Sequence[Problem], params: SamplingParams, name: str) -> list[RolloutGroup]:
        """One scored group a problem."""
        with timed(self.times, "completions"):
            groups = self.loop.run(self.sampler.rollout(problems, params, name, self.policy_version))
        with timed(self.times, "reward"):
            return score(groups, self.reward)

    def complete(
        self, states: Sequence[State], params: Sequence[SamplingParams], round_number: int
    ) -> list[list[Completion]]:
        """Graded completions of every state."""
        with timed(self.times, "completions"):
            return self.loop.run(self.sampler.complete(states, params, round_number))

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """By the run's reward."""
        with timed(self.times, "reward"):
            return self.reward(trajectories)
