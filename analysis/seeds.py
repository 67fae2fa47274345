"""Several runs of one pipeline side by side: a Markdown table of their summary.json files.

A row is a figure, a column a run (95 % interval over problems in brackets), the last one the mean over runs
with its spread (lowest to highest). Figures of the process reward model are of inner and of terminal steps.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.data.records import BadInput
from espalier.pipeline.stage import StageContext

Figure = dict[str, float]
Row = tuple[str, list[Figure | None], Callable[[float], str]]


def _points(value: float) -> str:
    return f"{100 * value:.1f}"


def _cell(figure: Figure | None, show: Callable[[float], str]) -> str:
    if figure is None:
        return "not defined"
    return f"{show(figure['mean'])} [{show(figure['low'])}, {show(figure['high'])}]"


def _rows(summaries: list[dict[str, Any]]) -> Iterator[Row]:
    """Return accuracies by policy and metric, then paired differences, then the reward model's figures."""
    first = summaries[0]
    for group, label in (("accuracy", "{} {}"), ("differences", "{} {} (points)")):
        for policy, metrics in first[group].items():
            for metric in metrics:
                name = label.format(policy.replace("_minus_", " - "), metric)
                yield name, [summary[group][policy][metric] for summary in summaries], _points
    for metric in (name for name in first["prm"] if name != "target"):
        yield f"PRM {metric}", [summary["prm"][metric] for summary in summaries], "{:.3f}".format


def _line(name: str, figures: list[Figure | None], show: Callable[[float], str]) -> str:
    """Return the mean is over the runs in which the figure is defined."""
    means = [figure["mean"] for figure in figures if figure is not None]
    spread = f"{show(sum(means) / len(means))} ({show(min(means))} to {show(max(means))})" if means else "not defined"
    return "| " + " | ".join([name, *(_cell(figure, show) for figure in figures), spread]) + " |"


@dataclass(frozen=True)
class CompareSeeds:
    """`runs`: run directories, each with a summary.json."""

    runs: list[str]

    def inputs(self) -> list[str]:
        """Return their summaries."""
        return [f"{run}/summary.json" for run in self.runs]

    def run(self, input_path: str, context: StageContext) -> str:
        """Return the table. Raises BadInput where `runs` is empty, a summary lacks the figures of inner steps, or
        reward models are judged by different targets."""
        if not self.runs:
            raise BadInput("stage.runs is empty: name the run directories, stage.runs=[experiments/a,experiments/b]")
        summaries = [json.loads(Path(path).read_text()) for path in self.inputs()]
        old = [path for path, row in zip(self.inputs(), summaries, strict=True) if "inner_auc" not in row["prm"]]
        if old:
            raise BadInput(f"{old[0]}: its figures of the reward model do not tell inner from terminal steps: run "
                           "prm/prm_calibration and pages/report of that run again")  # fmt: skip
        targets = {str(row["prm"].get("target", "values")): path
                   for path, row in zip(self.inputs(), summaries, strict=True)}  # fmt: skip
        if len(targets) > 1:
            found = ", ".join(f"{path} by {target}" for target, path in sorted(targets.items()))
            raise BadInput(f"the figures of the reward models are of different targets ({found}): compare runs of one, "
                           "or make prm/prm_calibration and pages/report anew with one stage.target")  # fmt: skip
        names = [Path(run).name for run in self.runs]
        head = ["| figure | " + " | ".join(names) + " | mean (lowest to highest) |", "|---" * (len(names) + 2) + "|"]
        lines = [_line(*row) for row in _rows(summaries)]
        context.counts.update(runs=len(names), figures=len(lines))
        return "\n".join([*head, *lines]) + "\n"
