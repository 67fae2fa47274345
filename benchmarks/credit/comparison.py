"""Stored runs of a cell → learning rates that tuning chose, one table per cost, figures. Pure functions.

Methods are compared by their mean accuracy up to a cost that every run of the cell has reached: seed by seed with the
baseline, with Student's 95 % interval, and p corrected by Holm over the methods of the table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from benchmarks.credit.curves import COSTS, Point, TargetCost, accuracy_at, cost_of, mean_accuracy, reach, target_cost
from benchmarks.credit.intervals import Mean, figure_above_zero, holm, mean_over_seeds, paired
from benchmarks.credit.learning_rates import given, listed, runs_of, shown_runs, tuned_rates
from benchmarks.credit.plan import Cell, Plan
from benchmarks.credit.runs import Record
from benchmarks.result import count

SIGNIFICANT = 0.05
GIVEN = " (reward model given)"
OWN = ""
"""Every run has the learning rate that was tuned from the policy that it began from."""
OTHERS = " (another policy's)"
"""Some have one that was tuned from another policy."""
NONE = " (not tuned)"


@dataclass(frozen=True)
class Curves:
    """A method's curves on a cell by seed, and the learning rates that they are of (the seeds of a policy have one).
    `tuning` is why: `OWN`, `OTHERS` or `NONE`; `baseline`: the method that it is set against."""

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
        is_own = cell.rates_of or all(row.policy in tuned for row in rows)
        baseline = method.baseline or plan.baseline
        curves = Curves(method.name, method.family, rates, (OWN if is_own else OTHERS) if tuned else NONE,
                        {row.seed: row.points for row in rows}, baseline)  # fmt: skip
        found.append(curves)
        if any(row.tokens_before > 0 for row in rows):
            free = {row.seed: given(row.points, row.tokens_before, row.seconds_before) for row in rows}
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


def _untuned(said: str) -> str:
    """Say for a figure's unit which methods of it, or how many, are not tuned: nothing where all are."""
    return f", {said} not tuned" if said else ""


def pair_figures(plan: Plan, cell: Cell, curves: Sequence[Curves], how: str) -> dict[str, Any]:
    """Return a figure for every method with runs that the plan sets `against` another one: met where the interval lies
    above 0."""
    by_name, figures = {row.method: row for row in curves}, dict[str, Any]()
    for method in plan.methods.values():
        if not method.against or not {method.name, method.against} <= by_name.keys():
            continue
        found = at_equal_updates(cell, by_name[method.name], by_name[method.against])
        if found is None:
            continue
        at, mean = found
        name = f"{cell.name}_{method.name}_minus_{method.against}_at_equal_updates"
        sides = [side for side in (method.name, method.against) if not by_name[side].is_tuned]
        unit = f"mean accuracy up to {at:g} updates{_untuned(' and '.join(sides))}"
        figures[name] = figure_above_zero(mean, unit, how)
    return figures


def table(cell: Cell, rows: Sequence[Row], baseline: str, cost: str, at: float) -> dict[str, Any]:
    """Return the table of one cost as docs/benchmarks.md shows it."""
    start = start_of([row.curves for row in rows])
    title = (
        f"{cell.name} (right at the start: {_percent(start)} %): accuracy in per cent at {at:,.0f} {cost}, the mean up "
        f"to there, and that minus {baseline}'s (or that of the method in brackets, whose updates are as small), seed "
        f"by seed; 95 % intervals (none below 3 seeds or where all agree), p after Holm; {cost} to "
        f"{_percent(cell.target)} %: the median run, the first and the last."
    )
    columns = ["method", "family", "seeds", "learning rate", f"at {at:,.0f} {cost}", "mean up to there",
               f"minus {baseline}", "p", f"{cost} to {_percent(cell.target)} %", "runs that reached it"]  # fmt: skip
    return {"title": title, "columns": columns, "rows": [_cells(row, baseline) for row in rows]}


def _cells(row: Row, baseline: str) -> list[Any]:
    curves = row.curves
    rate = listed(curves.learning_rates) + curves.tuning
    beside = "" if curves.baseline in ("", baseline) else f" ({curves.baseline})"
    return [
        curves.method,
        curves.family,
        len(curves.seeds),
        rate,
        _interval(row.accuracy),
        _interval(row.mean),
        "" if row.difference is None else _interval(row.difference, "+") + beside,
        "" if row.p is None else f"{row.p:.3f}",
        _to_target(row.to_target),
        f"{row.num_reached} of {len(curves.seeds)}",
    ]


def _to_target(cost: TargetCost) -> str:
    """Show the median and, in brackets, the lowest and the highest run: of five seeds these hold the true median with
    94 %, of three with 75 % (1 - 2 / 2^n)."""
    shown = [f"{one:,.0f}" if one is not None else "not reached" for one in (cost.middle, cost.low, cost.high)]
    return shown[0] if shown[1] == shown[2] else f"{shown[0]} [{shown[1]}, {shown[2]}]"


def _interval(mean: Mean, sign: str = "") -> str:
    shown = _percent(mean.value, sign)
    return shown if mean.low is None else f"{shown} [{_percent(mean.low, sign)}, {_percent(mean.high or 0.0, sign)}]"


def _percent(share: float, sign: str = "") -> str:
    return f"{100 * share:{sign}.1f}" if abs(share) >= 0.01 or share == 0 or sign else f"{100 * share:.2g}"


def summarise(
    plan: Plan, records: Sequence[Record], seeds: int, how: str
) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, dict[str, list[Row]]]]:
    """Return (figures, tables, the rows by cell and cost) of all cells that have runs. `seeds`: how many every
    method is meant to have."""
    figures: dict[str, Any] = {}
    tables, found = [], dict[str, dict[str, list[Row]]]()
    for cell in plan.cells.values():
        curves = curves_of(plan, cell, records)
        if not curves:
            continue
        found[cell.name] = {}
        figures |= pair_figures(plan, cell, curves, how)
        for cost in ("updates",) if cell.updates else COSTS:
            at = common_cost(cell, curves, cost)
            rows = compare(cell, curves, cost, at) if at > 0 else []
            found[cell.name][cost] = rows
            if not rows:
                continue
            tables.append(table(cell, rows, plan.baseline, cost, at))
            if cost != "updates" and any(row.difference is not None for row in rows):
                ahead = [row for row in rows if row.p is not None and row.p < SIGNIFICANT and row.difference is not None
                         and row.difference.value > 0 and row.curves.family not in ("outcome", "exact")]  # fmt: skip
                num_untuned = sum(not row.curves.is_tuned for row in rows)
                unit = f"methods, of {len(rows)}{_untuned(str(num_untuned or ''))}"
                figures[f"{cell.name}_step_credit_ahead_per_{cost.removesuffix('s')}"] = count(
                    len(ahead), 1, unit, how=how
                )
    done = sum(not row.is_tuning for row in records)
    planned = sum(cell.takes(method) for cell in plan.cells.values() for method in plan.methods.values())
    figures["runs_finished"] = count(done, planned * seeds, "runs", how=how)
    return figures, tables, found
