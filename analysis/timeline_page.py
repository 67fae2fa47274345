"""The page of a run's timeline: where its tokens ended, who waited for whom, seconds and engines, who did what when."""

from collections.abc import Mapping, Sequence

from espalier.analysis.markup import Markup, join, printable, tag
from espalier.analysis.script_page import render_script_page
from espalier.analysis.sections import duration, note, section, table, tiles
from espalier.analysis.timeline_charts import columns_of, legend, lines_chart, stacked_chart
from espalier.analysis.timeline_run import (
    MOST_RANKS,
    TimelineRun,
    engine_sums,
    fates_of,
    folded_ranks,
    other_ranks,
    picture_of,
    seconds_waited_for,
)

_PHASE = "seconds/"
_WAITS = {
    "the learner, for rollouts": "seconds/rollout",
    "the engines, for the learner": "queue/engines_idle_seconds",
}
_NO_QUEUE = (
    "Nothing was drawn ahead (rollout.max_staleness=0), so there is no queue: while the policy is trained the engines "
    "wait, and while they draw the learner does."
)
_LANES = (
    "A lane for the learner's phases on rank 0, one for every other rank of it, one for batches of rollouts from the "
    "first request to the last score, one for deliveries of weights, and one for every engine."
)
_MOST_WAITED_FOR = 8
_AHEAD = {"later batches that are whole": "queue/ready_batches", "age of tokens, versions": "engine/token_age"}


def _card(names: Sequence[str], chart: Markup) -> Markup:
    return tag("div", legend(names), chart, class_="card")


def _mean_sentence(run: TimelineRun) -> list[Markup]:
    first, last = columns_of(run.steps)[0]
    each = last - first + 1
    return [note(f"Each column of a chart is the mean of {each} iterations.")] if each > 1 else []


def _key_figures(run: TimelineRun) -> Markup:
    steps = run.steps
    figures = [
        (f"{len(steps):,}", f"iterations, {steps[0]} to {steps[-1]}"),
        (duration(run.total("seconds/iteration")), "in iterations"),
        (f"{run.total('sampling/tokens'):,.0f}", "tokens sampled, whatever for"),
        (f"{len(engine_sums(run.events)) or '–'}", "engines"),
    ]
    if run.evaluations:
        figures.append((f"{100 * run.evaluations[-1]['eval/accuracy']:.1f} %", "accuracy at the last evaluation"))
    return tiles(figures)


def _ledger(run: TimelineRun) -> Markup:
    fates = fates_of(run)
    text = "Tokens that rollouts drew, by iteration: trained on, by how many versions they were older than the policy "
    text += "that was trained; dropped as agreeing (dynamic sampling's surplus) or by the filter; drawn again, where "
    text += "the program was stopped and its checkpoint could not keep them; waiting in batches ahead."
    parts: list[str] = [tag("p", text)]
    if not fates:
        missing = "This run has no ledger/… in metrics.jsonl: it was made before runs kept one."
        return section("ledger", "Where every token ended", *parts, note(missing))
    without = sum("ledger/generated" not in row for row in run.rows)
    if without:
        parts.append(note(f"{without} iterations were made before runs kept a ledger, and are not counted."))
    parts.append(_card(list(fates), stacked_chart(run.steps, fates, "tokens per iteration")))
    parts += _mean_sentence(run)
    sums = {name: values[-1] if name == "waiting" else sum(values) for name, values in fates.items()}
    came = sum(value for name, value in sums.items() if not name.startswith("lost"))
    rows = [[f"{name}, at the end" if name == "waiting" else name, f"{value:,.0f}",
             f"{100 * value / came:.1f}" if came and not name.startswith("lost") else "–"]
            for name, value in sums.items()]  # fmt: skip
    rows.append(["generated, as counted when they came", f"{run.total('ledger/generated'):,.0f}", "–"])
    parts.append(table(["tokens", "in all", "% of those that came"], rows))
    if valued := run.total("ledger/completions_valued"):
        parts.append(note(f"Beside them {valued:,.0f} tokens were sampled for the estimator, and valued states or "
                          "rollouts; none is trained on."))  # fmt: skip
    samples = run.total("rollout/lost_samples")
    if samples:
        parts.append(note(f"Engines that were gone owed {samples:,.0f} samples, which were asked for again. At least "
                          f"{sums.get('lost, at least', 0):,.0f} tokens were drawn for them; they never came and are "
                          "in no other number."))  # fmt: skip
    return section("ledger", "Where every token ended", *parts)


def _waits(run: TimelineRun) -> Markup:
    parts: list[str] = []
    waits = {name: run.column(metric) for name, metric in _WAITS.items() if run.total(metric)}
    if waits:
        parts.append(_card(list(waits), lines_chart(run.steps, waits, "seconds of waiting per iteration")))
        rows = [[name, duration(run.total(_WAITS[name])), _per_iteration(run, _WAITS[name])] for name in waits]
        parts.append(table(["who waited", "in all", "seconds per iteration"], rows))
    ahead = {name: run.column(metric) for name, metric in _AHEAD.items()
             if any(value is not None for value in run.column(metric))}  # fmt: skip
    if ahead:
        parts.append(_card(list(ahead), lines_chart(run.steps, ahead, "batches, versions")))
    else:
        parts.append(note(_NO_QUEUE))
    parts += _mean_sentence(run)
    parts += _ranks(run)
    return section("waiting", "Who waited for whom", *parts)


def _ranks(run: TimelineRun) -> list[str]:
    nodes, waited = other_ranks(run.events), seconds_waited_for(run.events)
    if not nodes:
        return []
    rows = [
        [lane, printable(nodes.get(lane, "")) or "–", duration(seconds), f"{seconds / len(nodes):.3g}"]
        for lane, seconds in list(waited.items())[:_MOST_WAITED_FOR]
    ]
    text = f"Of the {1 + len(nodes)} ranks of the learner others waited for these longest, over the iterations of the "
    text += "picture. Rank 0 (learner) draws, scores and writes for all. Waits that are too short to be drawn are not "
    text += "counted, nor those within passes that the ranks make in step (ZeRO-3)."
    head = ["rank waited for", "machine", "seconds of all others", "seconds per rank"]
    return [tag("p", text), table(head, rows)]


def _per_iteration(run: TimelineRun, name: str) -> str:
    return f"{run.total(name) / len(run.rows):.3g}"


def _seconds(run: TimelineRun) -> Markup:
    names = sorted({name for row in run.rows for name in row if name.startswith(_PHASE)} - {"seconds/iteration"},
                   key=lambda name: -run.total(name))  # fmt: skip
    whole = run.total("seconds/iteration")
    rows = [[name.removeprefix(_PHASE), duration(run.total(name)), _per_iteration(run, name),
             f"{100 * run.total(name) / whole:.1f}" if whole else "–"] for name in names]  # fmt: skip
    evaluated = sum(row.get("seconds/evaluate", 0.0) for row in run.evaluations)
    if evaluated:
        rows.append(["evaluate", duration(evaluated), "–", "–"])
    made = table(["phase", "in all", "seconds per iteration", "% of all iterations"], rows)
    return section("seconds", "Seconds by phase", made, note("Of rank 0. Saving and evaluation are beside iterations."))


def _engines(run: TimelineRun) -> Markup:
    sums = engine_sums(run.events)
    if not sums:
        why = run.why_no_events or "Nothing is known of this run's engines: its client does not say what they do."
        return section("engines", "Engines", note(why))
    rows = []
    for name, one in sums.items():
        nodes = ", ".join(node for node in one.nodes if node)
        speed = f"{one.tokens / one.busy_seconds:,.0f}" if one.busy_seconds else "–"
        lost = f"{one.num_lost} times, {one.lost_samples:,} samples" if one.num_lost else "–"
        counts = [f"{number:,}" for number in (one.requests, one.samples, one.tokens)]
        rows.append([printable(name), printable(nodes), *counts, duration(one.busy_seconds), speed, lost])
    head = ["engine", "node", "requests", "samples", "tokens", "busy", "tokens per busy second", "lost"]
    text = "All that engines answered, whatever for: rollouts, completions, evaluations. Busy: while it owed answers. "
    text += "What a program that was cut had drawn and did not train on is counted too."
    return section("engines", "Engines", table(head, rows), note(text))


def _controls() -> Markup:
    def button(name: str, text: str) -> Markup:
        return Markup(f'<button id="{name}" class="chip" type="button">{text}</button>')

    ends = [Markup(f'<label>{text} <input id="{name}" type="number" min="0"></label>')
            for name, text in (("from", "iterations from"), ("to", "to"))]  # fmt: skip
    moves = (("earlier", "‹ earlier"), ("later", "later ›"), ("in", "closer"), ("out", "wider"), ("all", "all"))
    return join(
        [
            tag("div", *ends, *(button(*move) for move in moves), class_="controls"),
            note("Drag over the picture to look at a part of it. Point at anything for its numbers."),
            tag("p", "reading …", id="status", role="status"),
            tag("noscript", note("The picture needs JavaScript.")),
            tag("div", id="legend", class_="legend"),
            tag("div", tag("div", id="picture"), class_="card scroll"),
            tag("h3", "In the part that is shown"),
            tag("div", id="sums", class_="scroll"),
        ]
    )


def _picture(run: TimelineRun) -> Markup:
    title = "Who did what when"
    if not run.events:
        return section("timeline", title, tag("p", run.why_no_events, id="status", role="status"))
    parts: list[str] = [tag("p", _LANES)]
    if run.num_left_out:
        left = f"The {run.num_left_out:,} events of iterations before {min(event.iteration for event in run.events)}"
        parts.append(tag("p", f"{left} are left out (stage.max_events).", class_="cut"))
    if folded := folded_ranks(run.events):
        drawn = (
            f"Of the {MOST_RANKS + len(folded)} other ranks the {MOST_RANKS} that others waited for longest are drawn"
        )
        button = Markup('<button id="ranks" class="chip" type="button" aria-pressed="false">all ranks</button>')
        parts.append(tag("p", f"{drawn}; the rest by ", button, class_="cut"))
    return section("timeline", title, *parts, _controls())


def render_timeline(name: str, run: TimelineRun) -> str:
    """Return the whole document."""
    main = [
        tag("h1", "A run, second by second"),
        _key_figures(run),
        _ledger(run),
        _waits(run),
        _picture(run),
        _seconds(run),
        _engines(run),
    ]
    links = ("ledger", "waiting", "timeline", "seconds", "engines")
    index: Mapping[str, object] = picture_of(run) if run.events else {}
    return render_script_page(name, main, links, ["timeline.js", "timeline.css"], index, [])
