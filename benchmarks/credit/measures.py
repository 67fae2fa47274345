"""How far estimated advantages are from exact ones: pure functions on lists.

A *decision* is what a step does: the position it leaves and the one it leads to, of one problem. Its advantage is
estimated once per rollout that takes it, so that its estimates have a mean, whose distance from the exact advantage is
the bias, and a variance. Estimates of one draw are not independent of one another (rollouts that pass through a state
share its completions, a group its mean), those of different draws are.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

# Decisions that matter less than this do not count as right or wrong.
MARGIN = 0.05


@dataclass(frozen=True)
class StepCredit:
    """One step of one rollout: which decision it is, its exact and its estimated advantage, and the number of the draw
    that the rollout is of."""

    decision: Hashable
    exact: float
    estimate: float
    draw: int = 0


def bias_and_variance(steps: Sequence[StepCredit]) -> tuple[float, float]:
    """Return (root mean squared bias, mean variance) of the estimates of a decision, over decisions that were taken in
    at least two draws, each weighted by how often it was.

    A decision's squared bias is the mean product of two draws' mean errors, which noise leaves as it is because draws
    are independent; the variance is what is left of the mean squared error. What falls below 0 over all is 0.
    (nan, nan) where no decision was taken in two draws.
    """
    decisions: dict[Hashable, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for step in steps:
        decisions[step.decision][step.draw].append(step.estimate - step.exact)
    bias = error = total = 0.0
    for draws in decisions.values():
        if len(draws) < 2:
            continue
        errors = [gap for gaps in draws.values() for gap in gaps]
        bias += len(errors) * fmean(one * other for one, other in combinations(map(fmean, draws.values()), 2))
        error += sum(gap**2 for gap in errors)
        total += len(errors)
    if not total:
        return math.nan, math.nan
    return math.sqrt(max(0.0, bias / total)), max(0.0, error - bias) / total


def sign_error(steps: Sequence[StepCredit], margin: float = MARGIN) -> tuple[float, int]:
    """Return (share of steps whose estimate has the wrong sign, steps), of those whose exact advantage is beyond the
    margin; an estimate of 0 counts one half."""
    points = []
    for step in steps:
        if abs(step.exact) > margin:
            agreement = step.estimate * step.exact
            points.append(0.0 if agreement > 0 else 0.5 if agreement == 0 else 1.0)
    return (fmean(points) if points else math.nan), len(points)


def ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of every value from 1 on; equal ones share the mean of theirs."""
    order = sorted(range(len(values)), key=lambda number: values[number])
    found = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for place in range(start, end + 1):
            found[order[place]] = (start + end) / 2 + 1
        start = end + 1
    return found


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's correlation; 0 where either is constant."""
    first, second = ranks(one), ranks(other)
    mean = (len(first) + 1) / 2
    products = sum((a - mean) * (b - mean) for a, b in zip(first, second, strict=True))
    size = math.sqrt(sum((a - mean) ** 2 for a in first) * sum((b - mean) ** 2 for b in second))
    return products / size if size else 0.0


def step_estimates(advantages: Sequence[float], step_ends: Sequence[int]) -> list[float]:
    """Return the estimate of every step: the mean over its tokens that are credited (SPO credits some alone), 0 where
    none is."""
    found = []
    for start, end in zip([0, *step_ends], step_ends, strict=False):
        credited = [value for value in advantages[start:end] if value != 0]
        found.append(fmean(credited) if credited else 0.0)
    return found
