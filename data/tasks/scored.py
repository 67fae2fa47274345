"""What a task offers beside `Task` where every response has a known reward, and not only a right or wrong answer.

Then preferences can be drawn from the truth, and what a policy gains by a reward model can be held against it.
"""

from typing import Protocol, runtime_checkable

from espalier.data.tasks.task import Task


@runtime_checkable
class ScoredTask(Task, Protocol):
    """A task whose true reward of a response is a function of the two texts."""

    def true_reward(self, prompt: str, response: str) -> float:
        """Return how good a response to a prompt is. Raises BadInput on a prompt that is not the task's."""
