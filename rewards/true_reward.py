"""The true reward of a task that knows one (`data.tasks.scored.ScoredTask`): to train by, or with weight 0 beside a
reward model to watch what its policy really gains."""

from collections.abc import Sequence
from typing import Any

from espalier.data.records import BadInput, Trajectory
from espalier.data.tasks.scored import ScoredTask
from espalier.rewards.score import Score


class TrueReward:
    """`task`: the run's. Raises BadInput on one that knows no true reward."""

    def __init__(self, task: Any):
        if not isinstance(task, ScoredTask):
            raise BadInput("the task knows no true reward: set task=shopping_notes, or choose another reward")
        self.task = task

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Return one score a trajectory, from the texts of its prompt and its response."""
        values = [self.task.true_reward(row.prompt, row.response) for row in trajectories]
        return [Score(value, parts={"true": value}) for value in values]
