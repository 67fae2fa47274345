"""The inspector's page: statistics of every step as charts, then the trajectories themselves."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from espalier.analysis.embedded import Embedded
from espalier.analysis.flags import KINDS, Suspicion
from espalier.analysis.inspected import Inspected
from espalier.analysis.markup import Markup, join, printable, tag
from espalier.analysis.script_page import render_script_page
from espalier.analysis.sections import note, section, table, tiles
from espalier.analysis.step_figures import figures, length_tables
from espalier.pipeline.values.step_statistics import impossible_patterns


@dataclass(frozen=True)
class InspectorData:
    """`rows` and `found` are all trajectories with their flags; `embedded` holds those the page shows."""

    name: str
    rows: Sequence[Inspected]
    found: Sequence[Sequence[Suspicion]]
    embedded: Embedded
    num_completions: int


def _suspicion_table(data: InspectorData) -> Markup:
    counts = Counter(kind for flags in data.found for kind in {one.kind for one in flags})
    rows = [
        [tag("a", name, href=f"#kinds={key}"), f"{counts[key]:,}", f"{100 * counts[key] / len(data.rows):.1f}", meaning]
        for key, (name, meaning) in KINDS.items()
    ]
    head = tag("tr", *(tag("th", name, scope="col") for name in ("suspicion", "trajectories", "%", "what it means")))
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body), class_="kinds"), class_="scroll")


def _impossible_list(data: InspectorData) -> Markup:
    patterns = [pattern for row in data.rows for pattern in impossible_patterns(row.steps)]
    if not patterns:
        return note("No state without a right completion is followed by a right one.")
    patterns.sort(key=lambda pattern: pattern["chance"])
    improbable = sum(pattern["chance"] < 0.01 for pattern in patterns)
    shown = set(data.embedded.index.get("id", ()))
    rows = []
    for pattern in patterns[:12]:
        name = printable(str(pattern["trajectory"]))
        link = tag("a", name, href=f"#t={quote(name, safe='')}") if name in shown else name
        cells = (
            f"{pattern['step']}",
            f"{pattern['later_step']}",
            f"0 of {pattern['num_completions']}",
            f"{pattern['chance']:.2g}",
        )
        rows.append([link, *cells])
    text = (
        f"{len(patterns):,} steps without a right completion are followed by a right one; of {improbable:,} the "
        "chance is below 1 % (look for a fault in grading or joining). The least possible:"
    )
    return join(
        [
            tag("h3", "Impossible patterns"),
            note(text),
            table(["trajectory", "step", "right after step", "completions", "chance"], rows),
        ]
    )


def _key_figures(data: InspectorData) -> Markup:
    rights = sum(row.trajectory.is_correct for row in data.rows)
    known = [value for row in data.rows for value in row.steps.values[:-1] if value is not None]
    suspicious = sum(bool(flags) for flags in data.found)
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


def size_sentences(data: InspectorData) -> list[str]:
    """Say what the page holds and what was left out, in sentences."""
    embedded = data.embedded
    num = len(embedded.index.get("id", ()))
    sentences = [f"This page holds {num:,} trajectories and {embedded.num_completions:,} completions "
                 f"in {embedded.num_bytes / 1e6:.1f} MB."]  # fmt: skip
    if num < len(data.rows):
        sentences.append(f"{len(data.rows) - num:,} trajectories are left out (stage.max_trajectories), "
                         "the least suspicious first; the statistics are of all.")  # fmt: skip
    if embedded.num_left_out:
        sentences.append(f"{embedded.num_left_out:,} completions are left out (stage.max_completions, "
                         "stage.max_megabytes).")  # fmt: skip
    return sentences


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
            tag("p", "reading …", id="status", role="status"),
            tag("noscript", note("The trajectories need JavaScript; the statistics do not.")),
            tag("div", id="list"),
            Markup('<button id="more" type="button" hidden>show more</button>'),
        ]
    )  # fmt: skip


def _statistics(data: InspectorData) -> Markup:
    return section(
        "statistics",
        "Statistics of every step",
        tag("div", *figures(data.rows), class_="many"),
        length_tables(data.rows),
        _impossible_list(data),
    )


def render_inspector(data: InspectorData) -> str:
    """Return the whole document."""
    sentences = enumerate(size_sentences(data))
    paragraphs = [tag("p", text, class_="lead" if number == 0 else "cut") for number, text in sentences]
    main = [
        tag("h1", "Steps, read one by one"),
        *paragraphs,
        _key_figures(data),
        section("flags", "What is suspicious", _suspicion_table(data)),
        _statistics(data),
        section("trajectories", "Trajectories", _controls()),
    ]
    index = {"kinds": [[key, *texts] for key, texts in KINDS.items()], "index": data.embedded.index}
    links = ("flags", "statistics", "trajectories")
    return render_script_page(data.name, main, links, ["inspector.js"], index, data.embedded.blocks)
