"""Rows of all cells → the figures and tables of the benchmark. Pure functions."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.credit.comparison import GIVEN, Curves, Row, at_equal_updates, common_cost, compare, curves_of, start_of
from benchmarks.credit.curves import COSTS, TargetCost
from benchmarks.credit.intervals import Mean, figure_above_zero
from benchmarks.credit.learning_rates import listed
from benchmarks.credit.plan import Cell, Plan
from benchmarks.credit.runs import Record
from benchmarks.result import count

SIGNIFICANT = 0.05
NUM_METHODS, NUM_SEEDS = 10, 5
"""So many methods of so many seeds are wanted on every cell that is compared by tokens."""


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
    return [
        curves.method,
        curves.family,
        len(curves.seeds),
        rate,
        _interval(row.accuracy),
        _interval(row.mean),
        _difference(row, baseline),
        "" if row.p is None else f"{row.p:.3f}",
        _to_target(row.to_target),
        _num_reached(row),
    ]


def maps(plan: Plan, found: Mapping[str, Mapping[str, Sequence[Row]]]) -> list[dict[str, Any]]:
    """Return two tables of all methods on all cells that are compared by tokens: what each is ahead of its baseline,
    and what the target costs."""
    rows = {cell: by_cost["tokens"] for cell, by_cost in found.items() if by_cost.get("tokens")}
    names = {row.curves.method: row.curves.family for own in rows.values() for row in own}
    if not rows:
        return []
    ordered = [name for method in plan.methods for name in (method, method + GIVEN) if name in names]

    def filled(title: str, heads: Sequence[str], show: Callable[[Row], str]) -> dict[str, Any]:
        shown = {(cell, row.curves.method): show(row) for cell, own in rows.items() for row in own}
        cells = [[name, names[name], *(shown.get((cell, name), "") for cell in rows)] for name in ordered]
        return {"title": title, "columns": ["method", "family", *heads], "rows": cells}

    starts = {
        cell: f"{cell} ({_percent(start_of([row.curves for row in own]))} % at the start" for cell, own in rows.items()
    }
    return [
        filled(
            f"All cells: mean accuracy up to the cell's tokens minus that of {plan.baseline} (or of the method in "
            f"brackets), in points, seed by seed; how many seeds (of {plan.baseline} that mean itself); * where p is "
            f"below {SIGNIFICANT:g} after Holm.",
            [f"{start})" for start in starts.values()],
            lambda row: _beside(row, plan.baseline),
        ),
        filled(
            "All cells: generated tokens to the target: the median run, the first and the last; how many reached it.",
            [f"{start}, target {_percent(plan.cells[cell].target)} %)" for cell, start in starts.items()],
            lambda row: f"{_to_target(row.to_target)}; {_num_reached(row)}",
        ),
    ]


def _difference(row: Row, baseline: str) -> str:
    if row.difference is None:
        return ""
    own = row.curves.baseline
    return _interval(row.difference, "+") + ("" if own in ("", baseline) else f" ({own})")


def _beside(row: Row, baseline: str) -> str:
    """Show the difference and over how many seeds; of the baseline what others are set against."""
    if row.curves.method == baseline:
        return f"{_interval(row.mean)}; {row.mean.n}"
    if row.difference is None:
        return ""
    mark = " *" if row.p is not None and row.p < SIGNIFICANT else ""
    return f"{_difference(row, baseline)}; {row.difference.n}{mark}"


def _num_reached(row: Row) -> str:
    return f"{row.num_reached} of {len(row.curves.seeds)}"


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
    plan: Plan, records: Sequence[Record], how: str
) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, dict[str, list[Row]]]]:
    """Return (figures, tables, the rows by cell and cost) of all cells that have runs."""
    figures: dict[str, Any] = {}
    tables, found = [], dict[str, dict[str, list[Row]]]()
    for cell in plan.cells.values():
        curves = curves_of(plan, cell, records)
        if cell.tokens and not cell.methods:
            whole = {row.method for row in curves if len(row.seeds) >= NUM_SEEDS} & plan.methods.keys()
            unit = f"methods of {NUM_SEEDS} seeds or more"
            figures[f"{cell.name}_methods"] = count(len(whole), NUM_METHODS, unit, how=how)
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
            if not cell.updates and any(row.difference is not None for row in rows):
                ahead = [row for row in rows if row.p is not None and row.p < SIGNIFICANT and row.difference is not None
                         and row.difference.value > 0 and row.curves.family not in ("outcome", "exact")]  # fmt: skip
                num_untuned = sum(not row.curves.is_tuned for row in rows)
                unit = f"methods, of {len(rows)}{_untuned(str(num_untuned or ''))}"
                figures[f"{cell.name}_step_credit_ahead_per_{cost.removesuffix('s')}"] = count(
                    len(ahead), 1, unit, how=how
                )
    return figures, [*maps(plan, found), *tables], found
