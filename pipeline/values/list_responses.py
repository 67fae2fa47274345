"""SearchTree → Trajectory: every response that a search found, for stages that read trajectories.

Responses of a search are no samples of the policy: their share of right ones says nothing about it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from espalier.data.records import Trajectory
from espalier.pipeline.stage import StageContext
from espalier.values.tree_values import read_trees, response_nodes, tree_response


@dataclass(frozen=True)
class ListResponses:
    """The input is the trees of a search (`X.trees.jsonl`)."""

    def inputs(self) -> list[str]:
        """None beside the trees."""
        return []

    def run(self, input_path: str, context: StageContext) -> Iterable[Trajectory]:
        """Return the distinct responses, in the order of the trees. Raises BadInput without a tree."""
        trees = read_trees(input_path)
        rows = [tree_response(tree, node) for tree in trees for node in response_nodes(tree)]
        context.counts.update(trees=len(trees), right=sum(row.is_correct for row in rows))
        return rows
