"""The figure beside an analyzer's JSON: panels of lines in one SVG file that stands alone, a colour for each name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from espalier.analysis.accuracy_figure import PAPER_STYLE
from espalier.analysis.charts import NUM_SERIES, Line, line_chart, marker
from espalier.analysis.markup import Markup, join, tag
from espalier.data.jsonl import open_atomic

_COLOURS = ("#7d8790", "#c4812a", "#2c7a57", "#5b69bd", "#a2557f")
_LINES = "".join(f"polyline.c{series}{{stroke:{colour};fill:none}}" for series, colour in enumerate(_COLOURS))
_LINE_STYLE = Markup(f"{PAPER_STYLE}polyline{{stroke-width:2;stroke-linejoin:round}}.axis{{stroke:#66706a}}{_LINES}")
_WIDTH, _PANEL_WIDTH, _PANEL_HEIGHT, _HEAD, _MARGIN = 900, 424, 240, 72, 24


@dataclass(frozen=True)
class Panel:
    """One chart: `lines` by name, a name's colour being the same in every panel."""

    x_label: str
    y_label: str
    lines: Mapping[str, Line]


def draw_panels(title: str, panels: Sequence[Panel]) -> Markup:
    """Return the panels that hold a point, two side by side, under the title and one legend."""
    shown = [panel for panel in panels if any(panel.lines.values())]
    names = list(dict.fromkeys(name for panel in shown for name in panel.lines))
    legend, place = [], _MARGIN + 8
    for series, name in enumerate(names):
        legend.append(tag("g", marker(series), tag("text", name, x=12, y=5), transform=f"translate({place} 52)"))
        place += 40 + 8 * len(name)
    charts = []
    for number, panel in enumerate(shown):
        lines = [(names.index(name), name, line) for name, line in panel.lines.items() if line]
        left = _MARGIN + (number % 2) * (_PANEL_WIDTH + 4)
        down = _HEAD + (number // 2) * _PANEL_HEIGHT
        chart = line_chart(lines, panel.x_label, panel.y_label)
        charts.append(tag("svg", chart, x=left, y=down, width=_PANEL_WIDTH, height=228))
    height, width = _HEAD + (len(shown) + 1) // 2 * _PANEL_HEIGHT, max(_WIDTH, place + _MARGIN)
    paper = tag("rect", width=width, height=height, rx=8, fill="#faf9f5")
    heading = tag("text", title, x=_MARGIN, y=28, class_="row")
    size: Mapping[str, str | int] = {"viewBox": f"0 0 {width} {height}", "width": width, "height": height}
    parts = [tag("style", _LINE_STYLE), paper, heading, join(legend), *charts]
    return tag("svg", *parts, xmlns="http://www.w3.org/2000/svg", **size)


def write_figure(output: Path, title: str, panels: Sequence[Panel]) -> None:
    """Write the figure as an SVG file beside `output`, under its name."""
    assert len(_COLOURS) == NUM_SERIES
    with open_atomic(output.with_suffix(".svg"), "utf-8") as file:
        file.write(f"{draw_panels(title, panels)}\n")
