"""Figures with intervals as one readable table, in Markdown and in plain text."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from espalier.data.records import BadInput
from espalier.pipeline.evaluation.intervals import Interval

HEADER = ("metric", "mean", "low", "high", "n")
SHARE = "share"

Row = dict[str, Any]  # {"metric", "mean", "low", "high", "n", "unit"}


def make_row(metric: str, figure: Interval, unit: str = SHARE) -> Row:
    """Return one line of a table; `unit` is "share" for what is shown in percent, else a word (tokens, steps)."""
    return {"metric": metric, **figure, "unit": unit}


def make_rows(figures: Mapping[str, Interval], unit: str = SHARE, suffix: str = "") -> list[Row]:
    """Return the rows of several metrics; `suffix` follows each name."""
    return [make_row(f"{name}{suffix}", figure, unit) for name, figure in figures.items()]


def _number(value: float, unit: str) -> str:
    return f"{100 * value:.1f} %" if unit == SHARE else f"{value:.1f}"


def cells_of(row: Row) -> list[str]:
    """Return metric (with its unit where that is not a share), mean, low, high, n as text."""
    unit = row["unit"]
    name = row["metric"] if unit == SHARE else f"{row['metric']} ({unit})"
    return [name, *(_number(row[key], unit) for key in ("mean", "low", "high")), str(row["n"])]


def to_markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; the first column is text, the others are numbers."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    rule = "|---|" + "---:|" * (len(header) - 1)
    return "\n".join([line(header), rule, *map(line, lines)]) + "\n"


def to_plain(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return aligned columns for a terminal; the first column is text, the others are numbers."""
    rows = [[cell.replace("\n", " ") for cell in cells] for cells in (header, *lines)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        numbers = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
        return "  ".join([cells[0].ljust(widths[0]), *numbers]).rstrip()

    return "\n".join([line(rows[0]), "  ".join("-" * width for width in widths), *map(line, rows[1:])]) + "\n"


def make_table(rows: Sequence[Row]) -> dict[str, Any]:
    """Return `{"rows", "markdown", "plain"}`."""
    lines = [cells_of(row) for row in rows]
    return {"rows": list(rows), "markdown": to_markdown(HEADER, lines), "plain": to_plain(HEADER, lines)}


def _cell(figure: Interval | None) -> str:
    if figure is None:
        return "none"
    mean, low, high = (f"{100 * figure[key]:.1f}" for key in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def make_by_n_table(by_n: Mapping[str, Mapping[str, Interval]], pass_at_k: Mapping[str, Interval]) -> dict[str, str]:
    """Return one line a way of choosing, pass@n last, one column a number n of samples (percent, 95 % interval):
    `{"markdown", "plain"}`, both "" without a figure."""
    if not by_n:
        return {"markdown": "", "plain": ""}
    passes = {name.removeprefix("pass_at_"): figure for name, figure in pass_at_k.items()}
    header = ["by n", *passes]
    lines = [[name, *(_cell(row.get(n)) for n in passes)] for name, row in {**by_n, "pass": passes}.items()]
    return {"markdown": to_markdown(header, lines), "plain": to_plain(header, lines)}


def policies_table(evaluations: Mapping[str, Mapping[str, Any]], failed: Mapping[str, str]) -> dict[str, str]:
    """Return one line a policy, one column a metric (percent, 95 % interval): `{"markdown", "plain"}`; then what
    failed.

    "none" stands where a policy has no such metric.
    """
    figures = {name: {**evaluation["accuracy"], **evaluation["pass_at_k"]} for name, evaluation in evaluations.items()}
    metrics = list(dict.fromkeys(metric for evaluation in figures.values() for metric in evaluation))
    header = ["policy", *metrics]
    lines = [[name, *(_cell(evaluation.get(metric)) for metric in metrics)] for name, evaluation in figures.items()]
    failures = "".join(f"\n{name} failed: {reason}\n" for name, reason in failed.items())
    return {"markdown": to_markdown(header, lines) + failures, "plain": to_plain(header, lines) + failures}


def read_evaluations(paths: Mapping[str, str], failed: Mapping[str, str]) -> dict[str, Any]:
    """Name → path of what `pipeline.evaluation.evaluate` wrote; `{"policies": {name: figures}, "failed", "table"}`.

    Raises BadInput where a file holds something else.
    """
    policies: dict[str, dict[str, Any]] = {}
    for name, path in paths.items():
        try:
            row = json.loads(Path(path).read_bytes())
            policies[name] = {key: row[key] for key in ("accuracy", "pass_at_k", "responses", "num_problems")}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadInput(f"{path}: not an evaluation ({error!r}): remove it and run the same command again") from None
    return {"policies": policies, "failed": dict(failed), "table": policies_table(policies, failed)}
