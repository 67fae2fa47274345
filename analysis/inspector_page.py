"""The inspector's page: statistics of every step as charts, then the trajectories themselves.

One file without a network. The only script that may run is the page's own (the policy names its hash), and every
text of a model stands in packed blocks (`analysis.embedded`) or is escaped.
"""

import base64
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from analysis.embedded import Embedded, block, pack
from analysis.inspected import Inspected
from analysis.markup import Markup, join, printable, tag
from analysis.page import STYLE
from analysis.sections import note, section, table, tiles
from analysis.step_charts import Column, column_chart, value_class
from analysis.suspicions import KINDS, Suspicion
from pipeline.step_statistics import BINS, first_errors, impossible_patterns, length_bias, positions, widths

_SCRIPT = Path(__file__).with_name("inspector.js")
_OWN_STYLE = Path(__file__).with_name("inspector.css")


@dataclass(frozen=True)
class InspectorData:
    """`rows` and `found` are all trajectories with their suspicions; `embedded` holds those the page shows."""

    name: str
    rows: Sequence[Inspected]
    found: Sequence[Sequence[Suspicion]]
    embedded: Embedded
    num_completions: int


def _figure(title: str, told: str, chart: Markup) -> Markup:
    caption = tag("figcaption", tag("b", title), tag("span", told, class_="muted"))
    return tag("figure", caption, chart, class_="card")


def _positions_figure(data: InspectorData) -> Markup:
    columns = []
    for row in positions([one.steps for one in data.rows]):
        total = row["count"]
        shares = [(value_class((place + 0.5) / BINS), number) for place, number in enumerate(row["histogram"])]
        place = "last" if row["place"] == "last step" else row["place"]
        title = f"{row['place']}: {total:,} steps, mean value {_number(row['mean_value'])}, mean label "
        parts = [(kind, 100 * number / total) for kind, number in shares if number] if total else []
        columns.append(Column(place, parts, title + _number(row["mean_label"])))
    chart = column_chart(columns, "share of the way", "% of steps", "Values by position")
    return _figure("Values by position", "red 0 to green 1; the last step is the outcome", chart)


def _first_error_figures(data: InspectorData) -> list[Markup]:
    found = first_errors([one.steps for one in data.rows])
    known, wrong, last = found["known"], found["wrong"], found["at_last_step"]
    told = f"known of {known:,} of {wrong:,} wrong trajectories; {last:,} at the last step"
    steps = {int(step): number for step, number in found["by_step"].items()}
    columns = [
        Column(str(step), [("v0", steps.get(step, 0))], f"step {step}: {steps.get(step, 0):,} trajectories")
        for step in range(1, min(max(steps, default=1), 60) + 1)
    ]
    tenths = [
        Column(f"{place / BINS:.1f}", [("v0", number)], f"from {place / BINS:.1f} of the way: {number:,} trajectories")
        for place, number in enumerate(found["by_tenth"])
    ]
    return [
        _figure("First error by step", told, column_chart(columns, "step", "trajectories", "First error by step")),
        _figure(
            "First error by share of the way",
            "from there on every value is 0",
            column_chart(tenths, "share of the way", "trajectories", "First error by share of the way"),
        ),
    ]


def _length_figures(data: InspectorData) -> list[Markup]:
    lengths = [row.length for row in data.rows]
    low, high = min(lengths), max(lengths)
    size = max(1, -(-(high - low + 1) // BINS))
    right: Counter[int] = Counter()
    total: Counter[int] = Counter()
    for row, length in zip(data.rows, lengths, strict=True):
        total[(length - low) // size] += 1
        right[(length - low) // size] += row.trajectory.is_correct
    places = range(max(total) + 1)
    names = [f"{low + place * size:,} to {low + (place + 1) * size - 1:,}" for place in places]
    counts = [
        Column(f"{low + place * size}", [("v4", right[place]), ("v0", total[place] - right[place])],
               f"{name}: {right[place]:,} of {total[place]:,} right")
        for place, name in zip(places, names, strict=True)
    ]  # fmt: skip
    shares = [
        Column(f"{low + place * size}", [("v4", 100 * right[place] / total[place])] if total[place] else [],
               f"{name}: {right[place]:,} of {total[place]:,} right")
        for place, name in zip(places, names, strict=True)
    ]  # fmt: skip
    unit = "tokens" if any(row.trajectory.response_ids for row in data.rows) else "characters"
    return [
        _figure(
            "Length", "green right, red wrong", column_chart(counts, unit, "trajectories", "Trajectories by length")
        ),
        _figure(
            "Share right by length", "flat: no bias", column_chart(shares, unit, "% right", "Share right by length")
        ),
    ]


def _length_table(data: InspectorData) -> Markup:
    found = length_bias([one.steps for one in data.rows])
    rows = [
        [name, f"{found[name]['count']:,}", _number(found[name]["mean_steps"]), _number(found[name]["mean_tokens"])]
        for name in ("right", "wrong")
    ]
    correlations = [
        ["steps and outcome", _number(found["steps_and_outcome"])],
        ["tokens and outcome", _number(found["tokens_and_outcome"])],
        ["position and value", _number(found["position_and_value"])],
    ]
    return tag(
        "div",
        tag("div", table(["trajectories", "number", "mean steps", "mean tokens"], rows, "Length of right and wrong")),
        tag("div", table(["correlation", "Pearson"], correlations, "What length says")),
        class_="two",
    )


def _width_figure(data: InspectorData) -> Markup:
    found = widths([one.steps for one in data.rows])
    columns = [
        Column(
            f"{place / BINS:.1f}", [("c0", number)], f"{place / BINS:.1f} to {(place + 1) / BINS:.1f}: {number:,} steps"
        )
        for place, number in enumerate(found["histogram"])
    ]
    told = f"mean {_number(found['mean'])}; labels left out {found['left_out']:,}"
    return _figure("Width of the intervals", told, column_chart(columns, "width", "steps", "Width of the intervals"))


def _gap_figures(data: InspectorData) -> list[Markup]:
    figures = []
    for name, attribute in (("PRM", "scores"), ("Judge", "verdicts")):
        gaps: Counter[int] = Counter()
        for row in data.rows:
            for target, said in zip(row.targets(), getattr(row, attribute) or [], strict=False):
                if target is not None and said is not None:
                    gaps[min(9, max(-10, int((said - target) * 10 // 1)))] += 1
        if gaps:
            columns = [
                Column(f"{place / 10:+.1f}", [("c3", gaps[place])], f"from {place / 10:+.1f}: {gaps[place]:,} steps")
                for place in range(-10, 10)
            ]
            chart = column_chart(columns, f"{name} less label", "steps", f"{name} less label")
            figures.append(_figure(f"{name} against label", f"{sum(gaps.values()):,} steps", chart))
    return figures


def _suspicion_table(data: InspectorData) -> Markup:
    counts = Counter(kind for found in data.found for kind in {one.kind for one in found})
    rows = [
        [tag("a", name, href=f"#kinds={key}"), f"{counts[key]:,}", f"{100 * counts[key] / len(data.rows):.1f}", meaning]
        for key, (name, meaning) in KINDS.items()
    ]
    head = tag("tr", *(tag("th", name, scope="col") for name in ("suspicion", "trajectories", "%", "what it means")))
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body), class_="kinds"), class_="scroll")


def _impossible_list(data: InspectorData) -> Markup:
    patterns = [found for row in data.rows for found in impossible_patterns(row.steps)]
    if not patterns:
        return note("No state without a right completion is followed by a right one.")
    patterns.sort(key=lambda found: found["chance"])
    improbable = sum(found["chance"] < 0.01 for found in patterns)
    shown = set(data.embedded.index.get("id", ()))
    rows = []
    for found in patterns[:12]:
        name = printable(str(found["trajectory"]))
        link = tag("a", name, href=f"#t={quote(name, safe='')}") if name in shown else name
        cells = (
            f"{found['step']}",
            f"{found['later_step']}",
            f"0 of {found['num_completions']}",
            f"{found['chance']:.2g}",
        )
        rows.append([link, *cells])
    told = (
        f"{len(patterns):,} steps without a right completion are followed by a right one; of {improbable:,} the "
        "chance is below 1 % (look for a fault in grading or joining). The least possible:"
    )
    return join(
        [
            tag("h3", "Impossible patterns"),
            note(told),
            table(["trajectory", "step", "right after step", "completions", "chance"], rows),
        ]
    )


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"


def _key_figures(data: InspectorData) -> Markup:
    rights = sum(row.trajectory.is_correct for row in data.rows)
    known = [value for row in data.rows for value in row.steps.values[:-1] if value is not None]
    suspicious = sum(bool(found) for found in data.found)
    return tiles(
        [
            (
                f"{len(data.rows):,}",
                f"trajectories of {len({row.trajectory.problem_id for row in data.rows}):,} problems",
            ),
            (f"{100 * rights / len(data.rows):.1f} %", "right"),
            (
                f"{sum(len(row.trajectory.steps) for row in data.rows):,}",
                f"steps, {len(known):,} with a value before the last",
            ),
            (f"{data.num_completions:,}", "completions"),
            (f"{suspicious:,}", "suspicious"),
        ]
    )


def size_told(data: InspectorData) -> list[str]:
    """What the page holds and what was left out, in sentences."""
    embedded = data.embedded
    num = len(embedded.index.get("id", ()))
    told = [f"This page holds {num:,} trajectories and {embedded.num_completions:,} completions "
            f"in {embedded.num_bytes / 1e6:.1f} MB."]  # fmt: skip
    if num < len(data.rows):
        told.append(f"{len(data.rows) - num:,} trajectories are left out (stage.max_trajectories), "
                    "the least suspicious first; the statistics are of all.")  # fmt: skip
    if embedded.num_left_out:
        told.append(f"{embedded.num_left_out:,} completions are left out (stage.max_completions, stage.max_megabytes).")
    return told


def _controls() -> Markup:
    where = [("ids", "ids"), ("text", "prompts and steps"), ("completions", "completions")]
    outcomes = [("", "right and wrong"), ("1", "right"), ("0", "wrong")]

    def select(name: str, label: str, options: Sequence[tuple[str, str]]) -> Markup:
        written = (tag("option", text, value=key) for key, text in options)
        return tag("label", label, tag("select", *written, id=name))

    search = Markup('<input id="q" type="search" placeholder="search" aria-label="search" autocomplete="off">')
    return join(
        [
            tag("div", search, select("in", "in", where), select("right", "outcome", outcomes),
                select("sort", "sorted by", []), class_="controls"),
            tag("div", id="chips"),
            tag("p", "reading …", id="told", role="status"),
            tag("noscript", note("The trajectories need JavaScript; the statistics do not.")),
            tag("div", id="list"),
            Markup('<button id="more" type="button" hidden>show more</button>'),
        ]
    )  # fmt: skip


def _statistics(data: InspectorData) -> Markup:
    figures = [
        _positions_figure(data),
        *_first_error_figures(data),
        _width_figure(data),
        *_length_figures(data),
        *_gap_figures(data),
    ]
    return section(
        "statistics",
        "Statistics of every step",
        tag("div", *figures, class_="many"),
        _length_table(data),
        _impossible_list(data),
    )


def render_inspector(data: InspectorData) -> str:
    """The whole document."""
    script = _SCRIPT.read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    style = STYLE.read_text(encoding="utf-8") + _OWN_STYLE.read_text(encoding="utf-8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("link", rel="icon", href="data:,"),
        tag("title", f"Espalier: {data.name}"),
        tag("style", Markup(style)),
    )
    told = [tag("p", text, class_="lead" if number == 0 else "cut") for number, text in enumerate(size_told(data))]
    main = tag(
        "main",
        tag("h1", "Steps, read one by one"),
        *told,
        _key_figures(data),
        section("suspicions", "What is suspicious", _suspicion_table(data)),
        _statistics(data),
        section("trajectories", "Trajectories", _controls()),
    )
    brand = tag("div", tag("b", "Espalier"), tag("span", data.name, class_="muted"), class_="brand")
    names = ("suspicions", "statistics", "trajectories")
    links = tag("nav", *(tag("a", name, href=f"#{name}") for name in names), aria_label="sections")
    header = tag("header", brand, links)
    kinds = [[key, *told] for key, told in KINDS.items()]
    index: Mapping[str, Any] = {"kinds": kinds, "index": data.embedded.index}
    blocks = [block("index", pack(index))]
    blocks += [block(f"block-{number}", packed) for number, packed in enumerate(data.embedded.blocks)]
    body = tag("body", header, main, *blocks, tag("script", Markup(script)))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"
