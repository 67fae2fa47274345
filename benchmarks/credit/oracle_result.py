"""The result of the credit benchmark: what was measured of every task, as figures, tables and a picture.

benchmarks/results/credit_oracle.json keeps what was measured of each task below `detail.tasks`, and all else in it is
made of that, so that a run of one task replaces its own part alone.
"""

import json
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.credit.cosine_figure import Point, draw
from benchmarks.credit.oracle_check import GOAL
from benchmarks.processes.forked import ROOT
from benchmarks.result import RESULTS, count, write_result

HOW = "bash scripts/bench.sh credit_oracle"
FIGURE = ROOT / "docs" / "credit_oracle.svg"
COSINES = {
    "cosine_expected": "cosine of the expected gradient",
    "cosine_batch": "cosine of a batch",
    "above_baseline": "above that of grpo",
    "cosine_equal_tokens": "cosine at equal tokens",
}
MEASURES = {
    "bias": "bias",
    "deviation": "standard deviation",
    "rank_correlation": "rank correlation",
    "wrong_sign": "wrong sign",
}
TaskResult = Mapping[str, Any]


def interval(numbers: Sequence[float | None] | None) -> str:
    """Write a number, where it is known, with the ends of its interval."""
    if numbers is None:
        return ""
    value, low, high = numbers
    return f"{'?' if value is None else f'{value:.2f}'} [{low:.2f}, {high:.2f}]"


def estimator_table(task: str, result: TaskResult) -> dict[str, Any]:
    """Return the table of a task's estimators, policy by policy."""
    columns = ["policy", "estimator", *COSINES.values(), *MEASURES.values(), "tokens per rollout token",
               "seconds of 100 rollouts"]  # fmt: skip
    rows = [
        [row["policy"], row["estimator"], *(interval(row[key]) for key in COSINES),
         *("" if row[key] is None else round(row[key], 3) for key in MEASURES),
         round(row["tokens_per_token"], 3), round(row["seconds"], 2)]
        for found in result["policies"].values() for row in found["rows"]
    ]  # fmt: skip
    sizes = result["sizes"]
    title = (f"Estimated credit beside exact credit, {task}: {sizes['num_problems']} problems per policy, "
             f"{sizes['num_draws']} draws of {sizes['group_size']} rollouts each; a batch is {result['batch']} groups, "
             "or those that as many tokens give; [95 % intervals].")  # fmt: skip
    return {"title": title, "columns": columns, "rows": rows}


def oracle_table(tasks: Mapping[str, TaskResult]) -> dict[str, Any]:
    """Return the table of the exact values beside completions."""
    columns = ["task", "policy", "states", "completions", "within three errors", "mean gap", "its error",
               "gap in errors", "finds an error of", "width of the bounds", "merge error", "outside",
               "success"]  # fmt: skip
    keys = ["states", "completions", "within", "mean_gap", "mean_gap_error", "gap_in_errors", "finds_error",
            "bound_width", "merge_error", "outside", "success"]  # fmt: skip
    rows = [[task, policy, *("none" if found["oracle"].get(key) is None else found["oracle"][key] for key in keys)]
            for task, result in tasks.items() for policy, found in result["policies"].items()]  # fmt: skip
    return {"title": "Exact values beside the share of right completions.", "columns": columns, "rows": rows}


def left_out_table(tasks: Mapping[str, TaskResult]) -> dict[str, Any]:
    """Return the table of rows that were not run, and why."""
    rows: dict[tuple[str, str], str] = {}
    for task, result in tasks.items():
        for found in result["policies"].values():
            rows |= {(task, name): reason for name, reason in found["left_out"].items()}
    return {"title": "Rows that were not run.", "columns": ["task", "estimator", "why"],
            "rows": [[*key, reason] for key, reason in rows.items()]}  # fmt: skip


def summarise(tasks: Mapping[str, TaskResult]) -> dict[str, Any]:
    """Return `{figures, detail, tables}` of all tasks."""
    oracles = [found["oracle"] for result in tasks.values() for found in result["policies"].values()]
    within, states = sum(one["within"] for one in oracles), sum(one["states"] for one in oracles)
    tables = [estimator_table(task, result) for task, result in tasks.items()]
    return {
        "figures": {"oracle_within_three_errors": count(within, ceil(GOAL * states), "states", how=HOW)},
        "detail": {"tasks": dict(tasks)},
        "tables": [*tables, oracle_table(tasks), left_out_table(tasks)],
    }


def points_of(result: TaskResult) -> list[Point]:
    """Return a point per estimator: means over the policies, of the ends of the intervals too; none where a cosine is
    not known."""
    rows = [row for found in result["policies"].values() for row in found["rows"]]
    unknown = {row["estimator"] for row in rows if row["cosine_batch"][0] is None}
    names = dict.fromkeys(row["estimator"] for row in rows if row["estimator"] not in unknown)
    of = {name: [row for row in rows if row["estimator"] == name] for name in names}
    return [
        Point(
            name,
            1 + fmean(row["tokens_per_token"] for row in own),
            *(fmean(row["cosine_batch"][end] for row in own) for end in range(3)),
        )
        for name, own in of.items()
    ]


def write(task: str, result: TaskResult, folder: Path = RESULTS, picture: Path = FIGURE) -> Path:
    """Write the result file and the picture, with what the file says of other tasks; return the file."""
    path = folder / "credit_oracle.json"
    tasks = json.loads(path.read_text())["detail"].get("tasks", {}) if path.is_file() else {}
    tasks[task] = result
    tasks = dict(sorted(tasks.items()))
    picture.write_text(draw({name: points_of(one) for name, one in tasks.items()}))
    return write_result("credit_oracle", **summarise(tasks), folder=folder)
