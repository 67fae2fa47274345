"""The tree of one problem → one HTML page: what was searched, pruned and chosen, and where the right answer was lost.

python run_stage.py -cn pages/inspect_tree input=search.trees.jsonl stage.problem=wa-test-3 output=tree.html
"""

from dataclasses import dataclass

from espalier.analysis.embedded import Cap
from espalier.analysis.tree_page import render_tree
from espalier.data.records import BadInput
from espalier.pipeline.stage import StageContext
from espalier.values.tree_values import read_trees


@dataclass(frozen=True)
class InspectTree:
    """`problem`: whose tree is shown ("": the first of the file). Texts are cut after `max_characters` (0: never)."""

    problem: str = ""
    max_characters: int = 2000

    def __post_init__(self) -> None:
        if self.max_characters < 0:
            raise BadInput(f"stage.max_characters must be 0 or more, got {self.max_characters}")

    def inputs(self) -> list[str]:
        """None beside the trees."""
        return []

    def run(self, input_path: str, context: StageContext) -> str:
        """Return the page. Raises BadInput where the file holds no tree of the problem."""
        trees = {tree.problem_id: tree for tree in read_trees(input_path)}
        problem = self.problem or next(iter(trees))
        if problem not in trees:
            raise BadInput(f"{input_path}: no tree of problem '{problem}' among {len(trees)}, as '{next(iter(trees))}'")
        context.counts["nodes"] = len(trees[problem].parents)
        return render_tree(trees[problem], Cap(0, 0, self.max_characters, 0.0))
