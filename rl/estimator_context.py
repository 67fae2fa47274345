"""What an advantage estimator is, and what it may ask for beside the rollouts.

An estimator is called on rank 0, which has the rollouts and tensors and asks the engines. Where networks answer (a
reward's, or the policy) all ranks compute, each its share (`runtime.leading`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from espalier.data.batches.packing import pad_rows
from espalier.data.records import Completion, Problem, State, Trajectory
from espalier.data.steps import Decode
from espalier.rewards.score import Reward, Score
from espalier.rl.experience import RowScorer
from espalier.rl.iteration_metrics import Clock
from espalier.rl.rank_scores import score_on_ranks, scores_on_ranks
from espalier.rl.rollout import Sampler
from espalier.rl.types import Estimate, Experience, RolloutGroup
from espalier.runtime.background_loop import BackgroundLoop
from espalier.sampling.client import SamplingParams
from espalier.sampling.requests import decode


@dataclass
class EstimatorContext:
    """The sampler and the reward of one iteration; a question blocks until all of it is answered."""

    loop: BackgroundLoop
    """Where the sampler runs."""
    sampler: Sampler
    reward: Reward
    params: SamplingParams
    """Those of the iteration's rollouts."""
    policy_version: int
    """What the engine serves now: the number of the iteration."""
    clock: Clock
    """Counts the phases completions, reward and prefill."""
    policy: Any
    """The network before the update; nothing is trained with it here. `continuation_logprobs` makes its passes on all
    ranks. A call of it is rank 0's alone, and with ZeRO-3 ends the run: the other ranks hold parts of the weights."""
    micro_batch_size: int = 64
    """Rows of one pass over `policy`, of every rank."""
    micro_batch_tokens: int = 0
    """Above 0: tokens of one such pass, in place of rows."""
    precision: str = "fp32"
    """Of such a pass, as of the update's: bf16 or fp32."""
    asker: str = ""
    """The further estimator that asks, "" the run's own: its requests are named by it, so that with `params.is_seeded`
    two of one kind get draws of their own."""
    num_completions: int = 0
    """Rollouts and completions that it has had sampled."""
    num_completion_tokens: int = 0
    """Their response tokens."""

    @property
    def decode(self) -> Decode:
        """Token ids → text."""
        return decode(self.sampler.tokenizer)

    def rollout(self, problems: Sequence[Problem], params: SamplingParams, name: str) -> list[RolloutGroup]:
        """Sample one scored group per problem. Raises ServerGone, BadInput, ProbeFailed."""
        with self.clock.phase("completions"):
            groups = self.loop.run(self.sampler.rollout(problems, params, name, self.policy_version, self.asker))
        self._count([rollout.trajectory for group in groups for rollout in group.rollouts])
        with self.clock.phase("reward"):
            return score_on_ranks(groups, self.reward)

    def complete(
        self, states: Sequence[State], params: Sequence[SamplingParams], round_number: int
    ) -> list[list[Completion]]:
        """Sample the graded completions of every state, `params[i].n` of state i. Raises ServerGone, BadInput."""
        with self.clock.phase("completions"):
            rows = self.loop.run(
                self.sampler.complete(states, params, round_number, self.asker, turn=self.policy_version)
            )
        self._count([completion for row in rows for completion in row])
        return rows

    def score(self, trajectories: Iterable[Trajectory]) -> list[Score]:
        """Score by the run's reward. Raises ProbeFailed where a score is no number."""
        with self.clock.phase("reward"):
            return scores_on_ranks(trajectories, self.reward)

    def continuation_logprobs(
        self, prefixes: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]
    ) -> list[float]:
        """Sum the log-probs, in nats, of each continuation behind its prefix (token ids, neither of them empty) by
        `policy` at the rollouts' temperature: one number per pair, nothing sampled.

        Pairs that are equal are computed once; the ranks share the rows. Raises ValueError on a
        pair without a prefix or a continuation.
        """
        pairs = [(tuple(prefix), tuple(rest)) for prefix, rest in zip(prefixes, continuations, strict=True)]
        if not all(prefix and rest for prefix, rest in pairs):
            raise ValueError("a log-prob is of a token behind another: a prefix or a continuation is empty")
        distinct = list(dict.fromkeys(pairs))
        if not distinct:
            return []
        rows, starts = [[*prefix, *rest] for prefix, rest in distinct], [len(prefix) for prefix, _ in distinct]
        ids, attention_mask, mask = pad_rows(rows, starts, int(self.sampler.tokenizer.pad_token_id))
        scorer = RowScorer((ids, attention_mask, mask), self.micro_batch_size, self.precision, self.micro_batch_tokens)
        with self.clock.phase("prefill"):
            logprobs = scorer.logprobs(self.policy, self.params.temperature)[0]
        sums = dict(zip(distinct, logprobs.double().sum(-1).tolist(), strict=True))
        return [sums[pair] for pair in pairs]

    def _count(self, sampled: Sequence[Trajectory | Completion]) -> None:
        self.num_completions += len(sampled)
        self.num_completion_tokens += sum(len(one.response_ids) for one in sampled)


class AdvantageEstimator(Protocol):
    """Built from conf/advantage/. One that refuses process rewards says so by `takes_step_rewards = False`, one that
    reads them by `needs_step_rewards = True`, and by `reward_form` if they must be of one form; one that sets process
    scores beside rewards by `has_process_scores = True`, one that reads the branches of a tree by `reads_branches =
    True`, one that computes values by the positions of a task's solutions by `reads_positions = True`, one that reads
    `experience.implicit_rewards` by `needs_implicit_rewards = True`, one that discounts them among the rewards of
    tokens by `takes_implicit_rewards = True` (rl/combinations/)."""

    needs_critic: bool
    """Whether it reads `experience.values`."""
    reads_token_rewards: bool
    """Whether it reads `experience.rewards`, so that a KL penalty placed in the reward is not lost."""
    samples_more: bool
    """Whether it asks the context for samples."""
    smallest_group: int
    """2 where a rollout is compared with others of its problem, else 1."""

    def __call__(self, groups: Sequence[RolloutGroup], experience: Experience, context: EstimatorContext) -> Estimate:
        """Estimate the advantages of the rollouts' response tokens; on rank 0. All tensors of the answer are 0 outside
        the responses, else ValueError ends the run."""


@runtime_checkable
class NamesCompletions(Protocol):
    """An estimator that says of a scored group alone what it is going to ask of it, so that this can be asked while
    other groups are still drawn, and, of batches that are drawn ahead, while the policy is trained."""

    def first_completions(
        self, group: RolloutGroup, decode: Decode, params: SamplingParams
    ) -> list[tuple[State, SamplingParams]]:
        """Return the (state, how its completions are sampled) of the first question; `params` are the rollouts'."""


def check_estimate(estimate: Estimate, response_mask: torch.Tensor) -> None:
    """Raise ValueError where a tensor [N, T] of an estimator says something outside the responses `response_mask`:
    nothing of it would reach the ranks that train."""
    for name in ("advantages", "returns", "to_come", "return_weights"):
        tensor = getattr(estimate, name)
        if tensor is not None and bool((tensor[~response_mask] != 0).any()):
            raise ValueError(f"the estimator's {name} are not 0 outside the responses")
