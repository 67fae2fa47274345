"""Charts and tables of the statistics of every step (`pipeline.values.step_statistics`), for the inspector."""

from collections import Counter
from collections.abc import Sequence

from espalier.analysis.inspected import Inspected
from espalier.analysis.markup import Markup, tag
from espalier.analysis.sections import table
from espalier.analysis.step_charts import Column, column_chart, value_class
from espalier.pipeline.values.step_statistics import BINS, first_errors, length_bias, positions, widths

Rows = Sequence[Inspected]


def _figure(title: str, text: str, chart: Markup) -> Markup:
    caption = tag("figcaption", tag("b", title), tag("span", text, class_="muted"))
    return tag("figure", caption, chart, class_="card")


def _positions_figure(rows: Rows) -> Markup:
    columns = []
    for row in positions([one.steps for one in rows]):
        total = row["count"]
        classes = [(value_class((place + 0.5) / BINS), number) for place, number in enumerate(row["histogram"])]
        place = "last" if row["place"] == "last step" else row["place"]
        title = f"{row['place']}: {total:,} steps, mean value {_number(row['mean_value'])}, mean label "
        parts = [(kind, 100 * number / total) for kind, number in classes if number] if total else []
        columns.append(Column(place, parts, title + _number(row["mean_label"])))
    chart = column_chart(columns, "share of the way", "% of steps", "Values by position")
    return _figure("Values by position", "red 0 to green 1; the last step is the outcome", chart)


def _first_error_figures(rows: Rows) -> list[Markup]:
    errors = first_errors([one.steps for one in rows])
    known, wrong, last = errors["known"], errors["wrong"], errors["at_last_step"]
    text = f"known of {known:,} of {wrong:,} wrong trajectories; {last:,} at the last step"
    steps = {int(step): number for step, number in errors["by_step"].items()}
    columns = [
        Column(str(step), [("v0", steps.get(step, 0))], f"step {step}: {steps.get(step, 0):,} trajectories")
        for step in range(1, min(max(steps, default=1), 60) + 1)
    ]
    tenths = [
        Column(f"{place / BINS:.1f}", [("v0", number)], f"from {place / BINS:.1f} of the way: {number:,} trajectories")
        for place, number in enumerate(errors["by_tenth"])
    ]
    return [
        _figure("First error by step", text, column_chart(columns, "step", "trajectories", "First error by step")),
        _figure(
            "First error by share of the way",
            "from there on every value is 0",
            column_chart(tenths, "share of the way", "trajectories", "First error by share of the way"),
        ),
    ]


def _length_figures(rows: Rows) -> list[Markup]:
    lengths = [row.length for row in rows]
    low, high = min(lengths), max(lengths)
    size = max(1, -(-(high - low + 1) // BINS))
    right: Counter[int] = Counter()
    total: Counter[int] = Counter()
    for row, length in zip(rows, lengths, strict=True):
        total[(length - low) // size] += 1
        right[(length - low) // size] += row.trajectory.is_correct
    places = range(max(total) + 1)
    names = [f"{low + place * size:,} to {low + (place + 1) * size - 1:,}" for place in places]
    counts = [
        Column(f"{low + place * size}", [("v4", right[place]), ("v0", total[place] - right[place])],
               f"{name}: {right[place]:,} of {total[place]:,} right")
        for place, name in zip(places, names, strict=True)
    ]  # fmt: skip
    percents = [
        Column(f"{low + place * size}", [("v4", 100 * right[place] / total[place])] if total[place] else [],
               f"{name}: {right[place]:,} of {total[place]:,} right")
        for place, name in zip(places, names, strict=True)
    ]  # fmt: skip
    unit = "tokens" if any(row.trajectory.response_ids for row in rows) else "characters"
    return [
        _figure(
            "Length", "green right, red wrong", column_chart(counts, unit, "trajectories", "Trajectories by length")
        ),
        _figure(
            "Share right by length", "flat: no bias", column_chart(percents, unit, "% right", "Share right by length")
        ),
    ]


def length_tables(rows: Rows) -> Markup:
    """Return means of right and wrong trajectories beside the correlations of length."""
    bias = length_bias([one.steps for one in rows])
    lines = [
        [name, f"{bias[name]['count']:,}", _number(bias[name]["mean_steps"]), _number(bias[name]["mean_tokens"])]
        for name in ("right", "wrong")
    ]
    correlations = [
        ["steps and outcome", _number(bias["steps_and_outcome"])],
        ["tokens and outcome", _number(bias["tokens_and_outcome"])],
        ["position and value", _number(bias["position_and_value"])],
    ]
    return tag(
        "div",
        tag("div", table(["trajectories", "number", "mean steps", "mean tokens"], lines, "Length of right and wrong")),
        tag("div", table(["correlation", "Pearson"], correlations, "What length says")),
        class_="two",
    )


def _width_figure(rows: Rows) -> Markup:
    measured = widths([one.steps for one in rows])
    columns = [
        Column(
            f"{place / BINS:.1f}", [("c0", number)], f"{place / BINS:.1f} to {(place + 1) / BINS:.1f}: {number:,} steps"
        )
        for place, number in enumerate(measured["histogram"])
    ]
    text = f"mean {_number(measured['mean'])}; labels left out {measured['left_out']:,}"
    return _figure("Width of the intervals", text, column_chart(columns, "width", "steps", "Width of the intervals"))


def _gap_figures(rows: Rows) -> list[Markup]:
    charts = []
    for name, attribute in (("PRM", "scores"), ("Judge", "verdicts")):
        gaps: Counter[int] = Counter()
        for row in rows:
            for target, said in zip(row.targets(), getattr(row, attribute) or [], strict=False):
                if target is not None and said is not None:
                    gaps[min(9, max(-10, int((said - target) * 10 // 1)))] += 1
        if gaps:
            columns = [
                Column(f"{place / 10:+.1f}", [("c3", gaps[place])], f"from {place / 10:+.1f}: {gaps[place]:,} steps")
                for place in range(-10, 10)
            ]
            chart = column_chart(columns, f"{name} less label", "steps", f"{name} less label")
            charts.append(_figure(f"{name} against label", f"{sum(gaps.values()):,} steps", chart))
    return charts


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"


def figures(rows: Rows) -> list[Markup]:
    """Return values by position, first errors, widths, lengths, and how far PRM and judge are from the labels."""
    return [
        _positions_figure(rows),
        *_first_error_figures(rows),
        _width_figure(rows),
        *_length_figures(rows),
        *_gap_figures(rows),
    ]
