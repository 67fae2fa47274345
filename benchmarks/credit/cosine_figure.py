"""The figure of the credit benchmark: how right the gradient of an estimator is, over what it costs in tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from espalier.analysis.accuracy_figure import PAPER_STYLE
from espalier.analysis.charts import Axis, frame
from espalier.analysis.markup import tag

_WIDTH, _HEIGHT = 720, 420
_LINE, _LETTER = 14, 7.5  # heights and widths of names


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
    y = Axis(min(0.4, *(point.cosine for point in points)) - 0.02, 1.03, _HEIGHT - 56, 58)
    parts = []
    taken: list[tuple[float, float, float]] = []  # names: left, right, line
    for number, point in enumerate(sorted(points, key=lambda one: -one.cosine)):
        across, up = x.place(point.tokens), y.place(point.cosine)
        left, right, at = across + 22, across + 26 + _LETTER * len(point.name), up + 4
        while any(left < end and start < right and abs(at - line) < _LINE for start, end, line in taken):
            at += 1
        taken.append((left, right, at))
        title = tag("title", f"{point.name}: cosine {point.cosine:.3f} [{point.low:.3f}, {point.high:.3f}], "
                             f"{point.tokens:.2f} tokens per rollout token")  # fmt: skip
        parts += [
            tag("line", x1=across + 5, x2=across + 20, y1=up, y2=at - 4, class_="grid"),
            tag("circle", title, cx=across, cy=up, r=4.5, class_=f"mark c{number % 5}"),
            tag("text", point.name, x=left, y=at, class_="num"),
        ]
    svg = tag(
        "svg",
        tag("style", PAPER_STYLE),
        tag("rect", width=_WIDTH, height=_HEIGHT, rx=8, fill="#faf9f5"),
        tag("text", "Cosine with the exact policy gradient: mean over policies", x=24, y=26, class_="row"),
        frame(x, y, "generated tokens per rollout token (log scale)", "cosine"),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        width=_WIDTH,
        height=_HEIGHT,
    )
    return f"{svg}\n"
