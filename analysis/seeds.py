"""Several runs of one pipeline side by side: a Markdown table of their summary.json files.

A row is a figure, a column a run (95 % interval over problems in brackets), the last one the mean over runs
with its spread (lowest to highest).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.records import BadInput
from pipeline.stage import StageContext

Row = tuple[str, list[dict[str, float]]]


def _points(value: float) -> str:
    return f"{100 * value:.1f}"


def _cell(figure: dict[str, float]) -> str:
    if "low" not in figure:
        return f"{figure['mean']:.3f}"
    return f"{_points(figure['mean'])} [{_points(figure['low'])}, {_points(figure['high'])}]"


def _rows(summaries: list[dict[str, Any]]) -> Iterator[Row]:
    """Accuracies by policy and metric, then paired differences, then the reward model's figures."""
    first = summaries[0]
    for group, label in (("accuracy", "{} {}"), ("differences", "{} {} (points)")):
        for policy, metrics in first[group].items():
            for metric in metrics:
                name = label.format(policy.replace("_minus_", " - "), metric)
                yield name, [summary[group][policy][metric] for summary in summaries]
    for metric in first["prm"]:
        yield f"PRM {metric}", [{"mean": summary["prm"][metric]} for summary in summaries]


def _line(name: str, figures: list[dict[str, float]]) -> str:
    means = [figure["mean"] for figure in figures]
    show = _points if "low" in figures[0] else "{:.3f}".format
    spread = f"{show(sum(means) / len(means))} ({show(min(means))} to {show(max(means))})"
    return "| " + " | ".join([name, *(_cell(figure) for figure in figures), spread]) + " |"


@dataclass(frozen=True)
class CompareSeeds:
    """`runs`: run directories, each with a summary.json."""

    runs: list[str]

    def inputs(self) -> list[str]:
        """Their summaries."""
        return [f"{run}/summary.json" for run in self.runs]

    def run(self, input_path: str, context: StageContext) -> str:
        """The table."""
        if not self.runs:
            raise BadInput("stage.runs is empty: name the run directories, stage.runs=[experiments/a,experiments/b]")
        summaries = [json.loads(Path(path).read_text()) for path in self.inputs()]
        names = [Path(run).name for run in self.runs]
        head = ["| figure | " + " | ".join(names) + " | mean (lowest to highest) |", "|---" * (len(names) + 2) + "|"]
        lines = [_line(name, figures) for name, figures in _rows(summaries)]
        context.counts.update(runs=len(names), figures=len(lines))
        return "\n".join([*head, *lines]) + "\n"
