"""The picture of the credit benchmark: how right the gradient of a batch is, over what an estimator costs in tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from espalier.analysis.accuracy_figure import PAPER_STYLE
from espalier.analysis.charts import Axis, frame
from espalier.analysis.markup import tag

_WIDTH, _HEIGHT = 720, 460
_LINE, _LETTER = 14, 7.5  # heights and widths of names


@dataclass(frozen=True)
class Point:
    """An estimator: tokens generated in all per rollout token (1: the rollouts alone), and means over policies of the
    cosine and of the ends of its interval."""

    name: str
    tokens: float
    cosine: float
    low: float
    high: float


def draw(tasks: Mapping[str, Sequence[Point]]) -> str:
    """Return the SVG: a panel per task, names beside the points, moved apart where they would lie on one another."""
    height = _HEIGHT * len(tasks)
    panels = [tag("g", *panel(task, points), transform=f"translate(0 {_HEIGHT * number})")
              for number, (task, points) in enumerate(tasks.items())]  # fmt: skip
    svg = tag(
        "svg",
        tag("style", PAPER_STYLE),
        tag("rect", width=_WIDTH, height=height, rx=8, fill="#faf9f5"),
        *panels,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_WIDTH} {height}",
        width=_WIDTH,
        height=height,
    )
    return f"{svg}\n"


def panel(task: str, points: Sequence[Point]) -> list[str]:
    """Return the marks of one task."""
    x = Axis(0.9, max(2.0, *(point.tokens for point in points)) * 2.5, 60, _WIDTH - 24, is_log=True)
    lowest = min(0.4, *(point.low for point in points))
    y = Axis(max(-1.0, lowest) - 0.02, 1.03, _HEIGHT - 56, 58)
    parts = []
    taken: list[tuple[float, float, float]] = []  # names: left, right, line
    for number, point in enumerate(sorted(points, key=lambda one: -one.cosine)):
        across, up = x.place(point.tokens), y.place(point.cosine)
        left, right, at = across + 22, across + 26 + _LETTER * len(point.name), up + 4
        while any(left < end and start < right and abs(at - line) < _LINE for start, end, line in taken):
            at += 1
        taken.append((left, right, at))
        shown = tag("title", f"{point.name}: cosine {point.cosine:.3f} [{point.low:.3f}, {point.high:.3f}], "
                             f"{point.tokens:.2f} tokens per rollout token")  # fmt: skip
        parts += [
            tag("line", x1=across, x2=across, y1=y.place(point.low), y2=y.place(point.high), class_="grid"),
            tag("line", x1=across + 5, x2=across + 20, y1=up, y2=at - 4, class_="grid"),
            tag("circle", shown, cx=across, cy=up, r=4.5, class_=f"mark c{number % 5}"),
            tag("text", point.name, x=left, y=at, class_="num"),
        ]
    title = f"{task}: cosine of a batch with the policy gradient, mean over policies"
    return [
        tag("text", title, x=24, y=26, class_="row"),
        frame(x, y, "generated tokens per rollout token (log scale)", "cosine"),
        *parts,
    ]
