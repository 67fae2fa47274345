"""Charts of labelled steps as inline SVG: columns, and columns stacked by value."""

from collections.abc import Sequence
from dataclasses import dataclass

from espalier.analysis.markup import Markup, tag

_LEFT, _RIGHT, _TOP, _BASE = 46, 410, 24, 188


@dataclass(frozen=True)
class Column:
    """Parts of a column from its foot up, (class, amount), its label below and what it tells when pointed at."""

    label: str
    parts: Sequence[tuple[str, float]]
    title: str

    @property
    def height(self) -> float:
        """The sum of its parts."""
        return sum(amount for _, amount in self.parts)


def column_chart(columns: Sequence[Column], x_label: str, y_label: str, label: str) -> Markup:
    """Return columns beside each other; the y axis ends at the highest, at 100 where `y_label` is in per cent."""
    is_percent = y_label.startswith("%")
    highest = 100.0 if is_percent else max([column.height for column in columns] + [1.0])
    width = (_RIGHT - _LEFT) / max(1, len(columns))
    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _BASE - share * (_BASE - _TOP)
        parts.append(tag("line", x1=_LEFT, x2=_RIGHT, y1=y, y2=y, class_="axis" if share == 0 else "grid"))
        if is_percent or share in (0.0, 1.0):
            parts.append(tag("text", f"{highest * share:,.0f}", x=_LEFT - 8, y=y + 4, class_="tick end"))
    every = max(1, -(-len(columns) // 12))
    for number, column in enumerate(columns):
        x, base = _LEFT + number * width, float(_BASE)
        for kind, amount in column.parts:
            height = amount / highest * (_BASE - _TOP)
            base -= height
            parts.append(
                tag("rect", x=x + 0.1 * width, width=0.8 * width, y=base, height=height, class_=f"fill {kind}")
            )
        title = tag("title", column.title)
        parts.append(tag("rect", title, x=x, width=width, y=_TOP, height=_BASE - _TOP, class_="hover"))
        if number % every == 0:
            parts.append(tag("text", column.label, x=x + width / 2, y=_BASE + 17, class_="tick mid"))
    parts.append(tag("text", x_label, x=_RIGHT, y=_BASE + 35, class_="tick end"))
    parts.append(tag("text", y_label, x=_LEFT, y=_TOP - 9, class_="tick"))
    return tag("svg", *parts, viewBox="0 0 424 228", class_="chart", role="img", aria_label=label)


def value_class(value: float) -> str:
    """Return one of five colours, red to green, by fifths."""
    return f"v{min(4, max(0, int(value * 5)))}"
