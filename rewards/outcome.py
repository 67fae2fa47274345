"""The outcome reward: is the final answer right."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from espalier.data.records import Trajectory
from espalier.rewards.score import Score, ScoreRange, hull


@dataclass(frozen=True)
class OutcomeReward:
    """`right` for a right answer that ended by itself, `wrong` for anything else: a response cut by its length is
    wrong, whatever it says (`Trajectory.is_correct`)."""

    right: float = 1.0
    wrong: float = 0.0

    @classmethod
    def score_range(cls, settings: Mapping[str, Any]) -> ScoreRange:
        """Return either of the two."""
        return ScoreRange(hull(*((settings[name],) * 2 for name in ("right", "wrong"))))

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """As they were graded when they were sampled."""
        values = [self.right if trajectory.is_correct else self.wrong for trajectory in trajectories]
        return [Score(value, parts={"outcome": value}) for value in values]
