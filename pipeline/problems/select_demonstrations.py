"""Trajectory → Demonstration: right solutions to imitate (RestEM, rejection sampling, distillation).

- **RestEM** (Singh et al. 2024, as in VinePPO): the first 10 right ones of a problem in sampled order, repeats kept:
  `max_per_problem: 10, distinct_by: none`.
- **Rejection sampling fine-tuning** (Yuan et al. 2023): one of each list of equations: `distinct_by: equations`.
- **Best of n**: the highest-scored by a reward model: `order: best`, with `scores`.

One problem's are in memory at a time (`data.row_index`).
"""

import logging
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from espalier.data.records import BadInput, Demonstration, StepScores, Trajectory
from espalier.data.row_index import ProblemRows
from espalier.pipeline.pairs.step_numbers import Numbers, StepNumbers, numbers_of_steps
from espalier.pipeline.pairs.trajectory_groups import ProblemPart, capped, check_choice, check_counts, sample_order
from espalier.pipeline.stage import StageContext
from espalier.rewards.aggregate import aggregate, check_aggregate

log = logging.getLogger("stage")

ORDERS = ("sampled", "best", "drawn")
DISTINCT = ("text", "equations", "none")

_OF_AN_EXPRESSION = "-+*/().,%$ 0123456789"
_RESULT = re.compile(r" *\$? *-?[0-9][0-9,.]*")


def equations(response: str) -> tuple[str, ...]:
    """Return the calculations of a response in their order, without white space, `$`, `%` and thousands: `48/2=24`."""
    parts = response.split("=")
    written = []
    for before, after in pairwise(parts):
        left = before[len(before.rstrip(_OF_AN_EXPRESSION)) :]
        right = _RESULT.match(after)
        if right and left.rstrip()[-1:] in tuple("0123456789)%"):
            written.append(re.sub(r"[\s,$%]", "", f"{left}={right[0]}").strip("."))
    return tuple(written)


@dataclass(frozen=True, kw_only=True)
class SelectDemonstrations(ProblemPart):
    """At most `max_per_problem` right solutions per problem, 0 for no cap: first `sampled`, `best` by `scores`
    (StepScores) made one by `how`, or `drawn` by the seed.

    `distinct_by` takes solutions of the same `text`, or of the same `equations` (those without any: the same text),
    once: the one that the order puts first. Those of fewer than `min_steps` steps take no part.
    """

    max_per_problem: int = 0
    order: str = "sampled"
    distinct_by: str = "text"
    scores: str = ""
    how: str = "product"
    min_steps: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        self.check_part()
        check_choice("order", self.order, ORDERS)
        check_choice("distinct_by", self.distinct_by, DISTINCT)
        check_counts(max_per_problem=self.max_per_problem, min_steps=self.min_steps)
        check_aggregate(self.how)
        if (self.order == "best") != bool(self.scores):
            raise BadInput("stage.order=best needs stage.scores, and no other order reads them")

    def inputs(self) -> list[str]:
        """Return the step scores, if solutions are ranked."""
        return [self.scores] if self.scores else []

    def run(self, input_path: str, context: StageContext) -> Iterator[Demonstration]:
        """Yield demonstrations in the order of their ids, whatever the order of the rows."""
        totals: Counter[str] = Counter(
            trajectories=0, right=0, repeated=0, problems=0, problems_covered=0, characters=0, steps=0, chosen=0
        )
        with ProblemRows(context.output) as rows:
            rows.add(Trajectory, input_path)
            numbers = StepNumbers(rows, StepScores, self.scores) if self.scores else None
            for problem in rows.problems_by_id(sample_order):
                group = rows.rows(0, problem)
                if not group or not self.holds(group[0]):
                    continue
                chosen = self._chosen(group, numbers.of(problem) if numbers else {}, totals)
                yield from (Demonstration(row.id, row.prompt, row.response) for row in chosen)
        num_chosen = totals.pop("chosen")
        characters, steps = totals.pop("characters"), totals.pop("steps")
        context.counts.update(
            totals,
            characters_mean=round(characters / max(num_chosen, 1), 1),
            steps_mean=round(steps / max(num_chosen, 1), 2),
        )
        if not num_chosen:
            log.warning("no demonstration: no solution is right")

    def _chosen(self, group: Sequence[Trajectory], scores: Numbers, totals: Counter[str]) -> list[Trajectory]:
        """Return a problem's solutions to imitate, in the order of their ids; `totals` gets what was seen of it."""
        long = [row for row in group if row.is_correct and len(row.steps) >= self.min_steps]
        distinct = self._distinct(self._ordered(group[0].problem_id, long, scores))
        chosen = sorted(capped(distinct, self.max_per_problem), key=lambda row: sample_order(row.id))
        totals.update(
            trajectories=len(group),
            right=sum(row.is_correct for row in group),
            repeated=len(long) - len(distinct),
            problems=1,
            problems_covered=bool(chosen),
            characters=sum(len(row.response) for row in chosen),
            steps=sum(len(row.steps) for row in chosen),
            chosen=len(chosen),
        )
        return chosen

    def _ordered(self, problem: str, group: list[Trajectory], scores: Numbers) -> list[Trajectory]:
        group = sorted(group, key=lambda row: sample_order(row.id))
        if self.order == "best":
            values = {row.id: aggregate(numbers_of_steps(row, scores, self.scores), self.how) for row in group}
            group.sort(key=lambda row: -values[row.id])
        elif self.order == "drawn":
            random.Random(f"{self.seed}/{problem}").shuffle(group)
        return group

    def _distinct(self, group: Sequence[Trajectory]) -> list[Trajectory]:
        if self.distinct_by == "none":
            return list(group)
        distinct: dict[Any, Trajectory] = {}
        for row in group:
            key: Any = row.response
            if self.distinct_by == "equations":
                key = equations(row.response) or row.response
            distinct.setdefault(key, row)
        return list(distinct.values())
