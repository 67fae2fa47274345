"""Process rewards: predict, at every step end, the value of the state the step leads to.

One forward pass a trajectory, read at all its step ends; examples made with `one_example_per: prefix` are read at
their last token instead, a pass a step, with the same loss. Soft labels or K + 1 classes by the model's number of
labels, hard labels by `hard_above`: formulas in `training.objectives.scalar_targets`. A step that nobody judged has
no read. Classes are balanced by the weights of the examples (`balanced_classes` there).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from espalier.data.batches.batch import Batch
from espalier.data.batches.collate import collate_steps
from espalier.data.batches.packing import Layout
from espalier.data.examples.token_examples import StepExample
from espalier.training.objectives.scalar_targets import ScalarRewardObjective


@dataclass
class ProcessRewardObjective(ScalarRewardObjective):
    """One read a step, at its end."""

    def collate(self, examples: Sequence[StepExample], layout: Layout) -> Batch:
        """Return one row an example, one read a step."""
        return collate_steps(examples, layout)
