"""Task → Demonstration: the solutions a policy is first taught."""

from collections.abc import Iterable
from dataclasses import dataclass

from data.records import BadInput, Demonstration
from pipeline.stage import StageContext


@dataclass(frozen=True)
class MakeDemonstrations:
    """The demonstrations of one split of the task."""

    split: str = "train"

    def inputs(self) -> list[str]:
        """None: the task makes or reads them."""
        return []

    def run(self, input_path: str, context: StageContext) -> Iterable[Demonstration]:
        """Demonstrations in order."""
        if context.task is None:
            raise BadInput("make_demonstrations needs a task: add task=NAME")
        demonstrations: list[Demonstration] = context.task.demonstrations(self.split)
        return demonstrations
