"""A learning curve, and what is read off it: accuracy at a cost, mean accuracy up to a cost, the cost of an accuracy.

A cost is generated tokens, seconds of iterations on one core, or updates. Between two evaluations a curve is a straight
line. What a method spends before its first update (a process reward model's samples and training) counts: until then
its accuracy is that of the start. Nothing is read beyond the last evaluation. Pure functions.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

COSTS = ("tokens", "seconds", "updates")


@dataclass(frozen=True)
class Point:
    """One evaluation: accuracy, and what the run had cost by then."""

    updates: float
    tokens: float
    seconds: float
    accuracy: float


def points_of(
    rows: Sequence[Mapping[str, float]], tokens_before: float = 0.0, seconds_before: float = 0.0
) -> list[Point]:
    """Return the evaluations in the rows of a metrics.jsonl, with tokens and seconds of all iterations before each, on
    top of what was spent before the first."""
    tokens, seconds, found = tokens_before, seconds_before, []
    for row in rows:
        tokens += row.get("sampling/tokens", 0.0)
        seconds += row.get("seconds/iteration", 0.0)
        if "eval/accuracy" in row:
            found.append(Point(row["step"], tokens, round(seconds, 2), row["eval/accuracy"]))
    return found


def line_of(points: Sequence[Point], cost: str) -> list[tuple[float, float]]:
    """Return (cost, accuracy) along the curve, from cost 0: what was spent before the first update taught nothing."""
    line = [(float(getattr(point, cost)), point.accuracy) for point in points]
    return line if line[0][0] == 0 else [(0.0, line[0][1]), *line]


def reach(points: Sequence[Point], cost: str) -> float:
    """Return the cost at the last evaluation."""
    return float(getattr(points[-1], cost))


def accuracy_at(points: Sequence[Point], cost: str, at: float) -> float | None:
    """Return the accuracy at a cost; None beyond the last evaluation."""
    line = line_of(points, cost)
    for (x0, y0), (x1, y1) in pairwise(line):
        if at <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    return line[0][1] if at <= line[0][0] else None


def mean_accuracy(points: Sequence[Point], cost: str, up_to: float) -> float | None:
    """Return the area under the curve from 0 to a cost, divided by that cost; None where the curve ends before it."""
    last = accuracy_at(points, cost, up_to)
    if last is None or up_to <= 0:
        return None
    line = [*(point for point in line_of(points, cost) if point[0] < up_to), (up_to, last)]
    area = sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in pairwise(line))
    return area / up_to


def cost_of(points: Sequence[Point], cost: str, accuracy: float) -> float | None:
    """Return the cost at which the curve first has this accuracy; None where it does not in as long as it was run."""
    line = line_of(points, cost)
    if line[0][1] >= accuracy:
        return 0.0
    for (x0, y0), (x1, y1) in pairwise(line):
        if y1 >= accuracy:
            return x0 + (x1 - x0) * (accuracy - y0) / (y1 - y0)
    return None


@dataclass(frozen=True)
class TargetCost:
    """Of a target accuracy over the runs of a method, where one that did not get there costs more than any that did:
    the median, the lowest and the highest; None where it is not known for that."""

    middle: float | None
    low: float | None
    high: float | None


def target_cost(costs: Sequence[float | None]) -> TargetCost:
    """Return the cost over seeds (None: did not get there)."""
    known = [math.inf if cost is None else cost for cost in costs]
    found = (median(known), min(known), max(known))
    return TargetCost(*(None if math.isinf(cost) else cost for cost in found))
