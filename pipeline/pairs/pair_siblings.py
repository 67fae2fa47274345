"""SearchTree → PreferencePair: two next steps drawn from one state of a tree, for step-DPO.

A step is worth the share of right ones among the completions that the policy drew from the state behind it, and the
last step of a response what it ended in (`values.tree_values`). Steps behind which nothing was drawn make no pair,
whatever the search scored them. A pruned step with completions makes pairs as any other. An end that is the end token
alone is no step, and a response that was cut has no last one.
"""

import math
from dataclasses import dataclass

from espalier.data.records import PreferencePair
from espalier.data.search_tree import SearchTree
from espalier.pipeline.pairs.pair_statistics import pair_statistics
from espalier.pipeline.pairs.state_pairs import CHOSEN, WHICH, step_pairs
from espalier.pipeline.pairs.trajectory_groups import ProblemPart, check_choice, check_counts
from espalier.pipeline.stage import StageContext
from espalier.values.tree_values import completion_counts, read_trees, response_nodes, tree_response, way_of_steps


@dataclass(frozen=True, kw_only=True)
class SiblingPreferences(ProblemPart):
    """`which`: best_over_worst or all siblings that differ by more than `margin`; `chosen`: step, or solution: the
    better step and all that follows it in a right response. Steps with fewer than `min_completions` take no part. At
    most `max_pairs` per problem (0: no cap), those of the widest gaps."""

    margin: float = 0.5
    which: str = "best_over_worst"
    chosen: str = "step"
    min_completions: int = 4
    max_pairs: int = 0

    def __post_init__(self) -> None:
        self.check_part()
        check_choice("which", self.which, WHICH)
        check_choice("chosen", self.chosen, CHOSEN)
        check_counts(max_pairs=self.max_pairs, min_completions=self.min_completions)

    def inputs(self) -> list[str]:
        """None beside the trees."""
        return []

    def run(self, input_path: str, context: StageContext) -> list[PreferencePair]:
        """Return pairs in the order of the trees. Raises BadInput where no state of any tree has completions."""
        trees = [tree for tree in read_trees(input_path, needs_completions=True) if self.holds(tree)]
        pairs = [pair for tree in trees for pair in self._pairs(tree)]
        context.counts.update(trees=len(trees), **pair_statistics(pairs))
        return pairs

    def _pairs(self, tree: SearchTree) -> list[PreferencePair]:
        counts = completion_counts(tree)
        least = max(1, self.min_completions)
        group, values = [], {}
        for node in response_nodes(tree):
            row = tree_response(tree, node)
            inner = [counts[one] for one in way_of_steps(tree, node)[0][:-1]]
            known = [count.value if count.num_completions >= least else math.nan for count in inner]
            is_step = bool(tree.steps[node]) and row.finish_reason == "stop"
            values[row.id] = [*known, float(row.is_correct) if is_step else math.nan]
            group.append(row)
        return step_pairs(group, values, self.margin, self.which, self.max_pairs, self.chosen)
