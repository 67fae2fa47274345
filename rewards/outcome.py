"""The outcome reward: is the final answer right."""

from collections.abc import Sequence
from dataclasses import dataclass

from data.records import Trajectory
from rewards.score import Score


@dataclass(frozen=True)
class OutcomeReward:
    """`right` for a right answer that ended by itself, `wrong` for anything else: a response cut by its length is
    wrong, whatever it says (`Trajectory.is_correct`)."""

    right: float = 1.0
    wrong: float = 0.0

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """As they were graded when they were sampled."""
        values = [self.right if trajectory.is_correct else self.wrong for trajectory in trajectories]
        return [Score(value, parts={"outcome": value}) for value in values]
