"""Rollouts of one policy with their exact credit, and what an estimator says of them."""

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import nan
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any

import torch
from torch.nn.functional import pad

from benchmarks.credit.estimator_parts import CriticValues, EstimatorParts
from benchmarks.credit.exact_gradient import policy_gradient, weighted_lines, without_tail
from benchmarks.credit.gradient_cosines import Products, products
from benchmarks.credit.measures import StepCredit, bias_and_variance, rank_correlation, sign_error, step_estimates
from espalier.data.records import Problem, Trajectory
from espalier.data.tasks.enumerable import EnumerableTask
from espalier.models.load import load_policy, load_tokenizer
from espalier.models.logprobs import response_logprobs
from espalier.rewards.outcome import OutcomeReward
from espalier.rewards.score import Reward
from espalier.rl.credit.state_cutters import at_least_one_step
from espalier.rl.credit.step_credit import step_advantages
from espalier.rl.credit.token_maps import spread_steps
from espalier.rl.estimator_context import EstimatorContext
from espalier.rl.experience import RowScorer, make_experience, token_rewards
from espalier.rl.group_scores import score
from espalier.rl.iteration_metrics import Clock
from espalier.rl.rollout import Sampler
from espalier.rl.tree_rollouts import TreeRollouts
from espalier.rl.types import Experience, RolloutGroup
from espalier.runtime.background_loop import BackgroundLoop
from espalier.sampling.client import Client, Sample, SampleRequest, SamplingParams
from espalier.values.exact.decision_values import ExactValue
from espalier.values.exact.merge_error import MergeError
from espalier.values.exact.state_values import ExactSettings, ExactValues, exact_values


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run."""

    num_problems: int
    """Of one policy."""
    group_size: int
    num_draws: int
    """How often rollouts of the problems are drawn, at least 2: what they have in common is bias, the rest variance."""
    num_reference: int
    """Problems that the policy gradient is the mean over: these and further ones."""
    truth: ExactSettings
    """Of the exact values that estimates are compared with; its `max_tokens` is that of the rollouts."""


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


@dataclass(frozen=True)
class Draw:
    """Rollouts of every problem, their tensors, and of every rollout the values of its states, its steps' decisions and
    their exact advantages."""

    groups: list[RolloutGroup]
    experience: Experience
    trajectories: list[Trajectory]
    values: list[list[ExactValue]]
    decisions: list[list[Hashable]]
    advantages: list[list[float]]


@dataclass(frozen=True)
class Measured:
    """What is found of an estimator: see docs/exact_values.md. Measures of steps are None for rollouts of its own,
    whose exact credit is not known. `seconds` are those of 100 rollouts."""

    bias: float | None
    deviation: float | None
    rank_correlation: float | None
    wrong_sign: float | None
    tokens_per_token: float
    seconds: float
    products: Products


def decisions_of(task: EnumerableTask, group: RolloutGroup, trajectory: Trajectory) -> list[Hashable]:
    """Name what every step does: the positions it leaves and leads to; text where it is outside the grammar."""
    places: list[Hashable] = []
    for text in ["", *accumulate(trajectory.steps)]:
        position = task.position(group.problem, task.split_steps(text))
        places.append(text if position is None else position.key)
    return [(group.problem.id, *pair) for pair in pairwise(places)]


class CreditBench:
    """One policy behind an engine, rollouts drawn from it on the first of `problems` with their exact values, and the
    policy gradients of these and further ones; a context manager."""

    def __init__(self, model: Path, task: EnumerableTask, problems: Sequence[Problem], sizes: Sizes, client: Client):
        self.sizes, self.task = sizes, task
        self.problems, self.reference = list(problems[: sizes.num_problems]), list(problems[: sizes.num_reference])
        self.tokenizer, self.network = load_tokenizer(str(model)), load_policy(str(model), "eager").eval()
        self.parameters = [weight for weight in self.network.parameters() if weight.requires_grad]
        self.client = CountingClient(client)
        self.params = SamplingParams(sizes.group_size, 1.0, sizes.truth.max_tokens, return_logprobs=True)
        self.sampler = Sampler(self.client, task, self.tokenizer, concurrency=64, stall_seconds=600)
        self.loop = BackgroundLoop()
        self.outcome = OutcomeReward()
        self.clock = Clock()

    def __enter__(self) -> "CreditBench":
        """Start the engine, draw, compute the exact values of all draws at once."""
        try:
            with self.clock.phase("engine"):
                self.loop.run(self.client.open())
            with self.clock.phase("rollouts"):
                drawn = [self._sample(self.params, f"draw-{number}") for number in range(self.sizes.num_draws)]
            self.rollout_tokens = self.client.num_tokens
            started = time.monotonic()
            with self.clock.phase("exact values"):
                self.draws = self._with_values(drawn)
            self.exact_seconds = time.monotonic() - started
            with self.clock.phase("policy gradients"):
                self.exact = self._exact_gradients()
                self.policy_gradients = torch.zeros(len(self.reference), self.exact.shape[2])
                for number, problem in enumerate(self.reference):
                    self.policy_gradients[number] = self._policy_gradient(problem)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the engine."""
        self.loop.run(self.client.close())
        self.loop.close()

    def _sample(self, params: SamplingParams, name: str, tree: TreeRollouts | None = None) -> list[RolloutGroup]:
        groups = self.loop.run(self.sampler.rollout(self.problems, params, name, 0))
        return groups if tree is None else self.loop.run(tree.grow(groups, self.sampler, params))

    def _scored(self, groups: Sequence[RolloutGroup], reward: Reward) -> tuple[list[RolloutGroup], Experience]:
        scored = score(groups, reward)
        options: dict[str, Any] = {"pad_id": 0, "micro_batch_size": 64, "precision": "fp32", "temperature": 1.0}
        experience, _ = make_experience(scored, self.network, **options)
        return scored, replace(experience, rewards=token_rewards(scored, experience.response_mask))

    def _with_values(self, drawn: Sequence[list[RolloutGroup]]) -> list[Draw]:
        rollouts = [[at_least_one_step(rollout.trajectory) for group in groups for rollout in group.rollouts]
                    for groups in drawn]  # fmt: skip
        found = self._exact_values([trajectory for trajectories in rollouts for trajectory in trajectories])
        self.merge_error: MergeError = found.merge_error
        self.outside = found.outside
        rest, draws = iter(found.values), []
        for groups, trajectories in zip(drawn, rollouts, strict=True):
            scored, experience = self._scored(groups, self.outcome)
            values = [next(rest) for _ in trajectories]
            decisions = [decisions_of(self.task, group, at_least_one_step(rollout.trajectory))
                         for group in groups for rollout in group.rollouts]  # fmt: skip
            advantages = [step_advantages([value.mid for value in row]) for row in values]
            draws.append(Draw(scored, experience, trajectories, values, decisions, advantages))
        return draws

    def _exact_values(self, trajectories: Sequence[Trajectory]) -> ExactValues:
        by_id = {problem.id: problem for problem in self.reference}
        return exact_values(self.network, self.tokenizer, self.task, by_id, trajectories, self.sizes.truth)

    def valued_rollouts(self, num_problems: int) -> tuple[list[Trajectory], list[list[ExactValue]]]:
        """Return a further rollout of each of the first problems, and the values of its states."""
        params, problems = replace(self.params, n=1), self.reference[:num_problems]
        groups = self.loop.run(self.sampler.rollout(problems, params, "check", 0))
        trajectories = [at_least_one_step(group.rollouts[0].trajectory) for group in groups]
        return trajectories, self._exact_values(trajectories).values

    def _policy_gradient(self, problem: Problem) -> torch.Tensor:
        lines = weighted_lines(self.network, self.tokenizer, self.task, problem, self.sizes.truth)
        return policy_gradient(self.network, without_tail(lines), pad_id=0, temperature=1.0)

    def exact_advantages(self, draw: Draw) -> torch.Tensor:
        """Return the exact advantages [N, T] of a draw's response tokens."""
        ends = [trajectory.step_ends for trajectory in draw.trajectories]
        return spread_steps(ends, draw.advantages, draw.experience.response_mask)

    def gradients(
        self, credited: Sequence[tuple[Experience, torch.Tensor]], sizes: Sequence[Sequence[int]], divisor: int
    ) -> torch.Tensor:
        """Return the gradients of all groups [M, D, P], from the advantages [N, T] of each of D draws; `sizes`: of each
        draw the rollouts of every problem. Sums over a group are divided by `divisor`, its rollouts from the prompt."""
        num_weights = sum(weight.numel() for weight in self.parameters)
        found = torch.zeros(len(self.problems), len(credited), num_weights)
        for draw, ((experience, advantages), of_draw) in enumerate(zip(credited, sizes, strict=True)):
            for number, (start, end) in enumerate(pairwise(accumulate(of_draw, initial=0))):
                found[number, draw] = self._gradient(experience, advantages, slice(start, end)) / divisor
        return found

    def _gradient(self, experience: Experience, advantages: torch.Tensor, rows: slice) -> torch.Tensor:
        """Return the gradient [P] of the sum of advantage x log-prob over the response tokens of `rows`."""
        length = int(experience.attention_mask[rows].sum(-1).max())
        own = advantages[rows, :length].float()
        if not own.any():
            return torch.zeros(sum(weight.numel() for weight in self.parameters))
        ids, mask, chosen = (tensor[rows, :length] for tensor in
                             (experience.ids, experience.attention_mask, experience.response_mask))  # fmt: skip
        logprobs = pad(response_logprobs(self.network, ids.long(), mask, 1.0, chosen)[0], (1, 0))
        parts = torch.autograd.grad((own * logprobs).sum(), self.parameters, allow_unused=True)
        pairs = zip(parts, self.parameters, strict=True)
        return torch.cat([(torch.zeros_like(weight) if part is None else part).flatten() for part, weight in pairs])

    def measure(self, parts: EstimatorParts) -> Measured:
        """Return the measures of an estimator over all draws."""
        credited, sizes = [], []
        steps: list[StepCredit] = []
        correlations: list[float] = []
        before, seconds = self.client.num_tokens, 0.0
        params = self.params if parts.tree is None else replace(self.params, n=parts.group_size)
        for number, draw in enumerate(self.draws):
            groups = draw.groups
            if parts.tree is not None:
                groups = self._sample(params, f"tree-{number}", parts.tree)
            started = time.monotonic()
            groups, experience = self._scored(groups, parts.reward)
            if parts.critic is not None:
                experience = replace(experience, values=self._critic_values(parts.critic, experience))
            context = EstimatorContext(self.loop, self.sampler, parts.reward, params, 0, Clock(), self.network)
            advantages = parts.estimator(groups, experience, context).advantages.float()
            seconds += time.monotonic() - started
            credited.append((experience, advantages))
            sizes.append([len(group.rollouts) for group in groups])
            if parts.tree is None:
                self._add_steps(draw, number, advantages, steps, correlations)
        tokens = (self.client.num_tokens - before) / self.rollout_tokens
        bias, variance = bias_and_variance(steps)
        return Measured(
            bias=None if parts.tree else bias,
            deviation=None if parts.tree else variance**0.5,
            rank_correlation=None if parts.tree else fmean(correlations) if correlations else nan,
            wrong_sign=None if parts.tree else sign_error(steps)[0],
            tokens_per_token=tokens - 1 if parts.tree else tokens,
            seconds=self._per_100_rollouts(seconds),
            products=products(self.gradients(credited, sizes, params.n), self.exact, self.policy_gradients),
        )

    def measure_exact(self) -> Measured:
        """Return the measures of the exact values themselves: what the noise of rollouts alone leaves."""
        seconds = self._per_100_rollouts(self.exact_seconds)
        found = products(self.exact, self.exact, self.policy_gradients)
        return Measured(0.0, 0.0, 1.0, 0.0, 0.0, seconds, found)

    def _exact_gradients(self) -> torch.Tensor:
        """Return the gradients of the rollouts with exact credit."""
        credited = [(draw.experience, self.exact_advantages(draw)) for draw in self.draws]
        sizes = [[self.sizes.group_size] * len(self.problems)] * len(credited)
        return self.gradients(credited, sizes, self.sizes.group_size)

    def _per_100_rollouts(self, seconds: float) -> float:
        return 100 * seconds / (len(self.draws) * len(self.problems) * self.sizes.group_size)

    def _critic_values(self, critic: CriticValues, experience: Experience) -> torch.Tensor:
        tensors = (experience.ids, experience.attention_mask, experience.response_mask)
        return critic(RowScorer(tensors, 64, "fp32"))

    def _add_steps(
        self, draw: Draw, number: int, advantages: torch.Tensor, steps: list[StepCredit], correlations: list[float]
    ) -> None:
        for row, trajectory in enumerate(draw.trajectories):
            own = advantages[row][draw.experience.response_mask[row]].tolist()
            estimates, exact = step_estimates(own, trajectory.step_ends), draw.advantages[row]
            steps += [StepCredit(*found, number) for found in zip(draw.decisions[row], exact, estimates, strict=True)]
            if len(exact) > 2:
                correlations.append(rank_correlation(estimates, exact))
