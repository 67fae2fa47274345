"""Which learning rate a method has on a cell: chosen by its tuning runs, for the policy that they began from. Pure
functions. (On long_arithmetic `shared_prefixes` and `lambda_grpo` take 3e-4 from one policy of the recipe and 1e-4 from
another.)"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from benchmarks.credit.curves import Point, mean_accuracy
from benchmarks.credit.plan import Plan, best_rate, wanted_rates
from benchmarks.credit.runs import Record

Areas = dict[tuple[str, str], dict[str, dict[float, float]]]
"""Mean accuracy up to the tuning budget, by (cell, method), the policy's digest and the learning rate."""
Rates = dict[tuple[str, str], dict[str, float]]
"""Tuned learning rates, by (cell, method) and the digest of the policy that they were tuned from."""


def given(points: Sequence[Point], tokens: float, seconds: float) -> list[Point]:
    """Return the curve without what was spent before the first update."""
    return [replace(point, tokens=point.tokens - tokens, seconds=point.seconds - seconds) for point in points]


def tuning_areas(plan: Plan, records: Sequence[Record]) -> Areas:
    """Return the mean accuracy of the plan's tuning runs where it is a finite number; what is spent before the first
    update is the same for all of them and left out."""
    areas: Areas = {}
    for row in records:
        is_planned = row.seed == plan.tuning_seed and row.learning_rate in plan.learning_rates + plan.lower_rates
        if row.is_tuning and is_planned:
            points = given(row.points, row.tokens_before, row.seconds_before)
            area = mean_accuracy(points, *plan.cells[row.cell].tuning_budget)
            if area is not None and math.isfinite(area):
                areas.setdefault((row.cell, row.method), {}).setdefault(row.policy, {})[row.learning_rate] = area
    return areas


def tuned_rates(plan: Plan, records: Sequence[Record]) -> Rates:
    """Return the learning rates where every one that the rule wants has its tuning run: the best of these, whatever
    other rates were once run; for a cell that names another one, that one's."""
    own: Rates = {}
    for key, policies in tuning_areas(plan, records).items():
        for policy, found in policies.items():
            wanted = wanted_rates(plan, found)
            if found.keys() >= set(wanted):
                own.setdefault(key, {})[policy] = best_rate({rate: found[rate] for rate in wanted})
    return {
        (cell.name, method): own[source, method]
        for cell in plan.cells.values()
        for method in plan.methods
        if (source := cell.rates_of or cell.name, method) in own
    }


def runs_of(records: Sequence[Record], cell: str, method: str) -> list[Record]:
    """Return a method's runs on a cell, those of tuning apart."""
    return [row for row in records if (row.cell, row.method) == (cell, method) and not row.is_tuning]


def shown_runs(own: Sequence[Record], tuned: Mapping[str, float]) -> list[Record]:
    """Return those of a method's runs on a cell that figures are of: one learning rate for each policy, the one that is
    `tuned` from it; else, of those that are tuned from others (of all, where there are none), the one that most of
    its runs have."""
    shown = []
    for policy in sorted({row.policy for row in own}):
        rows = [row for row in own if row.policy == policy]
        allowed = {tuned[policy]} if policy in tuned else set(tuned.values())
        rates = sorted({row.learning_rate for row in rows if not allowed or row.learning_rate in allowed})
        if rates:
            best = max(rates, key=lambda rate: sum(row.learning_rate == rate for row in rows))
            shown += [row for row in rows if row.learning_rate == best]
    return shown


def runs_of_other_rates(plan: Plan, records: Sequence[Record]) -> list[str]:
    """Return a line for the runs of each method on each cell that are in no figure, as their rate is not the shown
    one of their policy."""
    all_tuned, lines = tuned_rates(plan, records), []
    for cell in plan.cells:
        for method in plan.methods:
            own, tuned = runs_of(records, cell, method), all_tuned.get((cell, method), {})
            shown = shown_runs(own, tuned)
            others = [row for row in own if row not in shown]
            if others:
                rates = listed(row.learning_rate for row in others)
                of = [row.learning_rate for row in shown] or tuned.values()
                why = f"the tuned {listed(of)}" if tuned else f"{listed(of)}, which most runs have"
                lines.append(f"{len(others)} runs of {method} on {cell}: of the rates {rates}, figures are of {why}")
    return lines


def listed(rates: Iterable[float]) -> str:
    """Show rates, the highest first."""
    return ", ".join(f"{rate:g}" for rate in sorted(set(rates), reverse=True))
