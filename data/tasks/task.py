"""What every task offers. A task is a class of this folder; its YAML in conf/task/ is its registration."""

from dataclasses import dataclass
from typing import Protocol

from data.records import Demonstration, Problem


@dataclass(frozen=True)
class Grade:
    """`answer` is what was extracted from the response, None where nothing could be (unparseable)."""

    answer: str | None
    is_correct: bool


class Task(Protocol):
    """Problems by split ("train", "dev", "test"), how to ask them, where steps end, what is right."""

    name: str

    def problems(self, split: str) -> list[Problem]:
        """The problems of a split, always the same ones in the same order."""

    def demonstrations(self, split: str) -> list[Demonstration]:
        """Solutions to imitate, one or more a problem."""

    def prompt(self, problem: Problem) -> str:
        """The text the model continues."""

    def split_steps(self, response: str) -> list[str]:
        """Steps that join to the response exactly."""

    def grade(self, gold: str, response: str) -> Grade:
        """Compare the response's final answer with the gold answer."""
