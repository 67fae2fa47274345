"""What travels through one iteration: rollouts, groups of them, their tensors, advantages.

Shapes: N rollouts of an iteration in the order of their groups, T tokens of the longest (prompt and
response, padded on the right), G rollouts of a problem. A per-token tensor [N, T] says at [n, t] something
about token `ids[n, t]`, and is 0 where `response_mask` is false.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from espalier.data.records import Problem, Trajectory
from espalier.rewards.score import Score
from espalier.rl.old_logprobs import OldLogprobs


@dataclass(frozen=True)
class Branch:
    """Where a rollout leaves another one: it was sampled from that one's first `num_tokens` response tokens."""

    parent: int
    """index of the other rollout within its group"""
    num_tokens: int


@dataclass(frozen=True)
class Rollout:
    """A trajectory, the engine's log-probs of its response tokens, and the oldest policy version that drew one of them.

    Version v is the policy after v iterations. The tokens that a branch shares with the rollout it leaves are trained
    there: everywhere in rl/ they count as context, which was not drawn again.
    """

    trajectory: Trajectory
    logprobs: Sequence[float]
    policy_version: int
    branch: Branch | None = None
    version_starts: tuple[tuple[int, int], ...] = ()
    """(first token, version) in the order of `drawn_ids`, where weights came while it was drawn; empty: one version."""

    @property
    def num_shared(self) -> int:
        """Count the response tokens that it did not draw itself."""
        return 0 if self.branch is None else self.branch.num_tokens

    @property
    def context_ids(self) -> list[int]:
        """List the tokens that it was sampled from: the prompt, and what a branch shares."""
        return [*self.trajectory.prompt_ids, *self.trajectory.response_ids[: self.num_shared]]

    @property
    def drawn_ids(self) -> list[int]:
        """List the response tokens that it drew itself: those it is trained on."""
        return self.trajectory.response_ids[self.num_shared :]

    @property
    def token_versions(self) -> list[int]:
        """List the version that drew each of `drawn_ids`."""
        num = len(self.drawn_ids)
        starts = self.version_starts or ((0, self.policy_version),)
        ends = [*(start for start, _ in starts[1:]), num]
        return [version for (start, version), end in zip(starts, ends, strict=True) for _ in range(start, end)]


SMALLEST_STD = 1e-6
"""Of rewards that differ by more than rounding: process rewards that come to one sum differ in their last bits."""


def sample_std(rewards: Sequence[float]) -> float:
    """Return the standard deviation of a sample (n - 1 below); 0 of fewer than two."""
    mean = sum(rewards) / max(1, len(rewards))
    centred = [reward - mean for reward in rewards]
    return math.sqrt(sum(value * value for value in centred) / max(1, len(rewards) - 1))


def are_alike(rewards: Sequence[float]) -> bool:
    """Say whether rewards of a group are equal: compared with one another its rollouts teach nothing."""
    return sample_std(rewards) < SMALLEST_STD


@dataclass(frozen=True)
class RolloutGroup:
    """The rollouts of one problem; `scores` holds one score a rollout, none until they are scored."""

    problem: Problem
    rollouts: list[Rollout]
    scores: list[Score]

    @property
    def rewards(self) -> list[float]:
        """The reward of each whole rollout."""
        return [score.total for score in self.scores]


@dataclass(frozen=True)
class Experience:
    """The tensors of an iteration's rollouts.

    `ids`, `attention_mask` [N, T] long; `response_mask` [N, T] bool; `rollout_logprobs` [N, T] at sampling; `old`: what
    the policy before the update makes of them; `reference_logprobs` [N, T], None without a KL penalty. `rewards`
    [N, T]: outcomes at last tokens, process rewards at step ends, the KL penalty where it is part of the reward, and
    implicit rewards where the estimator discounts them too. `implicit_rewards` [N, T]: those of every response token by
    a reward model that is trained along, unweighted, None without one.
    `values` [N, T]: the critic's value of the state a token is chosen in, None where there is no critic. `advantages`
    [N, T] are None until they are estimated; `returns` [N, T], the targets of a critic, stay None where there is no
    critic. `return_weights` [N, T]: how much each of them counts, 0 where nothing is learnt; None: all alike.
    """

    ids: torch.Tensor
    attention_mask: torch.Tensor
    response_mask: torch.Tensor
    rollout_logprobs: torch.Tensor
    old: OldLogprobs
    reference_logprobs: torch.Tensor | None = None
    rewards: torch.Tensor | None = None
    implicit_rewards: torch.Tensor | None = None
    values: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    return_weights: torch.Tensor | None = None

    @property
    def old_logprobs(self) -> torch.Tensor:
        """[N, T] by the policy before the update: a pass of all ranks where nobody has read them yet."""
        return self.old.logprobs

    @property
    def entropies(self) -> torch.Tensor:
        """[N, T] of the policy before the update, as `old_logprobs`."""
        return self.old.entropies


@dataclass(frozen=True)
class Estimate:
    """`advantages` [N, T]; `returns` [N, T], None where there is no critic to fit: None *is* "no critic".

    `metrics` are means over the iteration. `state_values`: for every rollout the values V_0 .. V_S of its states
    (V_S the terminal one, whose value is the rollout's reward), empty for estimators that value no states. `to_come`
    [N, T], where there is a critic: the rewards that came after each token, discounted as the estimator does.
    `return_weights` [N, T], at least 0: how much each return counts; None: all alike. `value_ends`: the step ends that
    `state_values` stand at, where they may be other ones than the trajectories'; empty: those.
    """

    advantages: torch.Tensor
    returns: torch.Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    state_values: list[list[float]] = field(default_factory=list)
    to_come: torch.Tensor | None = None
    return_weights: torch.Tensor | None = None
    value_ends: list[list[int]] = field(default_factory=list)
