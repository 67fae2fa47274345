"""What a task offers beside `Task` where the truth about every line of a solution is known.

Then the value of a state can be computed instead of sampled (values/exact/), and a score of steps can be held against
the truth instead of against completions.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from espalier.data.records import BadInput, Problem
from espalier.data.tasks.task import Task


@dataclass(frozen=True)
class Position:
    """Where a solution stands after some of its lines.

    Two prefixes of one problem with equal `key` have, by the task's rules, the same ways to go on and the same ways to
    succeed, however their lines are spelled.
    """

    key: tuple[Hashable, ...]
    is_right: bool
    """Whether whoever goes on without an error from here succeeds. True of the empty prefix; an error makes it false,
    a line that repairs the error makes it true again."""
    is_finished: bool = False
    """Whether the last line gave the final answer: then `is_right` is success."""


class EnumerableTask(Task, Protocol):
    """A task whose solutions are lines of a known grammar."""

    def position(self, problem: Problem, steps: Sequence[str]) -> Position | None:
        """Return where a solution stands after these whole steps; None where a step is outside the grammar."""


def positions(task: EnumerableTask, problem: Problem, steps: Sequence[str], name: str) -> list[Position | None]:
    """Return where the solution `name` stands after each of its steps.

    Raises BadInput where they are not those that the task cuts its text into: a step that ends within a line, or holds
    two, is outside the grammar and would look wrong.
    """
    own = task.split_steps("".join(steps))
    if _written(own) != _written(steps):
        raise BadInput(f"'{name}' is not cut into steps as the task cuts it, and only of its own steps the task knows "
                       "which are right: name the trajectories as sampled, before values/split_steps")  # fmt: skip
    return [task.position(problem, steps[:number]) for number in range(1, len(steps) + 1)]


def _written(steps: Sequence[str]) -> list[str]:
    """Return them without the white space between, which a token may hold with either side."""
    return [step.strip() for step in steps if step.strip()]
