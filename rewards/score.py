"""What a trajectory is worth, and what a reward is: records in, one record each out, in order.

A reward reads everything about a sample from the sample's own record (prompt, ids, text, gold, finish reason),
never from lists that run beside it, so that no cut into batches can grade one sample with another's text.
"""

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from espalier.data.records import BadInput, Problem, Trajectory

VERIFIER = "verifier"
"""The part of a score that says how probably a solution is right, by a model that judges it: it is held against the
grader (`rl.rank_watch`)."""

PROCESS = "process"
"""The part that is the mean of a process reward model's scores of the steps, held against it too."""


@dataclass(frozen=True)
class Score:
    """`outcome` belongs to the last token; `steps` are process rewards, one at the end of each step, or none.

    `parts` say what they are made of, unweighted, by name: for metrics alone. `answers`: answer → the probability that
    the score took from the response for it; kept with the samples (`rl.samples`).
    """

    outcome: float
    steps: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    answers: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """The reward of the whole trajectory."""
        return self.outcome + sum(self.steps)


Interval = tuple[float, float]
ANYTHING: Interval = (-math.inf, math.inf)


@dataclass(frozen=True)
class ScoreRange:
    """What a reward's scores can be, by its settings alone: (lowest, highest), infinite where nothing bounds them.

    `outcome` is that of a score's outcome. `to_come` is that of the sum of its process rewards from any step on; None
    where the reward gives none.
    """

    outcome: Interval = (0.0, 0.0)
    to_come: Interval | None = None

    @property
    def total(self) -> Interval:
        """Of all rewards to come at any token, in the words of `Score.total`."""
        low, high = self.to_come or (0.0, 0.0)
        return self.outcome[0] + low, self.outcome[1] + high


def hull(*intervals: Interval) -> Interval:
    """Return the smallest interval that holds all."""
    return min(low for low, _ in intervals), max(high for _, high in intervals)


def clipped(interval: Interval, limit: float) -> Interval:
    """Of numbers that are clipped to at most `limit` away from 0, where `limit` is above 0."""
    low, high = (min(max(value, -limit), limit) if limit > 0 else value for value in interval)
    return low, high


@runtime_checkable
class StatesRange(Protocol):
    """A class of rewards that knows its range without a model or a response."""

    @classmethod
    def score_range(cls, settings: Mapping[str, Any]) -> ScoreRange | None:
        """`settings`: all its keyword arguments, in place of a reward its range; None: it cannot be known."""


class Reward(Protocol):
    """Built from conf/reward/. One with networks of its own is called on every rank with that rank's share of the
    rollouts (rl/rank_scores.py): it keeps nothing from call to call, and compares no trajectory with another."""

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Return one score a trajectory, in order."""


ASKED = threading.Lock()
"""A reward is asked by one thread at a time: batches that are drawn ahead are scored beside the training."""


def scores_of(trajectories: Sequence[Trajectory], reward: Reward) -> list[Score]:
    """Return the reward's scores, once no other thread asks it. Raises BadInput as `one_for_each`."""
    with ASKED:
        return one_for_each(reward, trajectories)


def one_for_each(reward: Reward, trajectories: Sequence[Trajectory]) -> list[Score]:
    """Return the reward's scores. Raises BadInput where it does not give a list of one `Score` for each trajectory."""
    scores = reward(trajectories)
    odd = [one for one in scores if not isinstance(one, Score)] if isinstance(scores, list | tuple) else [scores]
    if odd or len(scores) != len(trajectories):
        got = repr(odd[0])[:60] if odd else f"{len(scores)} for {len(trajectories)}"
        raise BadInput(f"{type(reward).__name__} must return a list of one espalier.rewards.score.Score(outcome, "
                       f"steps) for each trajectory, got {got}")  # fmt: skip
    return scores


@runtime_checkable
class HoldsModels(Protocol):
    """A reward with networks of its own."""

    def to(self, device: torch.device) -> None:
        """Move them."""

    def networks(self) -> dict[str, Any]:
        """Name → network; each must have the policy's tokenizer: it is given the policy's ids."""


@runtime_checkable
class ReadsTexts(Protocol):
    """A reward that may have networks of this process beside those that it names: they are given texts."""

    @property
    def has_readers(self) -> bool:
        """Whether it has."""


@runtime_checkable
class ChecksProblems(Protocol):
    """A reward that not every problem suits."""

    def check_problems(self, problems: Sequence[Problem]) -> None:
        """Raise BadInput on one that it could give no score, before anything is drawn."""


@runtime_checkable
class HoldsEngines(Protocol):
    """A reward that may have engines of its own, or ask a server. One that may also do without says by an attribute
    `has_engines` whether it has them."""

    def close(self) -> None:
        """End them."""


def asks_engines(part: object) -> bool:
    """Say whether a reward, or a part of one, asks engines or a server: one process alone asks it then."""
    return isinstance(part, HoldsEngines) and bool(getattr(part, "has_engines", True))
