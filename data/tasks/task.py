"""What every task offers. A task is a class of this folder; its YAML in conf/task/ is its registration."""

from typing import Protocol, runtime_checkable

from espalier.data.answers.grade import Gold, Grade
from espalier.data.records import Demonstration, Problem


class Task(Protocol):
    """Problems by split ("train", "dev", "test"), how to ask them, where steps end, what is right."""

    name: str

    def problems(self, split: str) -> list[Problem]:
        """Return the problems of a split, always the same ones in the same order."""

    def demonstrations(self, split: str) -> list[Demonstration]:
        """Return solutions to imitate, one or more a problem."""

    def prompt(self, problem: Problem) -> str:
        """Return the text the model continues."""

    def split_steps(self, response: str) -> list[str]:
        """Return steps that join to the response exactly."""

    def grade(self, gold: Gold, response: str, num_options: int = 0) -> Grade:
        """Compare the response's final answer with the gold answer; `num_options` counts for choices only."""


@runtime_checkable
class ReadsProblems(Protocol):
    """A task whose problems stand in files or on the hub; other tasks make them of their settings."""

    def files_of(self, split: str) -> list[str]:
        """Return the files and folders here that the problems of a split are read from."""
