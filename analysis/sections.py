"""The report's sections: accuracy, losses, calibration, seconds, counts and provenance.

Each function returns one `<section>`; what a run does not have is said in a sentence.
"""

from collections.abc import Mapping, Sequence

from espalier.analysis.charts import bar, calibration_chart, interval_chart, legend_marker, loss_chart
from espalier.analysis.markup import Markup, join, tag
from espalier.analysis.run_files import Interval, LossCurves, Meta, PolicyEvaluation, RewardModelQuality
from espalier.analysis.summary import Differences

# sft, dpo and process_dpo keep their colours whatever else is evaluated.
_SERIES = {"sft": 0, "dpo": 1, "process_dpo": 2}


def section(name: str, title: str, *parts: str) -> Markup:
    """Return a section with its anchor and heading."""
    return tag("section", tag("h2", title), *parts, id=name)


def note(text: str) -> Markup:
    """Return a paragraph in small print."""
    return tag("p", text, class_="note")


def tiles(figures: Sequence[tuple[str, str]]) -> Markup:
    """Return large figures, each with what it is."""
    cells = (tag("div", tag("b", figure), tag("span", text)) for figure, text in figures)
    return tag("div", *cells, class_="tiles")


def two_columns(left: str, right: str) -> Markup:
    """Return side by side, one above the other where the page is narrow."""
    return tag("div", tag("div", left), tag("div", right), class_="two")


def table(header: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> Markup:
    """Return a table that scrolls by itself where it is too wide; the first cell of a row is its heading."""
    head = tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in header)))
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", c) for c in row[1:])) for row in rows]
    written = tag("table", head, tag("tbody", *body))
    label = title or ", ".join(header)
    box = tag("div", written, class_="scroll", tabindex=0, role="region", aria_label=label)
    return join([tag("h3", title), box]) if title else box


def metric_name(name: str) -> str:
    """Return `best_of_8_product` as a reader says it."""
    if name.startswith("best_of_"):
        number, _, how = name.removeprefix("best_of_").partition("_")
        return f"best of {number} by PRM, {how}"
    if name.startswith("weighted_"):
        number, _, how = name.removeprefix("weighted_").partition("_")
        return f"vote of {number} weighted by PRM, {how}"
    if name.startswith("majority_"):
        return f"majority of {name.removeprefix('majority_')}"
    return {"mean": "mean of samples"}.get(name, name)


def signed(share: float) -> str:
    """Return a difference of shares in points, with its sign: +52.3."""
    return f"{100 * share:+.1f}".replace("-", "\N{MINUS SIGN}")


def duration(seconds: float) -> str:
    """Return seconds as a reader says them: 4.2 s, 3 min 05 s, 1 h 02 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _cell(value: Interval | None) -> Markup:
    if value is None:
        return tag("span", "none", class_="muted")
    limits = tag("span", f"[{100 * value.low:.1f}, {100 * value.high:.1f}]", class_="limits")
    return join([tag("span", f"{100 * value.mean:.1f}", class_="value"), limits])


def _difference_cell(value: Interval | None) -> Markup:
    if value is None:
        return tag("span", "none", class_="muted")
    limits = tag("span", f"[{signed(value.low)}, {signed(value.high)}]", class_="limits")
    return join([tag("span", signed(value.mean), class_="value" if value.is_clear else "value muted"), limits])


def _accuracy_table(evaluations: Mapping[str, PolicyEvaluation], metrics: Sequence[str]) -> Markup:
    rows: list[list[str]] = [
        [metric_name(name), *(_cell(e.accuracy.get(name)) for e in evaluations.values())] for name in metrics
    ]
    unparseable = [e.unparseable for e in evaluations.values()]
    if any(share is not None for share in unparseable):
        cells = ["none" if share is None else f"{100 * share:.1f}" for share in unparseable]
        rows.append(["samples without an answer", *cells])
    return table(["metric", *evaluations], rows, "Accuracy, %")


def _difference_table(differences: Differences, metrics: Sequence[str]) -> Markup:
    rows = [[metric_name(name), *(_difference_cell(row.get(name)) for row in differences.values())] for name in metrics]
    names = [f"{after} \N{MINUS SIGN} {before}" for after, before in differences]
    return table(["metric", *names], rows, "Paired differences, points")


def accuracy_section(evaluations: Mapping[str, PolicyEvaluation], differences: Differences) -> Markup:
    """Return chart and table of every policy and metric; table of paired differences."""
    metrics = list(dict.fromkeys(name for evaluation in evaluations.values() for name in evaluation.accuracy))
    others = iter(range(len(_SERIES), len(_SERIES) + len(evaluations)))
    series = {policy: _SERIES[policy] if policy in _SERIES else next(others) for policy in evaluations}
    rows = []
    for name in metrics:
        bars = [(series[p], p, e.accuracy[name]) for p, e in evaluations.items() if name in e.accuracy]
        rows.append((metric_name(name), bars))
    legend = [tag("span", legend_marker(number), f" {policy}") for policy, number in series.items()]
    n = len(next(iter(evaluations.values())).problems)
    caption = f"Per cent of {n:,} test problems, with 95 % intervals bootstrapped over problems."
    return section(
        "accuracy",
        "Accuracy by stage",
        tag("p", caption),
        tag("div", *legend, class_="legend"),
        tag("div", interval_chart(rows, "Accuracy of every policy by metric"), class_="card"),
        two_columns(_accuracy_table(evaluations, metrics), _difference_table(differences, metrics)),
        note("Differences are taken problem by problem. Those whose interval holds 0 are greyed."),
    )


def loss_section(losses: Mapping[str, LossCurves], missing: Sequence[str]) -> Markup:
    """Return one small chart for each training run."""
    figures = []
    for run, curves in losses.items():
        named = (("train", curves.train), ("eval", curves.evaluation))
        last = ", ".join(f"{name} {rows[-1][1]:.4g}" for name, rows in named if rows)
        step = max(step for step, _ in [*curves.train, *curves.evaluation])
        caption = tag("span", f"{last} at step {step}", class_="muted")
        chart = loss_chart(curves, f"Loss of {run} by step")
        figures.append(tag("figure", tag("figcaption", tag("b", run), caption), chart, class_="card"))
    keys = (("train", "c0"), ("eval", "c2"))
    legend = [tag("span", tag("i", class_=f"key {kind}"), f" {name}") for name, kind in keys]
    parts = [tag("div", *legend, class_="legend"), tag("div", *figures, class_="many")] if figures else []
    if missing:
        parts.append(note(f"No losses to show for {', '.join(missing)}: no metrics.jsonl, or no loss in it."))
    return section("losses", "Losses", *parts)


def _share(value: Interval | None) -> str:
    return "none" if value is None else f"{value.mean:.3f} [{value.low:.3f}, {value.high:.3f}]"


def _target_of(prm: RewardModelQuality) -> str:
    return "Monte-Carlo value" if prm.target == "values" else "label"


def _quality(prm: RewardModelQuality) -> Markup:
    target = _target_of(prm)
    why = "tells steps to a state of value above 1/2 from the rest; 0.5 is chance"
    if prm.target == "labels":
        why = "tells steps labelled right from steps labelled wrong; 0.5 is chance"
    if prm.inner.auc is None:
        why = f"unknown: every step is on one side of {target.removeprefix('Monte-Carlo ')} 1/2"
    facts = [
        ("AUC", _share(prm.inner.auc), why),
        ("ECE", _share(prm.inner.ece), "expected calibration error: mean distance of the marks from the diagonal"),
        ("MAE", _share(prm.inner.value_mae), f"mean absolute error of a step's score against its {target}"),
    ]
    items = [tag("div", tag("dt", n), tag("dd", tag("b", v), tag("span", text))) for n, v, text in facts]
    last = prm.terminal
    rows = [["AUC", _share(last.auc)], ["ECE", _share(last.ece)], ["MAE", _share(last.value_mae)]]
    return join([tag("dl", *items), table(["last steps", "against the outcome"], rows, "Last steps")])


def calibration_section(prm: RewardModelQuality) -> Markup:
    """Return predicted against observed value, or label, on held-out problems."""
    target = _target_of(prm)
    short = target.removeprefix("Monte-Carlo ")
    rows = [[f"{b.score:.3f}", f"{b.value:.3f}", f"{b.count:,}"] for b in prm.bins]
    chart = note("No bins to draw.")
    if prm.bins:
        chart = calibration_chart(prm.bins, target, f"PRM score against {target} in bins of the score")
    bins = tag("details", tag("summary", "The bins as a table"), table(["score", short, "steps"], rows))
    caption = (
        f"{prm.inner.num_steps:,} distinct inner steps of {prm.inner.num_problems:,} held-out problems, unseen in"
        f" training, and apart from them {prm.terminal.num_steps:,} last steps, whose {short} is the outcome. On the"
        " diagonal a score means what it says. In brackets 95 % intervals over problems."
    )
    known = "A Monte-Carlo value is an estimate from a few completions: part of the MAE is its noise."
    if prm.target == "labels":
        known = (
            "A label is what the model learned of a step, 1 right or 0 wrong, by contrast with the best step from the"
            " same state; it is no Monte-Carlo value. Steps without a label do not count."
        )
    return section(
        "calibration",
        "Calibration of the process reward model",
        tag("p", caption),
        two_columns(tag("div", chart, class_="card"), join([_quality(prm), bins])),
        note(known),
    )


def seconds_section(seconds: Mapping[str, float]) -> Markup:
    """Return one bar for each stage, in the order they first ran."""
    total, longest = sum(seconds.values()), max(seconds.values(), default=0.0)
    rows = []
    for stage, value in seconds.items():
        label = f"{stage}: {value:,.1f} s, {100 * value / (total or 1.0):.0f} % of the total"
        cells = [bar(value / (longest or 1.0), "c2", label), duration(value)]
        rows.append(tag("tr", tag("th", stage, scope="row"), *(tag("td", cell) for cell in cells)))
    caption = f"{duration(total)} in all, over {len(seconds)} stages. Runs of the same stage are added up."
    bars = tag("div", tag("table", tag("tbody", *rows), class_="bars"), class_="card")
    return section("seconds", "Seconds by stage", tag("p", caption), bars)


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _flow(metas: Sequence[Meta], pairs: Sequence[Meta]) -> Markup:
    """Return the main counts, in the order in which the files come out of one another."""
    counts = {meta.name: meta.counts for meta in metas}
    wanted = [
        ("trajectories", "rows", "trajectories"),
        ("states", "states", "intermediate states"),
        ("states", "distinct_states", "distinct states"),
        ("completions", "rows", "completions"),
        ("label_signal", "reliability", "reliability of the labels between states"),
        ("label_signal", "within_trajectory", "reliability of the labels along a solution"),
    ]
    figures = [(counts.get(file, {}).get(key), text) for file, key, text in wanted]
    figures += [(meta.counts.get("rows"), f"{meta.name.replace('_', ' ')} pairs") for meta in pairs]
    return tiles([(_number(value), text) for value, text in figures if value is not None])


def _provenance(metas: Sequence[Meta]) -> Markup:
    if not metas:
        return note("No provenance: no X.meta.json in process_rewards or pairs.")
    commits = ", ".join(dict.fromkeys(meta.commit for meta in metas))
    rows: list[list[str]] = [["commit", tag("code", commits)]]
    for name in dict.fromkeys(name for meta in metas for name in meta.versions):
        versions = dict.fromkeys(meta.versions[name] for meta in metas if name in meta.versions)
        rows.append([name, tag("code", ", ".join(versions))])
    return table(["what", "version"], rows)


def counts_section(metas: Sequence[Meta], pairs: Sequence[Meta]) -> Markup:
    """Return what was sampled, cut, completed and paired; which code and versions made it."""
    rows = [
        [f"{meta.name}{kind}: {name}".replace("_", " "), _number(value)]
        for kind, group in (("", metas), (" pairs", pairs))
        for meta in group
        for name, value in meta.counts.items()
    ]
    missing = [] if pairs else [note("No pairs to count: no pairs/*.meta.json in this run.")]
    every = note("No counts: no X.meta.json in process_rewards or pairs.")
    if rows:
        every = tag("details", tag("summary", "Every count"), table(["count", "number"], rows))
    flow = _flow(metas, pairs) if rows else ""
    return section(
        "counts",
        "Counts and provenance",
        tag("p", "What came out of what, and which code made it."),
        flow,
        *missing,
        two_columns(_provenance([*metas, *pairs]), every),
    )


def credit_section(credit: Mapping[str, str], timelines: Mapping[str, str]) -> Markup:
    """Return links to the pages of every run of reinforcement learning, or the commands that make them."""
    kinds = (
        (credit, "The step credit of", "has samples and no page of them", "inspect_credit", "credit.html"),
        (timelines, "The timeline of", "has no page of its timeline", "inspect_timeline", "timeline.html"),
    )
    made, missing = [], []
    for pages, what, lacks, stage, file in kinds:
        made += [tag("p", tag("a", f"{what} {name}", href=address)) for name, address in pages.items() if address]
        missing += [
            note(f"{name} {lacks}: run_stage.py -cn pages/{stage} stage.run_dir={name} output={name}/{file}")
            for name, address in pages.items()
            if not address
        ]
    return section("credit", "Reinforcement learning", *made, *missing)
