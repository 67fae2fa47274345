"""Trajectory → PreferencePair by the task's true reward, with the noise of a judge: labels of the Bradley-Terry model.

Of every problem's distinct trajectories pairs are drawn without replacement. A comparison of y and y' prefers y with
probability sigmoid(beta * (R(y) - R(y'))) (Bradley and Terry 1952), R the true reward of a `data.tasks.scored` task;
`beta` null knows no noise: the better one is always preferred, and pairs of equal reward are left out. The scores of a
pair are the true rewards: the side that the label calls rejected can have the higher one.

The first n pairs of a larger file are those that `num_pairs` n would give: problems take turns in a seeded order, so
that sizes of data can be compared on nested sets.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, zip_longest

from espalier.data.records import BadInput, PreferencePair, Trajectory
from espalier.data.row_index import ProblemRows
from espalier.data.tasks.scored import ScoredTask
from espalier.pipeline.pairs.pair_statistics import pair_statistics
from espalier.pipeline.pairs.process_pairs import Scored, make_pair
from espalier.pipeline.pairs.trajectory_groups import GroupCounts, ProblemPart, check_counts, iter_groups
from espalier.pipeline.stage import StageContext


def preference(gap: float, beta: float) -> float:
    """Return sigmoid(beta * gap), the probability that the side which is better by `gap` is preferred."""
    x = beta * gap
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def compare(one: Scored, other: Scored, beta: float | None, rng: random.Random) -> PreferencePair | None:
    """Return the pair as a judge labels it; None where no noise decides between equal rewards."""
    gap = one[1] - other[1]
    if beta is None and gap == 0:
        return None
    prefers_one = gap > 0 if beta is None else rng.random() < preference(gap, beta)
    return make_pair("comparison", one, other) if prefers_one else make_pair("comparison", other, one)


@dataclass(frozen=True, kw_only=True)
class DrawComparisons(ProblemPart):
    """Up to `pairs_per_problem` comparisons of a problem and `num_pairs` in all (0: no cap); with cut responses."""

    beta: float | None = 4.0
    pairs_per_problem: int = 1
    num_pairs: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        self.check_part()
        check_counts(pairs_per_problem=self.pairs_per_problem, num_pairs=self.num_pairs)
        if self.beta is not None and not 0 <= self.beta < math.inf:
            raise BadInput(f"stage.beta must be null (no noise) or at least 0, got {self.beta}")

    def inputs(self) -> list[str]:
        """None beside the trajectories."""
        return []

    def run(self, input_path: str, context: StageContext) -> list[PreferencePair]:
        """Return the pairs. Raises BadInput without a task that knows the true reward, and where fewer than
        `num_pairs` can be drawn."""
        task = context.task
        if not isinstance(task, ScoredTask):
            raise BadInput("comparisons are drawn by a task's true reward: set task=shopping_notes")
        counts = GroupCounts()
        with ProblemRows(context.output) as rows:
            rows.add(Trajectory, input_path)
            groups = iter_groups(rows, self, counts, keeps_cut=True)
            orders = [list(self._pairs(name, group, task)) for _, name, group in groups]
        random.Random(f"{self.seed}/problems").shuffle(orders)
        pairs = [pair for turn in zip_longest(*orders) for pair in turn if pair is not None]
        if len(pairs) < self.num_pairs:
            raise BadInput(f"{input_path}: {len(pairs)} comparisons can be drawn, {self.num_pairs} are asked for: "
                           "sample more problems, or raise stage.pairs_per_problem")  # fmt: skip
        kept = pairs[: self.num_pairs] if self.num_pairs else pairs
        context.counts.update(+counts.by_reason)
        context.counts["in_true_order"] = sum(pair.chosen_score > pair.rejected_score for pair in kept)
        context.counts["of_equal_reward"] = sum(pair.chosen_score == pair.rejected_score for pair in kept)
        context.counts.update(pair_statistics(kept))
        return kept

    def _pairs(self, problem: str, group: Sequence[Trajectory], task: ScoredTask) -> Iterator[PreferencePair]:
        """Draw a problem's comparisons."""
        rng = random.Random(f"{self.seed}/{problem}")
        scored: list[Scored] = [(row, task.true_reward(row.prompt, row.response)) for row in group]
        found = list(combinations(scored, 2))
        rng.shuffle(found)
        shown = (rng.sample(both, 2) for both in found)
        made = (compare(one, other, self.beta, rng) for one, other in shown)
        pairs = [pair for pair in made if pair is not None]
        yield from pairs[: self.pairs_per_problem] if self.pairs_per_problem else pairs
