"""What travels through one iteration: rollouts, groups of them, their tensors; and what an estimator is.

Shapes: N rollouts of an iteration in the order of their groups, T tokens of the longest (prompt and
response, padded on the right), G rollouts of a problem. A per-token tensor [N, T] says at [n, t] something
about token `ids[n, t]`, and is 0 where `response_mask` is false.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from data.records import Problem, Trajectory


@dataclass(frozen=True)
class Rollout:
    """A trajectory, the engine's log-probs of its response tokens, and the policy version that drew it.

    Version v is the policy after v iterations.
    """

    trajectory: Trajectory
    logprobs: list[float]
    policy_version: int


@dataclass(frozen=True)
class RolloutGroup:
    """The rollouts of one problem; `rewards` holds one number a rollout, none until they are scored."""

    problem: Problem
    rollouts: list[Rollout]
    rewards: list[float]


@dataclass(frozen=True)
class Experience:
    """The tensors of an iteration's rollouts.

    `ids`, `attention_mask` [N, T] long; `response_mask` [N, T] bool; `engine_logprobs` (at sampling),
    `old_logprobs` and `entropies` (by the trainer, before the update) [N, T]; `reference_logprobs` [N, T],
    None without a KL penalty. `advantages` [N, T] are None until they are estimated; `returns` [N, T], the
    targets of a critic, stay None where there is no critic.
    """

    ids: torch.Tensor
    attention_mask: torch.Tensor
    response_mask: torch.Tensor
    engine_logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    entropies: torch.Tensor
    reference_logprobs: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None


class AdvantageEstimator(Protocol):
    """Built from conf/advantage/."""

    def __call__(
        self, groups: Sequence[RolloutGroup], experience: Experience
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(advantages [N, T], returns [N, T]); returns None *is* "no critic"."""
