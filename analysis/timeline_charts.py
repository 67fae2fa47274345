"""Charts over the iterations of a run, as inline SVG: stacked areas and lines, of at most `MOST_COLUMNS` columns.

A run of more iterations is drawn in columns of several, each the mean of its iterations.
"""

import math
from collections.abc import Mapping, Sequence

from espalier.analysis.charts import Axis, frame
from espalier.analysis.markup import Markup, join, tag

MOST_COLUMNS = 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 1030, 24, 218
NUM_COLOURS = 9


def columns_of(steps: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first, last) place of the iterations of every column."""
    each = math.ceil(len(steps) / MOST_COLUMNS)
    return [(first, min(first + each, len(steps)) - 1) for first in range(0, len(steps), each)]


def means(values: Sequence[float | None], columns: Sequence[tuple[int, int]]) -> list[float | None]:
    """Return the mean of every column over the iterations that have a value, None where none has."""
    found = [[v for v in values[first : last + 1] if v is not None] for first, last in columns]
    return [sum(part) / len(part) if part else None for part in found]


def colour(number: int) -> str:
    """Return the class of a series."""
    return f"f{number % NUM_COLOURS}"


def legend(names: Sequence[str]) -> Markup:
    """Return the names of series with their colours."""
    keys = (tag("span", tag("i", class_=f"square {colour(number)}"), f" {name}") for number, name in enumerate(names))
    return tag("div", *keys, class_="legend")


def _axes(steps: Sequence[int], top: float) -> tuple[Axis, Axis]:
    return Axis(steps[0] - 0.5, steps[-1] + 0.5, _LEFT, _RIGHT), Axis(0, top or 1.0, _BOTTOM, _TOP)


def _edges(steps: Sequence[int], columns: Sequence[tuple[int, int]], x: Axis) -> list[tuple[float, float]]:
    """Return the left and right coordinate of every column."""
    return [(x.place(steps[first] - 0.5), x.place(steps[last] + 0.5)) for first, last in columns]


def _hovers(
    steps: Sequence[int],
    columns: Sequence[tuple[int, int]],
    edges: Sequence[tuple[float, float]],
    series: Mapping[str, Sequence[float | None]],
) -> Markup:
    """Return one transparent area per column that says its numbers."""
    parts = []
    for number, ((first, last), (left, right)) in enumerate(zip(columns, edges, strict=True)):
        which = f"iteration {steps[first]}" if first == last else f"iterations {steps[first]} to {steps[last]}, mean"
        values = [f"{name} {value:,.4g}" for name, row in series.items() if (value := row[number]) is not None]
        title = tag("title", "\n".join([which, *values]))
        area = {"x": left, "y": _TOP, "width": right - left, "height": _BOTTOM - _TOP}
        parts.append(tag("rect", title, class_="hover", **area))
    return join(parts)


def _chart(parts: Sequence[str], label: str) -> Markup:
    return tag("svg", *parts, viewBox="0 0 1046 254", class_="chart broad", role="img", aria_label=label)


def stacked_chart(steps: Sequence[int], series: Mapping[str, Sequence[float]], y_label: str) -> Markup:
    """Return areas one upon the other, in the order of `series`; `steps` rise and are not empty."""
    columns = columns_of(steps)
    rows = {name: [value or 0.0 for value in means(values, columns)] for name, values in series.items()}
    tops = [sum(row[number] for row in rows.values()) for number in range(len(columns))]
    x, y = _axes(steps, max(tops) * 1.05)
    edges = _edges(steps, columns, x)
    parts = [frame(x, y, "iteration", y_label)]
    below = [0.0] * len(columns)
    for number, row in enumerate(rows.values()):
        above = [low + value for low, value in zip(below, row, strict=True)]
        over, under = _stairs(edges, above, y), _stairs(edges, below, y)
        parts.append(tag("polygon", points=" ".join([*over, *reversed(under)]), class_=f"area {colour(number)}"))
        below = above
    return _chart([*parts, _hovers(steps, columns, edges, rows)], y_label)


def _stairs(edges: Sequence[tuple[float, float]], values: Sequence[float], y: Axis) -> list[str]:
    heights = [y.place(value) for value in values]
    pairs = zip(edges, heights, strict=True)
    return [f"{at:.1f},{height:.1f}" for (left, right), height in pairs for at in (left, right)]


def lines_chart(steps: Sequence[int], series: Mapping[str, Sequence[float | None]], y_label: str) -> Markup:
    """Return a line per series, over the same axes from 0 on, with a gap where a column has no value; `steps` rise and
    are not empty."""
    columns = columns_of(steps)
    rows = {name: means(values, columns) for name, values in series.items()}
    known = [value for row in rows.values() for value in row if value is not None]
    x, y = _axes(steps, max(known, default=0.0) * 1.05)
    edges = _edges(steps, columns, x)
    parts = [frame(x, y, "iteration", y_label)]
    for number, row in enumerate(rows.values()):
        for points in _stretches(edges, row, y):
            shape = f"line {colour(number)}"
            if len(points) == 1:
                across, down = points[0].split(",")
                parts.append(tag("circle", cx=across, cy=down, r=3, class_=f"mark {colour(number)}"))
            else:
                parts.append(tag("polyline", points=" ".join(points), class_=shape))
    return _chart([*parts, _hovers(steps, columns, edges, rows)], y_label)


def _stretches(edges: Sequence[tuple[float, float]], row: Sequence[float | None], y: Axis) -> list[list[str]]:
    """Return the points of a line in parts without a gap."""
    stretches: list[list[str]] = [[]]
    for (left, right), value in zip(edges, row, strict=True):
        if value is None:
            stretches.append([])
        else:
            stretches[-1].append(f"{(left + right) / 2:.1f},{y.place(value):.1f}")
    return [points for points in stretches if points]
