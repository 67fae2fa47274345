"""Charts as inline SVG, without a library: losses, accuracies with intervals, calibration, bars.

Colours come from the page's style sheet by class, so one SVG serves light and dark. Line charts scale as a
whole; interval charts and bars place their marks in per cent and keep their text size at any width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from espalier.analysis.markup import Markup, join, tag
from espalier.analysis.run_files import Bin, Interval, LossCurves

# One shape for each series, so that colour alone carries nothing.
_SHAPES = (
    "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0z",
    "M-4.5-4.5h9v9h-9z",
    "M0-6.4L6.4 0L0 6.4L-6.4 0z",
    "M0-6L6 5H-6z",
    "M0 6L6-5H-6z",
)
NUM_SERIES = len(_SHAPES)


def marker(series: int) -> Markup:
    """Return the shape of a series, centred on the origin."""
    opacity = 0.4 if series >= NUM_SERIES else None
    return tag("path", d=_SHAPES[series % NUM_SERIES], class_=f"mark c{series % NUM_SERIES}", fill_opacity=opacity)


def dashes(series: int) -> str | None:
    """Return the `stroke_dasharray` of a series' line: from `NUM_SERIES` on, where colours and shapes come again, it is
    dashed, and its marks are pale."""
    return "5 4" if series >= NUM_SERIES else None


def legend_marker(series: int) -> Markup:
    """Return the shape of a series in a line of text."""
    return tag("svg", marker(series), viewBox="-8 -8 16 16", width=14, height=14, aria_hidden="true")


@dataclass(frozen=True)
class Axis:
    """Maps [low, high] to the coordinates [start, end], linearly or by the logarithm."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def place(self, value: float) -> float:
        """Return the coordinate of a value."""
        low, high = (math.log(self.low), math.log(self.high)) if self.is_log else (self.low, self.high)
        share = ((math.log(value) if self.is_log else value) - low) / (high - low)
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 4) -> list[float]:
        """Round values within the axis, about `count`."""
        if self.is_log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            ticks = [base * 10.0**power for power in powers for base in (1, 3)]
        else:
            rough = (self.high - self.low) / count
            unit = 10.0 ** math.floor(math.log10(rough))
            step = unit * next(base for base in (1, 2, 2.5, 5, 10) if base * unit >= rough * 0.999)
            first = math.ceil(self.low / step - 1e-9)
            ticks = [step * (first + index) for index in range(math.floor(self.high / step + 1e-9) - first + 1)]
        return [value for value in ticks if self.low * 0.999 <= value <= self.high * 1.001]


def value_axis(values: Sequence[float], start: float, end: float) -> Axis:
    """Return an axis around the values: by the logarithm where they span more than a factor of 20."""
    low, high = min(values), max(values)
    if low > 0 and high / low > 20:
        return Axis(low / 1.2, high * 1.2, start, end, True)
    margin = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    return Axis(low - margin, high + margin, start, end)


def _tick(value: float) -> str:
    return f"{value:,.0f}" if value >= 10_000 else f"{value:.4g}"


def frame(x: Axis, y: Axis, x_label: str, y_label: str) -> Markup:
    """Return grid lines, ticks and the two axis labels of a chart whose y axis points up."""
    parts = []
    for value in y.ticks():
        at = y.place(value)
        parts.append(tag("line", x1=x.start, x2=x.end, y1=at, y2=at, class_="grid"))
        parts.append(tag("text", _tick(value), x=x.start - 8, y=at + 4, class_="tick end"))
    for value in x.ticks():
        parts.append(tag("text", _tick(value), x=x.place(value), y=y.start + 17, class_="tick mid"))
    parts.append(tag("line", x1=x.start, x2=x.end, y1=y.start, y2=y.start, class_="axis"))
    parts.append(tag("text", x_label, x=x.end, y=y.start + 33, class_="tick end"))
    parts.append(tag("text", y_label, x=x.start, y=y.end - 9, class_="tick"))
    return join(parts)


def loss_chart(curves: LossCurves, label: str) -> Markup:
    """Return training loss as a line, evaluation loss as a line with marks, over optimizer steps."""
    points = [*curves.train, *curves.evaluation]
    x = Axis(0, max(1, *(step for step, _ in points)), 46, 410)
    y = value_axis([loss for _, loss in points], 188, 24)
    parts = [frame(x, y, "step", "loss (log scale)" if y.is_log else "loss")]
    for name, kind, rows in (("train", "c0", curves.train), ("eval", "c2", curves.evaluation)):
        path = " ".join(f"{x.place(step):.1f},{y.place(loss):.1f}" for step, loss in rows)
        parts.append(tag("polyline", points=path, class_=f"line {kind}"))
        for step, loss in rows:
            title = tag("title", f"{name} loss {loss:.4g} at step {step}")
            at = {"cx": x.place(step), "cy": y.place(loss)}
            if name == "eval":
                parts.append(tag("circle", r=3.5, class_=f"mark {kind}", **at))
            parts.append(tag("circle", title, r=7, class_="hover", **at))
    return tag("svg", *parts, viewBox="0 0 424 228", class_="chart", role="img", aria_label=label)


Line = Sequence[tuple[float, float]]


def line_chart(lines: Sequence[tuple[int, str, Line]], x_label: str, y_label: str) -> Markup:
    """Return lines with marks, (series, name, points (x, y)), on common axes; at least one point in all."""
    points = [point for _, _, line in lines for point in line]
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    x = Axis(low, high if high > low else low + 1, 46, 410)
    y = value_axis([value for _, value in points], 188, 24)
    parts = [frame(x, y, x_label, f"{y_label} (log scale)" if y.is_log else y_label)]
    for series, name, line in lines:
        places = [(x.place(at), y.place(value)) for at, value in line]
        path = " ".join(f"{at:.1f},{value:.1f}" for at, value in places)
        parts.append(
            tag("polyline", points=path, class_=f"line c{series % NUM_SERIES}", stroke_dasharray=dashes(series))
        )
        for (at, value), (across, down) in zip(line, places, strict=True):
            mark = tag("g", tag("title", f"{name}: {value:.4g} at {at:.6g}"), marker(series),
                       transform=f"translate({across:.1f} {down:.1f}) scale(.6)")  # fmt: skip
            parts.append(mark)
    return tag("svg", *parts, viewBox="0 0 424 228", class_="chart", role="img", aria_label=y_label)


def _interval_row(label: str, series: int, value: Interval, y: int) -> Markup:
    """Return a bar from low to high, the mean's mark and its number beside it, in per cent of the width."""
    mean, low, high = (_percent_place(share) for share in (value.mean, value.low, value.high))
    shown = f"{label}: {100 * value.mean:.1f} % [{100 * value.low:.1f}, {100 * value.high:.1f}], n = {value.n}"
    # The number stands right of the interval, else left of it, else on it: wherever there is room.
    is_left = value.high > 0.9 and value.low >= 0.1
    beside = high if value.high <= 0.9 else low if is_left else mean
    number = tag("text", f"{100 * value.mean:.1f}", x=-9 if is_left else 9, y=4, class_="num" + " end" * is_left)
    return tag(
        "g",
        tag("title", shown),
        tag("rect", x="0", width="100%", y=y - 8, height=16, class_="hover"),
        tag("line", x1=f"{low:.2f}%", x2=f"{high:.2f}%", y1=y, y2=y, class_=f"range c{series % NUM_SERIES}"),
        tag("svg", marker(series), x=f"{mean:.2f}%", y=y, overflow="visible"),
        tag("svg", number, x=f"{beside:.2f}%", y=y, overflow="visible"),
    )


def _percent_place(share: float) -> float:
    return 1.5 + 97.0 * share


def interval_chart(rows: Sequence[tuple[str, Sequence[tuple[int, str, Interval]]]], label: str) -> Markup:
    """Return accuracy in per cent: for each metric one line for each policy, (series, policy, interval)."""
    parts: list[Markup] = []
    y = 8
    for name, values in rows:
        if parts:
            parts.append(tag("line", x1="0", x2="100%", y1=y - 7, y2=y - 7, class_="grid"))
        parts.append(tag("text", name, x="0", y=y + 10, class_="row"))
        y += 27
        for series, policy, value in values:
            parts.append(_interval_row(policy, series, value, y))
            y += 18
        y += 10
    grid = []
    for percent in (0, 25, 50, 75, 100):
        at = f"{_percent_place(percent / 100):.2f}%"
        side = {0: "", 100: " end"}.get(percent, " mid")
        grid.append(tag("line", x1=at, x2=at, y1=0, y2=y, class_="grid"))
        grid.append(tag("text", f"{percent} %", x=at, y=y + 16, class_="tick" + side))
    return tag("svg", *grid, *parts, width="100%", height=y + 22, class_="wide", role="img", aria_label=label)


def calibration_chart(bins: Sequence[Bin], target: str, label: str) -> Markup:
    """Return mean score against mean `target` of every bin, with the diagonal; below, how many steps each bin holds."""
    x, y = Axis(0, 1, 46, 410), Axis(0, 1, 330, 24)
    diagonal = tag("line", x1=x.place(0), x2=x.place(1), y1=y.place(0), y2=y.place(1), class_="diagonal")
    parts = [frame(x, y, "PRM score", target), diagonal]
    path = " ".join(f"{x.place(row.score):.1f},{y.place(row.value):.1f}" for row in bins)
    parts.append(tag("polyline", points=path, class_="line c2 thin"))
    most = max(row.count for row in bins)
    base, tallest = 444, 56
    for row in bins:
        at, height = x.place(row.score), max(1.5, tallest * row.count / most)
        column = x.place((max(math.ceil(row.score * 10), 1) - 0.5) / 10)  # a score on a border is of the lower bin
        title = tag("title", f"{row.count} steps: mean score {row.score:.3f}, mean {target} {row.value:.3f}")
        parts += [
            tag(
                "circle",
                title,
                cx=at,
                cy=y.place(row.value),
                r=4 + 5 * math.sqrt(row.count / most),
                class_="dot c2",
            ),
            tag("rect", title, x=column - 15, width=30, y=base - height, height=height, class_="column"),
            tag("text", str(row.count), x=column, y=base - height - 5, class_="tick mid"),
        ]
    parts.append(tag("line", x1=x.start, x2=x.end, y1=base, y2=base, class_="axis"))
    parts.append(tag("text", "steps in each bin", x=x.start, y=base + 17, class_="tick"))
    return tag("svg", *parts, viewBox="0 0 424 468", class_="chart", role="img", aria_label=label)


def bar(share: float, kind: str, label: str) -> Markup:
    """Return a horizontal bar of `share` of the width it is given; `kind` is its class."""
    width = f"{100 * min(max(share, 0.0), 1.0):.1f}%"
    track = tag("rect", width="100%", height="100%", rx=3, class_="track")
    fill = tag("rect", tag("title", label), width=width, height="100%", rx=3, class_=f"fill {kind}")
    return tag("svg", track, fill, class_="bar", role="img", aria_label=label)
