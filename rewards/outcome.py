"""The outcome reward: is the final answer right."""

from dataclasses import dataclass

from data.answers.grade import Gold
from data.tasks.task import Task


@dataclass(frozen=True)
class OutcomeReward:
    """`right` for a right answer that ended by itself, `wrong` for anything else."""

    right: float = 1.0
    wrong: float = 0.0

    def score(self, task: Task, gold: Gold, response: str, finish_reason: str, num_options: int = 0) -> float:
        """The reward of one response; one cut by its length is wrong."""
        is_right = finish_reason == "stop" and task.grade(gold, response, num_options).is_correct
        return self.right if is_right else self.wrong
