"""measure_calibration's JSON of one or several policies → a reliability diagram as an SVG file that stands alone.

    python run_stage.py -cn pages/draw_reliability input=sft.json 'stage.others=[rl.json]' 'stage.names=[SFT,RL]' \\
        output=reliability.svg

Every bin is a mark at (mean confidence, share that is right) with its 95 % interval; on the diagonal both are the same.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from espalier.analysis.charts import NUM_SERIES, Axis, dashes, frame, marker
from espalier.analysis.curve_figure import STYLE
from espalier.analysis.markup import Markup, join, tag
from espalier.data.records import BadInput
from espalier.pipeline.stage import StageContext

_SIZE, _LEFT, _HEAD = 420, 60, 40


@dataclass(frozen=True)
class DrawReliability:
    """`others`: further files beside the input. `names`: one each, in their order. Bins are those of equal width."""

    others: list[str]
    names: list[str]

    def __post_init__(self) -> None:
        if len(self.names) > 2 * NUM_SERIES:
            raise BadInput(
                f"stage.names: a figure tells {2 * NUM_SERIES} lines apart, got {len(self.names)}: draw several"
            )
        if len(self.names) != len(self.others) + 1:
            raise BadInput(f"stage.names must name the input and stage.others: {len(self.others) + 1} are wanted, got "
                           f"{len(self.names)}")  # fmt: skip

    def inputs(self) -> list[str]:
        """Return the further files."""
        return list(self.others)

    def run(self, input_path: str, context: StageContext) -> str:
        """Return the figure. Raises BadInput where a file is none of measure_calibration."""
        series = []
        for name, path in zip(self.names, [input_path, *self.others], strict=True):
            with open(path, encoding="utf-8") as file:
                try:
                    measured = json.load(file)
                    error = measured["figures"]["ece_equal_width"]["mean"]
                    rows = [{key: float(row[key]) for key in ("score", "value", "low", "high", "count")}
                            for row in measured["equal_width_bins"]]  # fmt: skip
                except (ValueError, KeyError, TypeError, AttributeError) as error_found:
                    raise BadInput(f"{path}: not written by evaluation/measure_calibration ({error_found!r})") from None
            series.append((f"{name}: calibration error {error:.3f}", rows))
        return f"{reliability_figure('What is stated, and how often it is right', series)}\n"


def reliability_figure(title: str, series: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> Markup:
    """Return the diagram of named bins (`calibration_metrics.bins_with_intervals`); areas of marks grow with counts."""
    top = _HEAD + 22 * len(series) + 20
    x, y = Axis(0, 1, _LEFT, _LEFT + _SIZE), Axis(0, 1, top + _SIZE, top)
    parts = [frame(x, y, "confidence", "share that is right")]
    parts.append(tag("line", x1=x.place(0), y1=y.place(0), x2=x.place(1), y2=y.place(1), class_="axis dashed"))
    for place, (name, rows) in enumerate(series):
        kind = f"c{place % NUM_SERIES}"
        legend = tag(
            "g", marker(place), tag("text", name, x=12, y=5), transform=f"translate({_LEFT} {50 + 22 * place})"
        )
        line = " ".join(f"{x.place(row['score']):.1f},{y.place(row['value']):.1f}" for row in rows)
        parts += [legend, tag("polyline", points=line, class_=f"line {kind}", stroke_dasharray=dashes(place))]
        total = sum(row["count"] for row in rows)
        for row in rows:
            at, scale = x.place(row["score"]), 0.7 + 0.9 * (row["count"] / total) ** 0.5
            text = f"{row['count']:.0f} answers: stated {row['score']:.3f}, right {row['value']:.3f} " \
                   f"[{row['low']:.3f}, {row['high']:.3f}]"  # fmt: skip
            bar = tag("line", x1=at, x2=at, y1=y.place(row["low"]), y2=y.place(row["high"]), class_=f"leader {kind}")
            mark = tag("g", tag("title", text), marker(place),
                       transform=f"translate({at:.1f} {y.place(row['value']):.1f}) scale({scale:.2f})")  # fmt: skip
            parts += [bar, mark]
    width, height = _LEFT + _SIZE + 40, top + _SIZE + 50
    return tag(
        "svg",
        tag("style", STYLE),
        tag("rect", width=width, height=height, rx=8, fill="#faf9f5"),
        tag("text", title, x=24, y=26, class_="row"),
        join(parts),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=height,
    )
