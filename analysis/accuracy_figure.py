"""summary.json of a finished run → a figure of its accuracies as an SVG file that stands alone.

    python run_stage.py -cn pages/draw_accuracies input=experiments/quickstart/summary.json output=accuracies.svg

The figure of docs/ is drawn from docs/quickstart.json, the summary.json of the run that the first page shows.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from espalier.analysis.charts import interval_chart, marker
from espalier.analysis.markup import Markup, join, tag
from espalier.analysis.run_files import Interval
from espalier.analysis.sections import metric_name
from espalier.data.records import BadInput
from espalier.pipeline.stage import StageContext

_WIDTH, _MARGIN, _HEAD = 720, 24, 64
PAPER_STYLE = Markup(
    "text{font:14px system-ui,-apple-system,'Segoe UI',Roboto,'Liberation Sans',Arial,sans-serif;fill:#1c2420}"
    ".tick{font-size:12px;fill:#66706a}.row{font-weight:600}.num{font-size:13px}.end{text-anchor:end}"
    ".mid{text-anchor:middle}.grid{stroke:#e4e3dc}.hover{fill:none}.range{stroke-width:3;stroke-linecap:round}"
    "line.c0{stroke:#7d8790}line.c1{stroke:#c4812a}line.c2{stroke:#2c7a57}line.c3{stroke:#5b69bd}line.c4{stroke:#a2557f}"
    ".mark.c0{fill:#7d8790}.mark.c1{fill:#c4812a}.mark.c2{fill:#2c7a57}.mark.c3{fill:#5b69bd}.mark.c4{fill:#a2557f}"
)
"""of every figure that stands alone"""


@dataclass(frozen=True)
class DrawAccuracies:
    """Draws one group of lines for each metric, one line for each policy."""

    metrics: list[str]
    """of summary.json, in the order of the figure"""

    def inputs(self) -> list[str]:
        """None beside the summary."""
        return []

    def run(self, input_path: str, context: StageContext) -> str:
        """Return the figure. Raises BadInput where the file has no such accuracies."""
        with open(input_path, encoding="utf-8") as file:
            try:
                accuracies = json.load(file)["accuracy"]
                rows = [
                    (metric_name(metric), [(i, policy, Interval(**values[metric]))
                                           for i, (policy, values) in enumerate(accuracies.items())])
                    for metric in self.metrics
                ]  # fmt: skip
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise BadInput(f"{input_path}: not the summary.json of a finished run ({error!r}): give one that holds "
                               f"the metrics {', '.join(self.metrics)}") from None  # fmt: skip
        return f"{figure(rows, list(accuracies))}\n"


def figure(rows: list[tuple[str, list[tuple[int, str, Interval]]]], policies: list[str]) -> Markup:
    """Return the chart of `analysis.charts` on paper, with its legend and style."""
    number = max(value.n for _, values in rows for _, _, value in values)
    height = 30 + len(rows) * (37 + 18 * len(policies))
    legend, place = [], _MARGIN + 8
    for series, policy in enumerate(policies):
        legend.append(tag("g", marker(series), tag("text", policy, x=12, y=5), transform=f"translate({place} 48)"))
        place += 46 + 8 * len(policy)
    attributes: Mapping[str, str | int] = {"x": _MARGIN, "y": _HEAD, "width": _WIDTH - 2 * _MARGIN, "height": height}
    return tag(
        "svg",
        tag("style", PAPER_STYLE),
        tag("rect", width=_WIDTH, height=_HEAD + height + 12, rx=8, fill="#faf9f5"),
        tag("text", f"Accuracy on {number:,} test problems, with 95 % intervals", x=_MARGIN, y=26, class_="row"),
        join(legend),
        tag("svg", interval_chart(rows, "Accuracy of every policy by metric"), **attributes),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_WIDTH} {_HEAD + height + 12}",
        width=_WIDTH,
        height=_HEAD + height + 12,
    )
