"""Curves over a cost, and points over two axes, as SVG files that stand alone: series are grouped by colour and mark.

Up to `NUM_SERIES` groups have a mark and a colour; a group behind them is a dashed line, or an empty ring.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from espalier.analysis.charts import NUM_SERIES, Axis, frame, marker
from espalier.analysis.markup import Markup, join, tag

_WIDTH, _HEIGHT, _LEFT, _BASE, _TOP = 860, 470, 60, 408, 84
_RIGHT = _WIDTH - 190
STYLE = Markup(
    "text{font:13px system-ui,-apple-system,'Segoe UI',Roboto,'Liberation Sans',Arial,sans-serif;fill:#1c2420}"
    ".tick{font-size:12px;fill:#66706a}.row{font-weight:600;font-size:14px}.end{text-anchor:end}.mid{text-anchor:middle}"
    ".grid{stroke:#e4e3dc}.axis{stroke:#66706a}.line{fill:none;stroke-width:1.8}.band{opacity:.13;stroke:none}"
    ".mark{stroke:none}.ring{fill:none;stroke-width:1.6}.dashed{stroke-dasharray:5 4}"
    + "".join(
        f".line.c{i},.ring.c{i},.leader.c{i}{{stroke:{colour}}}.mark.c{i},.band.c{i}{{fill:{colour}}}"
        for i, colour in enumerate(("#7d8790", "#c4812a", "#2c7a57", "#5b69bd", "#a2557f", "#1c2420"))
    )
)


@dataclass(frozen=True)
class Series:
    """A named line. `group` chooses colour and mark; `points` are (x, y), `low` and `high` the band's y at the same x,
    empty where there is none."""

    name: str
    group: int
    points: Sequence[tuple[float, float]]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


def axis(values: Sequence[float], start: float, end: float, *, is_log: bool) -> Axis:
    """Return an axis that holds the values; a logarithmic one leaves out what is not above 0."""
    if is_log:
        kept = [value for value in values if value > 0]
        low, high = min(kept), max(kept)
        return Axis(low / 1.15, high * 1.15, start, end, True)
    low, high = min(values), max(values)
    return Axis(low, high if high > low else low + 1, start, end)


def curve_figure(title: str, groups: Sequence[str], series: Sequence[Series], x_label: str, y_label: str) -> Markup:
    """Return one line per series with its band, named at its right end; the legend names the groups that occur."""
    is_log = _spans([x for row in series for x, _ in row.points if x > 0])
    shown = [(row, [i for i, (x, _) in enumerate(row.points) if x > 0 or not is_log]) for row in series]
    x = axis([row.points[i][0] for row, kept in shown for i in kept], _LEFT, _RIGHT, is_log=is_log)
    every = [value for row in series for value in (*(y for _, y in row.points), *row.low, *row.high)]
    y = axis([0.0, *every], _BASE, _TOP, is_log=False)
    parts = [frame(x, y, x_label, y_label)]
    ends = []
    for row, kept in shown:
        kind = f"c{min(row.group, NUM_SERIES)}"
        if row.low:
            corners = [*((i, row.high) for i in kept), *((i, row.low) for i in reversed(kept))]
            band = " ".join(f"{x.place(row.points[i][0]):.1f},{y.place(side[i]):.1f}" for i, side in corners)
            parts.append(tag("polygon", points=band, class_=f"band {kind}"))
        places = [(x.place(row.points[i][0]), y.place(row.points[i][1])) for i in kept]
        dashed = " dashed" if row.group >= NUM_SERIES else ""
        line = " ".join(f"{at:.1f},{up:.1f}" for at, up in places)
        parts.append(tag("polyline", tag("title", row.name), points=line, class_=f"line {kind}{dashed}"))
        if row.group < NUM_SERIES:
            parts += [_mark(row.group, at, up, row.name) for at, up in places[-1:]]
        ends.append((places[-1], row))
    parts.append(_names(ends))
    return _paper(title, groups, {row.group for row in series}, parts)


def map_figure(
    title: str,
    groups: Sequence[str],
    points: Sequence[tuple[str, int, float, float | None]],
    x_label: str,
    y_label: str,
    most: float,
) -> Markup:
    """Return points (name, group, x, y) on two logarithmic axes, those of a group joined along its lowest y at every x.

    y None is not reached: an empty ring above `most`, the largest y that was run for.
    """
    x = axis([at for _, _, at, _ in points], _LEFT + 26, _RIGHT, is_log=True)
    y = axis([most, *(up for *_, up in points if up)], _BASE, _TOP + 26, is_log=True)
    parts = [frame(x, y, x_label, y_label)]
    parts.append(tag("text", "not reached", x=_RIGHT + 10, y=_TOP - 2, class_="tick"))
    for group in sorted({group for _, group, *_ in points}):
        lowest: dict[float, float] = {}
        for _, own, at, up in points:
            if own == group and up:
                lowest[at] = min(up, lowest.get(at, math.inf))
        line = " ".join(f"{x.place(at):.1f},{y.place(lowest[at]):.1f}" for at in sorted(lowest))
        parts.append(tag("polyline", points=line, class_=f"line c{min(group, NUM_SERIES)}"))
    for name, group, at, up in points:
        if up and group < NUM_SERIES:
            parts.append(_mark(group, x.place(at), y.place(up), name))
        else:
            kind = f"ring c{min(group, NUM_SERIES)}"
            height = y.place(up) if up else _TOP - 6.0
            parts.append(tag("circle", tag("title", name), cx=x.place(at), cy=height, r=5, class_=kind))
    return _paper(title, groups, {group for _, group, *_ in points}, parts)


def _spans(values: Sequence[float]) -> bool:
    return max(values) / min(values) > 20


def _mark(group: int, x: float, y: float, name: str) -> Markup:
    return tag("g", tag("title", name), marker(group), transform=f"translate({x:.1f} {y:.1f})")


def _names(ends: Sequence[tuple[tuple[float, float], Series]]) -> Markup:
    """Write names beside the right ends, moved apart where they would lie on each other."""
    parts, last = [], -math.inf
    ordered = sorted(ends, key=lambda row: row[0][1])
    floor = _BASE - 14 * (len(ordered) - 1)
    for index, ((x, y), row) in enumerate(ordered):
        at = max(last + 14, min(y, floor + 14 * index))
        kind = f"leader c{min(row.group, NUM_SERIES)}"
        parts.append(tag("line", x1=x + 7, y1=y, x2=_RIGHT + 14, y2=at, stroke_width=0.7, class_=kind))
        parts.append(tag("text", row.name, x=_RIGHT + 18, y=at + 4, class_="tick"))
        last = at
    return join(parts)


def _paper(title: str, groups: Sequence[str], used: set[int], parts: Sequence[Markup]) -> Markup:
    legend, place = [], _LEFT
    for group in sorted(used):
        sign = marker(group) if group < NUM_SERIES else tag("circle", r=5, class_=f"ring c{NUM_SERIES}")
        text = tag("text", groups[group], x=12, y=5)
        legend.append(tag("g", sign, text, transform=f"translate({place} 50)"))
        place += 40 + 8 * len(groups[group])
    return tag(
        "svg",
        tag("style", STYLE),
        tag("rect", width=_WIDTH, height=_HEIGHT, rx=8, fill="#faf9f5"),
        tag("text", title, x=24, y=26, class_="row"),
        join(legend),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        width=_WIDTH,
        height=_HEIGHT,
    )
