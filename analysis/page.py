"""The report's page: headline, key figures and sections in one file that needs no network and no script."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from espalier.analysis import sections
from espalier.analysis.example_trajectories import ExampleProblem
from espalier.analysis.markup import Markup, join, tag
from espalier.analysis.run_files import Interval, LossCurves, Meta, PolicyEvaluation, RewardModelQuality
from espalier.analysis.step_tables import examples_section
from espalier.analysis.summary import Differences

STYLE = Path(__file__).with_name("page.css")
# Nothing may be fetched and nothing may run, whatever text a model has written.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_LEAF = "M12 22V3M12 18H3V13M12 18h9v-5M12 11H5V7M12 11h7V7"


@dataclass(frozen=True)
class ReportData:
    """Everything the page shows. `credit_pages`, `timeline_pages`: run of reinforcement learning → address of its page
    of step credit, and of its timeline; "" where it was not made."""

    name: str
    evaluations: Mapping[str, PolicyEvaluation]
    differences: Differences
    prm: RewardModelQuality
    losses: Mapping[str, LossCurves]
    missing_losses: Sequence[str]
    examples: Sequence[ExampleProblem]
    seconds: Mapping[str, float]
    metas: Sequence[Meta]
    pairs: Sequence[Meta]
    credit_pages: Mapping[str, str]
    timeline_pages: Mapping[str, str]


def _headline(data: ReportData) -> Markup:
    before, after = (data.evaluations[name].accuracy["greedy"].mean for name in ("sft", "process_dpo"))
    gain, over_dpo = (data.differences["process_dpo", other]["greedy"] for other in ("sft", "dpo"))
    change = f"{100 * before:.1f}\u00a0% → {100 * after:.1f}\u00a0%"
    sentence = [f"From sft to process_dpo on {gain.n:,} test problems: paired difference ", _points(gain)]
    sentence += [", and ", _points(over_dpo), " against dpo on outcomes alone."]
    return join(
        [
            tag("h1", "process_dpo greedy ", tag("span", change, class_="up" if after > before else "down")),
            tag("p", *sentence, class_="lead"),
        ]
    )


def _points(value: Interval) -> Markup:
    shown = f"{sections.signed(value.mean)} points [{sections.signed(value.low)}, {sections.signed(value.high)}]"
    return join([tag("span", shown), "" if value.is_clear else " (not distinguishable from 0)"])


def _key_figures(data: ReportData) -> Markup:
    outcome = data.evaluations["dpo"].accuracy["greedy"].mean
    area = data.prm.inner.auc
    against = "" if data.prm.target == "values" else ", against their labels"
    best, which = max(
        (value.mean, f"{policy}, {sections.metric_name(name)}")
        for policy, evaluation in data.evaluations.items()
        for name, value in evaluation.accuracy.items()
    )
    figures = [
        (f"{100 * outcome:.1f} %", "dpo on outcomes alone, greedy"),
        (f"{100 * best:.1f} %", f"highest accuracy: {which}"),
        ("none" if area is None else f"{area.mean:.3f}", f"AUC of the PRM on held-out inner steps{against}"),
        (sections.duration(sum(data.seconds.values())), "for all stages"),
    ]
    return sections.tiles(figures)


def render_report(data: ReportData) -> str:
    """Return the whole document. Every text of the run is escaped by `analysis.markup`."""
    parts = [
        sections.accuracy_section(data.evaluations, data.differences),
        sections.loss_section(data.losses, data.missing_losses),
        sections.calibration_section(data.prm),
        examples_section(data.examples),
        sections.seconds_section(data.seconds),
        sections.counts_section(data.metas, data.pairs),
    ]
    names = ["accuracy", "losses", "calibration", "examples", "seconds", "counts"]
    if data.credit_pages:
        parts.append(sections.credit_section(data.credit_pages, data.timeline_pages))
        names.append("credit")
    return render_page(data.name, [_headline(data), _key_figures(data), *parts], names)


def render_page(name: str, main: Sequence[str], links: Sequence[str], style: str = "") -> str:
    """Return a document without a script: its parts under a bar of `links` (ids of sections); `style` is CSS of its
    own."""
    logo = tag("svg", tag("path", d=_LEAF), viewBox="0 0 24 24", class_="logo", aria_hidden="true")
    brand = tag("div", logo, tag("b", "Espalier"), tag("span", name, class_="muted"), class_="brand")
    nav = tag("nav", *(tag("a", link, href=f"#{link}") for link in links), aria_label="sections")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("link", rel="icon", href="data:,"),
        tag("title", f"Espalier: {name}"),
        tag("style", Markup(STYLE.read_text(encoding="utf-8") + style)),
    )
    body = tag("body", tag("header", brand, nav), tag("main", *main))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"
