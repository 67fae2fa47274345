"""The outcome reward: is the final answer right."""

from dataclasses import dataclass

from data.tasks.task import Task


@dataclass(frozen=True)
class OutcomeReward:
    """`right` for a right answer that ended by itself, `wrong` for anything else."""

    right: float = 1.0
    wrong: float = 0.0

    def score(self, task: Task, gold: str, response: str, finish_reason: str) -> float:
        """The reward of one response; one cut by its length is wrong."""
        is_right = finish_reason == "stop" and task.grade(gold, response).is_correct
        return self.right if is_right else self.wrong
