"""What the records of searches say: accuracy by tokens and seconds, scorers and methods against one another, prompt
tokens. Pure functions.

Two records are compared where they have the same cell, seed, number of problems and policy, so the same problems.
Records that are older than their `origin` are compared with one another alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from benchmarks.credit.intervals import Mean, figure_above_zero, mean_over_seeds
from benchmarks.search.arms import NO_SCORER
from benchmarks.search.origin import machine_of
from benchmarks.search.runs import ProblemRow, SearchRecord
from espalier.pipeline.evaluation.intervals import interval
from espalier.pipeline.evaluation.recommend_search import bins_of

GOAL_PROMPTS = 1.1
SURE = 64
"""Own samples of a problem that say how hard it is to those of the same search too: bins are off by a point then."""
GAPS = (("exact", "process"), ("exact", "contrast"), ("contrast", "process"), ("process", "random"),
        ("contrast", "random"))  # fmt: skip
"""(scorer, the one that is taken off): the exact value is the ceiling, a random score the floor."""
BASELINE = "best_of_n"
"""The method that others are set against."""
EDGES = (0.25, 0.75)
"""Of difficulty: the share of right ones among the policy's own samples."""

Arm = tuple[str, str, str, int]  # cell, method, scorer, size
BySeed = dict[int, SearchRecord]
Part = tuple[dict[str, Any], dict[str, Any]]  # figures, a table


def by_arm(records: Iterable[SearchRecord]) -> dict[Arm, BySeed]:
    """Return the records of every arm by seed."""
    arms: dict[Arm, BySeed] = {}
    for row in records:
        arms.setdefault((row.cell, row.method, row.scorer, row.size), {})[row.seed] = row
    return arms


def pairs(one: BySeed, other: BySeed) -> dict[int, tuple[SearchRecord, SearchRecord]]:
    """Return seed → the two records of it that can be compared."""
    both = {seed: (one[seed], other[seed]) for seed in sorted(one.keys() & other.keys())}
    return {seed: (first, second) for seed, (first, second) in both.items()
            if (first.problems, first.origin.policy) == (second.problems, second.origin.policy)}  # fmt: skip


def points(mean: Mean | None) -> str:
    """Return a mean share in per cent with its interval."""
    if mean is None:
        return ""
    interval = "" if mean.low is None or mean.high is None else f" [{100 * mean.low:.1f}, {100 * mean.high:.1f}]"
    return f"{100 * mean.value:.1f}{interval}"


def accuracy_table(records: Sequence[SearchRecord]) -> dict[str, Any]:
    """Return the table of all arms."""
    rows = []
    for (cell, method, scorer, size), seeds in sorted(by_arm(records).items()):
        of_arm = list(seeds.values())
        seconds = fmean(row.seconds / row.problems for row in of_arm)
        rows.append([
            cell, method, scorer, size, points(mean_over_seeds([row.accuracy for row in of_arm])), len(of_arm),
            f"{fmean(row.tokens for row in of_arm):.0f}", f"{seconds:.3f}", machine_of(row.origin for row in of_arm),
            f"{fmean(row.prompt_tokens / row.distinct_tokens for row in of_arm):.2f}",
        ])  # fmt: skip
    old = sum(not row.origin.policy for row in records)
    title = "Accuracy by tokens and seconds"
    if old:
        title += (f" ({old} of {len(records)} records do not say policy, machine and single problems: seconds of other "
                  "runs are not to be set beside theirs)")  # fmt: skip
    columns = ["cell", "method", "scorer", "times one sample", "right, %", "seeds", "tokens per problem",
               "seconds per problem", "machine", "prompt tokens computed / distinct"]  # fmt: skip
    return {"title": title, "columns": columns, "rows": rows}


def scorer_gaps(records: Sequence[SearchRecord], how: str) -> Part:
    """Return (figures, the table): how far one scorer is above another, seed by seed. The figures, of every cell and
    size, are means over methods, of the seeds at which all methods that were run with both scorers were; the table has
    every method."""
    arms = by_arm(records)
    places = sorted({(cell, size) for cell, _, scorer, size in arms if scorer != NO_SCORER})
    figures, rows = {}, []
    for cell, size in places:
        methods = sorted({method for name, method, scorer, number in arms
                          if (name, number) == (cell, size) and scorer != NO_SCORER})  # fmt: skip
        gaps = {method: {gap: _gap(arms, cell, method, size, *gap) for gap in GAPS} for method in methods}
        for gap in GAPS:
            of_methods = [gaps[method][gap] for method in methods if gaps[method][gap]]
            seeds = set[int].intersection(*map(set, of_methods)) if of_methods else set[int]()
            if seeds:
                mean = mean_over_seeds([fmean(one[seed] for one in of_methods) for seed in sorted(seeds)])
                unit = f"accuracy, mean of {len(of_methods)} method{'s' * (len(of_methods) > 1)}"
                figures[f"{cell}_{size}_times_{gap[0]}_minus_{gap[1]}"] = figure_above_zero(mean, unit, how)
        rows += [[cell, size, method, *(points(_mean(gaps[method][gap])) for gap in GAPS)] for method in methods]
    columns = ["cell", "times one sample", "method", *(f"{one} - {other}" for one, other in GAPS)]
    return figures, {"title": "Scorers, seed by seed, in points", "columns": columns, "rows": rows}


def _gap(arms: Mapping[Arm, BySeed], cell: str, method: str, size: int, one: str, other: str) -> dict[int, float]:
    found = pairs(arms.get((cell, method, one, size), {}), arms.get((cell, method, other, size), {}))
    return {seed: first.accuracy - second.accuracy for seed, (first, second) in found.items()}


def _mean(gaps: Mapping[int, float]) -> Mean | None:
    return mean_over_seeds(list(gaps.values())) if gaps else None


def at_most(values: Sequence[float], goal: float, unit: str, how: str) -> dict[str, Any]:
    """Return the figure of a ratio that no value should have above the goal: median, lowest, highest."""
    return {"value": round(median(values), 4), "low": round(min(values), 4), "high": round(max(values), 4),
            "unit": unit, "goal": goal, "better": "lower", "met": max(values) <= goal, "how": how}  # fmt: skip


def prompt_figures(records: Sequence[SearchRecord], how: str) -> dict[str, Any]:
    """Return of every cell the prompt tokens that the engine computed over the distinct tokens of the trees, over all
    searches; met where none is above the goal."""
    figures = {}
    for cell in sorted({row.cell for row in records}):
        ratios = [row.prompt_tokens / row.distinct_tokens for row in records if row.cell == cell]
        above = sum(ratio > GOAL_PROMPTS for ratio in ratios)
        unit = f"ratio, of {len(ratios)} searches, {above} above {GOAL_PROMPTS:g}"
        figures[f"{cell}_searches_prompt_tokens_by_distinct"] = at_most(ratios, GOAL_PROMPTS, unit, how)
    return figures


def own_shares(records: Iterable[SearchRecord]) -> dict[tuple[str, str, str], tuple[int, float]]:
    """Return (cell, policy, problem) → the share of right ones among the policy's own samples, of the largest search
    that drew such samples, and that search's size."""
    found: dict[tuple[str, str, str], tuple[int, float]] = {}
    for record in records:
        for row in record.rows:
            key = (record.cell, record.origin.policy, row.problem)
            if row.own_share is not None and record.size > found.get(key, (0, 0.0))[0]:
                found[key] = record.size, row.own_share
    return found


def method_gaps(records: Sequence[SearchRecord]) -> dict[str, Any]:
    """Return the table of every method against the baseline, problem by problem, with an interval over problems (those
    of all seeds: every seed has problems of its own) and one over seeds, by difficulty. Records without rows are left
    out. Difficulty is that among the samples of a larger search: among its own, few samples that were lucky make a
    problem look easy and the baseline good."""
    arms, shares, rows = by_arm(records), own_shares(records), []
    for (cell, method, scorer, size), seeds in sorted(arms.items()):
        other = arms.get((cell, BASELINE, scorer, size), {})
        both = {seed: pair for seed, pair in pairs(seeds, other).items() if pair[0].rows and pair[1].rows}
        if method == BASELINE or not both:
            continue
        values = {}
        for one, base in both.values():
            for row, base_row in _aligned(one, base):
                values[one.origin.policy, row.problem] = float(row.is_right) - float(base_row.is_right)
        known = {
            f"{policy} {problem}": share
            for policy, problem in values
            for drawn, share in [shares.get((cell, policy, problem), (0, 0.0))]
            if drawn >= SURE or drawn > size
        }
        named = {f"{policy} {problem}": value for (policy, problem), value in values.items()}
        over_seeds = mean_over_seeds([one.accuracy - base.accuracy for one, base in both.values()])
        bins = [held for name, held in bins_of(known, EDGES).items() if name != "all"]
        rows.append([cell, size, scorer, method, _interval(list(named.values())), points(over_seeds),
                     *(_interval([named[name] for name in held]) for held in bins)])  # fmt: skip
    bounds = [name for name in bins_of({}, EDGES) if name != "all"]
    columns = ["cell", "times one sample", "scorer", "method", "over problems", "over seeds",
               *(f"own samples right: {name}" for name in bounds)]  # fmt: skip
    title = f"Methods minus {BASELINE}, problem by problem, in points"
    return {"title": title, "columns": columns, "rows": rows}


def _aligned(one: SearchRecord, other: SearchRecord) -> list[tuple[ProblemRow, ProblemRow]]:
    rows = {row.problem: row for row in other.rows}
    return [(row, rows[row.problem]) for row in one.rows if row.problem in rows]


def _interval(values: Sequence[float]) -> str:
    if not values:
        return ""
    found = interval(values)
    return f"{100 * found['mean']:.1f} [{100 * found['low']:.1f}, {100 * found['high']:.1f}], n={found['n']:.0f}"
