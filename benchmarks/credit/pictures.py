"""Pictures of stored runs: the curves of every cell over tokens and seconds, and the map of all cells."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.credit.comparison import Curves, Row, start_of
from benchmarks.credit.curves import accuracy_at, reach
from benchmarks.credit.intervals import SMALLEST, mean_over_seeds
from benchmarks.credit.plan import FAMILIES, Plan
from espalier.analysis.curve_figure import Series, curve_figure, map_figure

NAMES = ("outcome", "critic", "Monte-Carlo", "process reward model", "group prefixes", "exact")
"""Of FAMILIES, in the legend."""
DRAWN = {"tokens": "generated tokens", "seconds": "seconds of iterations on one core", "updates": "updates"}


def series_of(curves: Curves, cost: str) -> Series:
    """Return the mean curve over seeds, as far as all of them were run, at the costs where any was evaluated; with its
    band from three seeds on, of no width where all seeds agree (at the start they do)."""
    end = min(reach(points, cost) for points in curves.seeds.values())
    costs = sorted({float(getattr(point, cost)) for points in curves.seeds.values() for point in points} | {end})
    kept = [at for at in costs if at <= end]
    means = [mean_over_seeds([accuracy_at(points, cost, at) or 0.0 for points in curves.seeds.values()]) for at in kept]
    has_band = len(curves.seeds) >= SMALLEST
    return Series(
        f"{curves.method} ({len(curves.seeds)})",
        FAMILIES.index(curves.family),
        [(at, 100 * mean.value) for at, mean in zip(kept, means, strict=True)],
        [100 * max(mean.value if mean.low is None else mean.low, 0.0) for mean in means] if has_band else (),
        [100 * min(mean.value if mean.high is None else mean.high, 1.0) for mean in means] if has_band else (),
    )


def draw(plan: Plan, found: Mapping[str, Mapping[str, Sequence[Row]]], folder: Path) -> list[Path]:
    """Write CELL-tokens.svg and CELL-seconds.svg, CELL-updates.svg of cells that are compared by updates, and map.svg;
    return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, by_cost in found.items():
        for cost, what in DRAWN.items():
            curves = [row.curves for row in by_cost.get(cost, [])]
            if not curves or (cost == "updates" and not plan.cells[name].updates):
                continue
            title = f"{name}: accuracy on held-out problems, mean over seeds (how many), 95 % bands"
            svg = curve_figure(title, NAMES, [series_of(row, cost) for row in curves], what, "per cent")
            written.append(_write(folder / f"{name}-{cost}.svg", svg))
    points = map_points(plan, found)
    if points:
        most = max(plan.cells[name].tokens for name in found)
        title = "Generated tokens to the target accuracy against success at the start (lines: best of a family)"
        svg = map_figure(title, NAMES, points, "success at the start", "generated tokens to the target", float(most))
        written.append(_write(folder / "map.svg", svg))
    return written


def map_points(
    plan: Plan, found: Mapping[str, Mapping[str, Sequence[Row]]]
) -> list[tuple[str, int, float, float | None]]:
    """Return (name, family's number, success at the start, median tokens to the target) of every method and cell."""
    points = []
    for name, by_cost in found.items():
        rows = by_cost.get("tokens")  # none of a cell that is measured by updates
        if not rows or start_of([row.curves for row in rows]) <= 0:  # nothing right among all that was asked
            continue
        start = fmean([start_of([row.curves]) for row in rows])
        points += [(f"{name}: {row.curves.method}", FAMILIES.index(row.curves.family), start, row.to_target.middle)
                   for row in rows if row.to_target.middle != 0]  # fmt: skip
    return points


def _write(path: Path, svg: str) -> Path:
    path.write_text(f"{svg}\n", encoding="utf-8")
    return path
