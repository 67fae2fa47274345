"""Result files of benchmarks → docs/benchmarks.md: every figure with its goal and the command that makes it.

    python run_stage.py -cn pages/tabulate_benchmarks output=docs/benchmarks.md

A result file (benchmarks/results/NAME.json) says machine, commit, date and versions, and holds `figures`: name →
value, low, high, unit, goal, better (higher or lower), met, how; goal and met are null where there is no goal.
`tables`, where a benchmark writes them, are shown as they are: title, columns, rows. Nothing on the page is written by
hand, and a figure that misses its goal stands there as it is.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from espalier.data.records import BadInput
from espalier.pipeline.stage import StageContext

_INTRODUCTION = """# Benchmarks

Written by `python run_stage.py -cn pages/tabulate_benchmarks output=docs/benchmarks.md` from benchmarks/results/*.json,
which the commands in the tables write; what is measured and how stands at the head of benchmarks/*/NAME.py. A ratio is
of two things measured side by side in one run, the median of its rounds. Low and high are the lowest and the highest
round, or the ends of a 95 % interval of a share or a difference; a difference that is to be above 0 is met where all of
its interval is.
"""
_COLUMNS = ("figure", "value", "low to high", "unit", "goal", "met", "command")


def number(value: float) -> str:
    """Return four significant digits; whole numbers of any length with their thousands apart."""
    if isinstance(value, int) or (float(value).is_integer() and abs(value) >= 1000) or abs(value) >= 10_000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table; numbers as `number` writes them."""

    def line(cells: Sequence[Any]) -> str:
        shown = [number(cell) if isinstance(cell, int | float) else str(cell).replace("|", "\\|") for cell in cells]
        return f"| {' | '.join(shown)} |"

    return "\n".join([line(columns), f"|{'---|' * len(columns)}", *(line(row) for row in rows)]) + "\n"


def figure_row(name: str, figure: Mapping[str, Any]) -> tuple[str, ...]:
    """Return one line of the table of figures."""
    sign = "≥" if figure["better"] == "higher" else "≤"
    ends = "" if figure["low"] == figure["high"] else f"{number(figure['low'])} to {number(figure['high'])}"
    has_goal = figure["goal"] is not None
    goal = f"{sign} {number(figure['goal'])}" if has_goal else ""
    met = ("yes" if figure["met"] else "**no**") if has_goal else ""
    return (f"`{name}`", number(figure["value"]), ends, figure["unit"], goal, met, f"`{figure['how']}`")


def result_section(path: Path) -> str:
    """Return the part of the page that shows one result file. Raises BadInput on a file that is none."""
    try:
        result = json.loads(path.read_text())
        versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        rows = [figure_row(name, figure) for name, figure in result["figures"].items()]
        tables = [
            f"{extra['title']}\n\n{markdown_table(extra['columns'], extra['rows'])}"
            for extra in result.get("tables", [])
        ]
        made = f"{result['date']}, commit {result['commit']}, {result['machine']}; {versions}."
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path}: not the result of a benchmark ({error!r}): run its command again") from None
    return "\n".join([f"## {path.stem}\n", f"{made}\n", markdown_table(_COLUMNS, rows), *tables])


@dataclass(frozen=True)
class TabulateBenchmarks:
    """`results`: the folder of the result files."""

    results: str

    finds_inputs: ClassVar[bool] = True

    def inputs(self) -> list[str]:
        """Return every result file, by name. Raises BadInput where there is none."""
        paths = sorted(str(path) for path in Path(self.results).glob("*.json"))
        if not paths:
            raise BadInput(f"{self.results}: no result files (*.json) there: run bash scripts/bench.sh NAME first")
        return paths

    def run(self, input_path: str, context: StageContext) -> str:
        """Return the page."""
        paths = [Path(path) for path in self.inputs()]
        context.counts["benchmarks"] = len(paths)
        return "\n".join([_INTRODUCTION, *(result_section(path) for path in paths)])
