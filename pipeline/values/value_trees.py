"""SearchTree → StepValues: the value after every step of every response of the trees of a search, for a process reward
model to learn and for step pairs to be ranked by.

Values come from the completions that the policy drew from a state, never from what a selection left over
(`values.tree_values`)."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from espalier.data.examples.label_balance import check_balance, inner_steps
from espalier.data.records import BadInput, StepValues
from espalier.pipeline.stage import StageContext
from espalier.values.labels import LabelRule
from espalier.values.tree_values import read_trees, tree_step_values


@dataclass(frozen=True)
class ValueTrees:
    """The input is the trees of a search (`X.trees.jsonl`)."""

    label: str = "soft"
    """soft: the value; hard: 1 above `threshold`, else 0; classes: one of `num_classes` (`values.labels`)"""
    threshold: float = 0.0
    """a value above it is good, for hard labels"""
    num_classes: int = 5
    """evenly spaced labels from 0 to 1"""
    min_completions: int = 1
    """labels only of states with at least so many completions; the last step's is the outcome"""

    def __post_init__(self) -> None:
        if self.min_completions < 1:
            raise BadInput(f"stage.min_completions must be at least 1, got {self.min_completions}")

    def inputs(self) -> list[str]:
        """None beside the trees."""
        return []

    def run(self, input_path: str, context: StageContext) -> Iterable[StepValues]:
        """Return one record per response, in the order of the trees. Raises BadInput where no state of any tree has
        completions, a setting is unknown, and where the labels would teach nothing."""
        rule = LabelRule(self.label, self.threshold, self.num_classes)
        trees = read_trees(input_path, needs_completions=True)
        records = [self._labelled(row, rule) for tree in trees for row in tree_step_values(tree)]
        labels, values = inner_steps(records)
        context.counts.update(trees=len(trees), responses=len(records), inner_steps=len(labels))
        context.counts["labelled_inner_steps"] = sum(label is not None for label in labels)
        check_balance(labels, values, str(context.output), "take another stage.threshold or stage.label=soft")
        return records

    def _labelled(self, row: StepValues, rule: LabelRule) -> StepValues:
        last = len(row.steps) - 1
        labels = [
            rule.label(label) if label is not None and (step == last or number >= self.min_completions) else None
            for step, (label, number) in enumerate(zip(row.labels, row.num_completions, strict=True))
        ]
        return replace(row, labels=labels, weights=[float(label is not None) for label in labels])
