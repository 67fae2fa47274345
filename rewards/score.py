"""What a trajectory is worth, and what a reward is: records in, one record each out, in order.

A reward reads everything about a sample from the sample's own record (prompt, ids, text, gold, finish reason),
never from lists that run beside it, so that no cut into batches can grade one sample with another's text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from data.records import Trajectory


@dataclass(frozen=True)
class Score:
    """`outcome` belongs to the last token; `steps` are process rewards, one at the end of each step, or none.

    `parts` say what they are made of, unweighted, by name: for metrics alone.
    """

    outcome: float
    steps: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """The reward of the whole trajectory."""
        return self.outcome + sum(self.steps)


class Reward(Protocol):
    """Built from conf/reward/."""

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score a trajectory, in order."""


@runtime_checkable
class HoldsModels(Protocol):
    """A reward with networks of its own."""

    def to(self, device: torch.device) -> None:
        """Move them."""

    def networks(self) -> dict[str, Any]:
        """Name → network; each must have the policy's tokenizer: it is given the policy's ids."""
