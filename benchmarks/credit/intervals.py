"""Intervals and tests over seeds: Student's t on differences taken seed by seed (the sign test where they are all the
same), Holm's correction. Pure functions.

The distribution of t with a whole number of degrees of freedom is a finite sum (Abramowitz & Stegun 1964, 26.7.3 and
26.7.4), so no table and no library is needed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

SMALLEST = 3
"""Seeds below which there is no interval and no test."""
ROUNDING = 1e-9
"""Of their size: differences that agree to that are equal, and what is left is the last bits of what they are of."""


@dataclass(frozen=True)
class Mean:
    """A mean over seeds with its 95 % interval; `low`, `high` and `p` (two-sided, of a mean of 0) are None where there
    are fewer than `SMALLEST` seeds, `low` and `high` also where all seeds agree."""

    value: float
    low: float | None
    high: float | None
    p: float | None
    n: int


def t_within(t: float, degrees: int) -> float:
    """Return P(-t <= T <= t) of Student's t with `degrees` degrees of freedom, t >= 0. Raises ValueError below 1."""
    if degrees < 1:
        raise ValueError(f"Student's t needs at least 1 degree of freedom, got {degrees}")
    angle = math.atan(t / math.sqrt(degrees))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    if degrees == 1:
        return 2 * angle / math.pi
    term, total = (math.cos(angle), 0.0) if degrees % 2 else (1.0, 0.0)
    for below in range(2 + degrees % 2, degrees + 1, 2):  # the divisor of the next term is `below`
        total += term
        term *= square * (below - 1) / below
    return 2 * (angle + sine * total) / math.pi if degrees % 2 else sine * total


def t_quantile(degrees: int, within: float = 0.95) -> float:
    """Return t with P(-t <= T <= t) = `within`, by halving."""
    low, high = 0.0, 1.0
    while t_within(high, degrees) < within:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_within(middle, degrees) < within else (low, middle)
    return high


def mean_over_seeds(values: Sequence[float]) -> Mean:
    """Return the mean, its 95 % interval and the p of the t-test against 0.

    Values that agree to `ROUNDING` of their size have no spread for a t-test, which would be sure of anything: they get
    no interval, and the p of the sign test, 2 / 2^n, than which n signs allow none smaller; 1 where all are 0.
    """
    n, mean = len(values), fmean(values)
    if n < SMALLEST:
        return Mean(mean, None, None, None, n)
    if max(values) - min(values) <= ROUNDING * max(map(abs, values)):
        return Mean(mean, None, None, 2.0 ** (1 - n) if mean else 1.0, n)
    error = stdev(values) / math.sqrt(n)
    half = t_quantile(n - 1) * error
    return Mean(mean, mean - half, mean + half, 1 - t_within(abs(mean) / error, n - 1), n)


def figure_above_zero(mean: Mean, unit: str, how: str) -> dict[str, Any]:
    """Return a difference as a figure: met where its interval lies above 0."""
    low, high = (None if bound is None else round(bound, 4) for bound in (mean.low, mean.high))
    return {
        "value": round(mean.value, 4), "low": low, "high": high, "unit": f"{unit}, {mean.n} seed{'s' * (mean.n > 1)}",
        "goal": 0.0, "better": "higher", "met": mean.low is not None and mean.low > 0, "how": how,
    }  # fmt: skip


def paired(one: Mapping[int, float], other: Mapping[int, float]) -> Mean | None:
    """Return `one` minus `other` over the seeds that both have; None where there is none."""
    seeds = sorted(one.keys() & other.keys())
    return mean_over_seeds([one[seed] - other[seed] for seed in seeds]) if seeds else None


def holm(ps: Mapping[str, float]) -> dict[str, float]:
    """Correct p values for their number (Holm 1979): the i-th smallest of m, i from 0, times m - i, never below the one
    before and at most 1."""
    corrected: dict[str, float] = {}
    highest = 0.0
    for index, name in enumerate(sorted(ps, key=lambda name: (ps[name], name))):
        highest = max(highest, min(1.0, (len(ps) - index) * ps[name]))
        corrected[name] = highest
    return corrected
