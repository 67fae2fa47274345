"""Rollouts of one policy with their exact credit, and what an estimator says of them."""

import asyncio
import time
from collections.abc import Hashable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import nan
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any

import torch
from torch.nn.functional import pad

from benchmarks.credit.measures import (
    StepCredit,
    bias_and_variance,
    cosine,
    rank_correlation,
    sign_error,
    step_estimates,
)
from espalier.data.records import Trajectory
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.load import load_policy, load_tokenizer
from espalier.models.logprobs import response_logprobs
from espalier.rewards.outcome import OutcomeReward
from espalier.rl.credit.state_cutters import at_least_one_step
from espalier.rl.credit.step_credit import step_advantages
from espalier.rl.credit.token_maps import spread_steps
from espalier.rl.estimator_context import AdvantageEstimator, EstimatorContext
from espalier.rl.experience import make_experience, token_rewards
from espalier.rl.iteration_metrics import Clock
from espalier.rl.rollout import Sampler, score
from espalier.rl.types import Experience, RolloutGroup
from espalier.sampling.client import Client, Sample, SampleRequest, SamplingParams
from espalier.values.exact.decision_values import ExactValue
from espalier.values.exact.merge_error import MergeError
from espalier.values.exact.state_values import ExactSettings, exact_values
from espalier.values.monte_carlo import states_of

MAX_TOKENS = 96
# Finer than those of advantage=exact.
FINE = ExactSettings(MAX_TOKENS, 1.0, line_mass=2e-3, state_mass=5e-4, max_width=24, merge_pairs=16)


@dataclass(frozen=True)
class Plan:
    """Sizes of a run."""

    num_problems: int
    group_size: int
    num_draws: int
    """How often rollouts of the problems are drawn."""
    num_simulated: int
    """States whose exact value is compared with completions."""
    completions: int
    """Completions of each of them."""
    operations: tuple[int, int] = (2, 5)
    """The fewest and the most operations of a problem."""
    truth: ExactSettings = FINE
    """Of the exact values that estimates are compared with."""


class CountingClient:
    """A client that counts the tokens it generates."""

    def __init__(self, client: Client):
        self.client, self.num_tokens = client, 0

    async def open(self) -> None:
        """Start the engine."""
        await self.client.open()

    async def close(self) -> None:
        """End it."""
        await self.client.close()

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        """Ask the engine; count."""
        samples = await self.client.sample(request, params)
        self.num_tokens += sum(len(sample.token_ids) for sample in samples)
        return samples


class PolicyGradient:
    """The gradient of sum of advantage x log-prob over the response tokens of an experience, in float32."""

    def __init__(self, model: Any, experience: Experience, temperature: float):
        self.parameters = [weight for weight in model.parameters() if weight.requires_grad]
        masks = (experience.attention_mask, temperature, experience.response_mask)
        self.logprobs = pad(response_logprobs(model, experience.ids, *masks)[0], (1, 0))

    def __call__(self, advantages: torch.Tensor) -> torch.Tensor:
        """Return [P] of advantages [N, T]."""
        total = (advantages * self.logprobs).sum()
        found = torch.autograd.grad(total, self.parameters, retain_graph=True, allow_unused=True)
        return torch.cat([part.flatten() for part in found if part is not None])


@dataclass(frozen=True)
class Draw:
    """Rollouts with their exact credit: of every rollout its steps' decisions and advantages, and the gradient."""

    groups: list[RolloutGroup]
    experience: Experience
    trajectories: list[Trajectory]
    values: list[list[ExactValue]]
    decisions: list[list[Hashable]]
    advantages: list[list[float]]
    gradient: PolicyGradient
    truth: torch.Tensor


def decisions_of(task: WordArithmetic, group: RolloutGroup, trajectory: Trajectory) -> list[Hashable]:
    """Name what every step does: the positions it leaves and leads to; text where it is outside the grammar."""
    places: list[Hashable] = []
    for text in ["", *accumulate(trajectory.steps)]:
        position = task.position(group.problem, task.split_steps(text))
        places.append(text if position is None else position.key)
    return [(group.problem.id, *pair) for pair in pairwise(places)]


class CreditBench:
    """One policy behind an engine, rollouts drawn from it, and their exact values; a context manager."""

    def __init__(self, model: Path, plan: Plan, client: Client):
        self.plan, self.tokenizer = plan, load_tokenizer(str(model))
        self.network = load_policy(str(model), "eager").eval()
        self.client = CountingClient(client)
        self.params = SamplingParams(plan.group_size, 1.0, MAX_TOKENS, return_logprobs=True)
        least, most = plan.operations
        self.task = WordArithmetic(min_operations=least, max_operations=most)
        self.sampler = Sampler(self.client, self.task, self.tokenizer, concurrency=32, stall_seconds=600)
        self.loop = asyncio.Runner()
        self.reward = OutcomeReward()
        self.merge_errors: list[MergeError] = []

    def __enter__(self) -> "CreditBench":
        """Start the engine and draw."""
        try:
            self.loop.run(self.client.open())
            self.rollout_tokens = 0
            self.draws = [self._draw(number) for number in range(self.plan.num_draws)]
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the engine."""
        self.loop.run(self.client.close())
        self.loop.close()

    def _draw(self, number: int) -> Draw:
        problems = self.task.problems("dev")[: self.plan.num_problems]
        drawn = self.loop.run(self.sampler.rollout(problems, self.params, f"draw-{number}", 0))
        groups = score(drawn, self.reward)
        options: dict[str, Any] = {"pad_id": 0, "micro_batch_size": 64, "precision": "fp32", "temperature": 1.0}
        experience, _ = make_experience(groups, self.network, **options)
        experience = replace(experience, rewards=token_rewards(groups, experience.response_mask))
        trajectories = [at_least_one_step(rollout.trajectory) for group in groups for rollout in group.rollouts]
        self.rollout_tokens += sum(len(trajectory.response_ids) for trajectory in trajectories)
        by_id = {problem.id: problem for problem in problems}
        found = exact_values(self.network, self.tokenizer, self.task, by_id, trajectories, self.plan.truth)
        self.merge_errors.append(found.merge_error)
        advantages = [step_advantages([value.mid for value in row]) for row in found.values]
        spread = spread_steps([one.step_ends for one in trajectories], advantages, experience.response_mask)
        gradient = PolicyGradient(self.network, experience, 1.0)
        decisions = [decisions_of(self.task, group, at_least_one_step(rollout.trajectory))
                     for group in groups for rollout in group.rollouts]  # fmt: skip
        return Draw(groups, experience, trajectories, found.values, decisions, advantages, gradient, gradient(spread))

    def measure(self, estimator: AdvantageEstimator) -> dict[str, Any]:
        """Return the measures of an estimator over all draws."""
        steps: list[StepCredit] = []
        correlations, cosines = [], []
        tokens, seconds = self.client.num_tokens, 0.0
        for draw in self.draws:
            clock = Clock()
            context = EstimatorContext(self.loop, self.sampler, self.reward, self.params, 0, clock, self.network)
            started = time.monotonic()
            advantages = estimator(draw.groups, draw.experience, context).advantages.float()
            seconds += time.monotonic() - started
            cosines.append(cosine(draw.gradient(advantages), draw.truth))
            for row, trajectory in enumerate(draw.trajectories):
                own = advantages[row][draw.experience.response_mask[row]].tolist()
                estimates, exact = step_estimates(own, trajectory.step_ends), draw.advantages[row]
                steps += map(StepCredit, draw.decisions[row], exact, estimates)
                if len(exact) > 2:
                    correlations.append(rank_correlation(estimates, exact))
        bias, variance = bias_and_variance(steps)
        return {
            "bias": bias,
            "deviation": variance**0.5,
            "rank_correlation": fmean(correlations) if correlations else nan,
            "sign_error": sign_error(steps)[0],
            "cosines": cosines,
            "tokens_per_token": (self.client.num_tokens - tokens) / self.rollout_tokens,
            "seconds": seconds / len(self.draws),
        }

    def oracle(self) -> dict[str, Any]:
        """Return how exact the exact values are: their bounds, the merge error, and of how many states the share of
        right completions lies within three standard errors of the bounds."""
        draw = self.draws[0]
        asked = {(state.problem_id, tuple(state.prefix_ids)): (state, value)
                 for trajectory, row in zip(draw.trajectories, draw.values, strict=True)
                 for state, value in zip(states_of(trajectory, first_step=0), row, strict=False)}  # fmt: skip
        every = max(1, len(asked) // self.plan.num_simulated)
        chosen = list(asked.values())[::every][: self.plan.num_simulated]
        params = [replace(self.params, n=self.plan.completions, return_logprobs=False,
                          max_tokens=MAX_TOKENS - len(state.prefix_ids)) for state, _ in chosen]  # fmt: skip
        rows = self.loop.run(self.sampler.complete([state for state, _ in chosen], params))
        within, gaps = 0, []
        for (_, value), sampled in zip(chosen, rows, strict=True):
            share = fmean(row.is_correct for row in sampled)
            gap, error = distance(share, value), standard_error(value, len(sampled))
            within += gap <= 3 * error
            gaps.append(abs(share - value.mid))
        rewards = [reward for one in self.draws for group in one.groups for reward in group.rewards]
        widths = [value.high - value.low for one in self.draws for row in one.values for value in row[:-1]]
        return {
            "simulated": len(chosen),
            "within": within,
            "mean_gap": round(fmean(gaps), 4),
            "bound_width": round(fmean(widths), 4),
            "merge_error": round(fmean(error.total_variation for error in self.merge_errors), 4),
            "merge_value_gap": round(fmean(error.value_gap for error in self.merge_errors), 4),
            "most_merge_error": round(max(error.most for error in self.merge_errors), 4),
            "success": round(fmean(rewards), 4),
        }


def distance(share: float, value: ExactValue) -> float:
    """Return how far a share lies outside the bounds of a value."""
    return max(value.low - share, share - value.high, 0.0)


def standard_error(value: ExactValue, num: int) -> float:
    """Return that of a share of `num` outcomes, by the value within the bounds that varies most; at least that of one
    outcome in `num`."""
    success = min(max(value.low, 0.5), value.high)
    return float(max(success * (1 - success), 1 / num) / num) ** 0.5
