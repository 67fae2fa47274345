"""Stored runs of a cell → learning rates that tuning chose, one table per cost, figures. Pure functions.

Methods are compared by their mean accuracy up to a cost that every run of the cell has reached: seed by seed with the
baseline, with Student's 95 % interval, and p corrected by Holm over the methods of the table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from benchmarks.credit.curves import Point, TargetCost, accuracy_at, cost_of, mean_accuracy, reach, target_cost
from benchmarks.credit.intervals import Mean, holm, mean_over_seeds, paired
from benchmarks.credit.learning_rates import given, runs_of, shown_runs, tuned_rates
from benchmarks.credit.plan import Cell, Plan
from benchmarks.credit.runs import Record

GIVEN = " (reward model given)"
OWN = ""
"""Every run has the learning rate that was tuned from the policy that it began from."""
OTHERS = " (another policy's)"
"""Some have one that was tuned from another policy."""
NONE = " (not tuned)"


@dataclass(frozen=True)
class Curves:
    """A method's curves on a cell by seed, and the learning rates that they are of (the seeds of a policy have one).
    `tuning` is why: `OWN`, `OTHERS`, `NONE` or the cell that they were tuned on; `baseline`: the method that it is set
    against."""

    method: str
    family: str
    learning_rates: tuple[float, ...]
    tuning: str
    seeds: Mapping[int, list[Point]]
    baseline: str = ""

    @property
    def is_tuned(self) -> bool:
        """Whether its learning rates won a whole tuning."""
        return self.tuning != NONE


@dataclass(frozen=True)
class Row:
    """A method at one cost: accuracy there, mean accuracy up to there, the latter minus the baseline's (None for the
    baseline itself), its p after Holm; the cost of the target accuracy, and how many runs reached it."""

    curves: Curves
    accuracy: Mean
    mean: Mean
    difference: Mean | None
    p: float | None
    to_target: TargetCost
    num_reached: int


def within_plan(cell: Cell, row: Record) -> list[Point]:
    """Return the points of a run up to where the plan would have ended it: the first behind all that the cell gives."""
    if cell.updates:
        return row.points
    ends = [
        number for number, point in enumerate(row.points)
        if point.tokens - row.tokens_before >= cell.tokens and point.seconds - row.seconds_before >= cell.seconds
    ]  # fmt: skip
    return row.points[: ends[0] + 1] if ends else row.points


def curves_of(plan: Plan, cell: Cell, records: Sequence[Record]) -> list[Curves]:
    """Return the curves of every method with `shown_runs`, in the plan's order. A method with a reward model comes a
    second time without its cost."""
    all_tuned, found = tuned_rates(plan, records), []
    for method in plan.methods.values():
        tuned = all_tuned.get((cell.name, method.name), {})
        rows = shown_runs(runs_of(records, cell.name, method.name), tuned)
        if not rows:
            continue
        rates = tuple(sorted({row.learning_rate for row in rows}, reverse=True))
        own = OWN if all(row.policy in tuned for row in rows) else OTHERS
        tuning = (f" (of {cell.rates_of})" if cell.rates_of else own) if tuned else NONE
        baseline = method.baseline or plan.baseline
        curves = Curves(method.name, method.family, rates, tuning,
                        {row.seed: within_plan(cell, row) for row in rows}, baseline)  # fmt: skip
        found.append(curves)
        if any(row.tokens_before > 0 for row in rows):
            free = {row.seed: given(within_plan(cell, row), row.tokens_before, row.seconds_before) for row in rows}
            found.append(replace(curves, method=method.name + GIVEN, seeds=free))
    return found


def common_cost(cell: Cell, curves: Sequence[Curves], cost: str) -> float:
    """Return the cost at which a cell is compared: its budget, or less where a run ended before that."""
    reached = min(reach(points, cost) for row in curves for points in row.seeds.values())
    budget = {"tokens": float(cell.tokens), "seconds": cell.seconds, "updates": float(cell.updates)}[cost]
    return min(reached, budget) if budget > 0 else reached


def compare(cell: Cell, curves: Sequence[Curves], cost: str, at: float) -> list[Row]:
    """Return a row per method at the cost `at`, which every run has reached."""
    means = {row.method: _by_seed(row, lambda points: mean_accuracy(points, cost, at)) for row in curves}
    differences = {row.method: paired(means[row.method], means[row.baseline]) for row in curves
                   if row.baseline in means and row.baseline != row.method}  # fmt: skip
    ps = holm({name: row.p for name, row in differences.items() if row is not None and row.p is not None})
    rows = []
    for row in curves:
        costs = [cost_of(points, cost, cell.target) for points in row.seeds.values()]
        accuracies = _by_seed(row, lambda points: accuracy_at(points, cost, at))
        rows.append(Row(
            row, mean_over_seeds([*accuracies.values()]), mean_over_seeds([*means[row.method].values()]),
            differences.get(row.method), ps.get(row.method), target_cost(costs),
            sum(found is not None for found in costs),
        ))  # fmt: skip
    return rows


def _by_seed(row: Curves, read: Any) -> dict[int, float]:
    found = {seed: read(points) for seed, points in row.seeds.items()}
    return {seed: value for seed, value in found.items() if value is not None}


def start_of(curves: Sequence[Curves]) -> float:
    """Return the mean accuracy before the first update."""
    return fmean(points[0].accuracy for row in curves for points in row.seeds.values())


def at_equal_updates(cell: Cell, one: Curves, other: Curves) -> tuple[float, Mean] | None:
    """Return (updates, mean accuracy of `one` up to there minus that of `other`, seed by seed), at the most updates
    that every run of both has done; None without a common seed or an update."""
    at = common_cost(cell, [one, other], "updates")
    difference = paired(*(_by_seed(row, lambda points: mean_accuracy(points, "updates", at)) for row in (one, other)))
    return None if difference is None or at <= 0 else (at, difference)
