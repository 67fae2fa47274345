"""The figure of the credit benchmark: how right the gradient of an estimator is, over what it costs in tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from espalier.analysis.accuracy_figure import PAPER_STYLE
from espalier.analysis.charts import Axis, frame
from espalier.analysis.markup import tag

_WIDTH, _HEIGHT = 720, 420
_LINE = 15  # between two names, at least


@dataclass(frozen=True)
class Point:
    """An estimator: tokens generated in all per rollout token (1: the rollouts alone), mean cosine, and its range over
    policies."""

    name: str
    tokens: float
    cosine: float
    low: float
    high: float


def draw(points: Sequence[Point]) -> str:
    """Return the SVG: names beside the points, moved apart where they would lie on one another."""
    x = Axis(0.9, max(2.0, *(point.tokens for point in points)) * 2.5, 60, _WIDTH - 24, is_log=True)
    y = Axis(min(0.0, *(point.low for point in points)) - 0.02, 1.04, _HEIGHT - 56, 58)
    parts = []
    below: dict[int, float] = {}  # column of names → where the last one stands
    for number, point in enumerate(sorted(points, key=lambda one: -one.cosine)):
        across, up = x.place(point.tokens), y.place(point.cosine)
        column = round(across / 60)
        at = max(up + 4, below.get(column, 0.0) + _LINE)
        below[column] = at
        colour = f"c{number % 5}"
        title = tag("title", f"{point.name}: cosine {point.cosine:.3f} [{point.low:.3f}, {point.high:.3f}], "
                             f"{point.tokens:.2f} tokens per rollout token")  # fmt: skip
        parts += [
            tag("line", x1=across, x2=across, y1=y.place(point.low), y2=y.place(point.high), class_=f"range {colour}"),
            tag("circle", title, cx=across, cy=up, r=4.5, class_=f"mark {colour}"),
            tag("line", x1=across + 5, x2=across + 18, y1=up, y2=at - 4, class_="grid"),
            tag("text", point.name, x=across + 20, y=at, class_="num"),
        ]
    svg = tag(
        "svg",
        tag("style", PAPER_STYLE),
        tag("rect", width=_WIDTH, height=_HEIGHT, rx=8, fill="#faf9f5"),
        tag("text", "Cosine with the exact policy gradient: mean and range over policies", x=24, y=26, class_="row"),
        frame(x, y, "generated tokens per rollout token (log scale)", "cosine"),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        width=_WIDTH,
        height=_HEIGHT,
    )
    return f"{svg}\n"
