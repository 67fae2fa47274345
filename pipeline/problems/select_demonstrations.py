"""Trajectory → Demonstration: right solutions to imitate (RestEM, rejection sampling, distillation).

- **RestEM** (Singh et al. 2024, as in VinePPO): the first 10 right ones of a problem in sampled order, repeats kept:
  `max_per_problem: 10, distinct_by: none`.
- **Rejection sampling fine-tuning** (Yuan et al. 2023): one of each list of equations: `distinct_by: equations`.
- **Best of n**: the highest-scored by a reward model: `order: best`, with `scores`.
"""

import logging
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from espalier.data.jsonl import read_records
from espalier.data.records import BadInput, Demonstration, StepScores, Trajectory
from espalier.pipeline.pairs.step_numbers import Numbers, numbers_of_steps, step_numbers
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

    def run(self, input_path: str, context: StageContext) -> Iterable[Demonstration]:
        """Return demonstrations in the order of their ids, whatever the order of the rows."""
        rows = [row for row in read_records(Trajectory, input_path) if self.holds(row.problem_id)]
        groups: dict[str, list[Trajectory]] = {row.problem_id: [] for row in rows}
        for row in rows:
            if row.is_correct and len(row.steps) >= self.min_steps:
                groups[row.problem_id].append(row)
        scores = step_numbers(read_records(StepScores, self.scores)) if self.scores else {}
        chosen: list[Trajectory] = []
        num_repeated = 0
        for problem, group in groups.items():
            distinct = self._distinct(self._ordered(problem, group, scores))
            num_repeated += len(group) - len(distinct)
            chosen += capped(distinct, self.max_per_problem)
        chosen.sort(key=lambda row: (sample_order(row.problem_id), sample_order(row.id)))
        context.counts.update(
            trajectories=len(rows),
            right=sum(row.is_correct for row in rows),
            repeated=num_repeated,
            problems=len(groups),
            problems_covered=len({row.problem_id for row in chosen}),
            characters_mean=round(fmean([len(row.response) for row in chosen] or [0]), 1),
            steps_mean=round(fmean([len(row.steps) for row in chosen] or [0]), 2),
        )
        if not chosen:
            log.warning("no demonstration: no solution is right")
        return [Demonstration(row.id, row.prompt, row.response) for row in chosen]

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
