"""StepValues → JSON: what every step's labels look like, and what looks wrong with them.

- `inner` and `terminal`: means over all inner steps (value, label, width of the interval, share of values of 0), and
  over the last ones, whose value is the outcome; with 95 % intervals, bootstrapped over problems;
- `positions`: tenths of a trajectory, the last step apart: mean value and label, the histogram of the values;
- `first_errors`: at which step, and in which tenth, wrong trajectories fall to a value of 0 for good;
- `impossible`: a state none of whose completions is right, and a later state, or the trajectory itself, that is
  right after all. From a value of 0 nothing right can come: the value was not 0. `chance` of each says how probable
  so many misses were if its value were the 95 % lower bound of the later state; under 0.01 look for a fault in
  grading or joining;
- `leaks`: states whose text holds an answer already, by the task's own grader (only with a task): their
  completions measure copying. The last step is not looked at;
- `length`: steps and tokens of right and wrong trajectories, the correlation of their number with the outcome, and
  of the value with the share of the way (a reward model can learn length instead of reasoning);
- `widths`: how wide the intervals of inner steps are, and how many of their labels were left out.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from espalier.data.jsonl import read_records
from espalier.data.records import BadInput, StepValues
from espalier.pipeline.evaluation.intervals import resampled_mean
from espalier.pipeline.stage import StageContext
from espalier.values.step_values import with_intervals

BINS = 10


@dataclass(frozen=True)
class StepStatistics:
    """`num_listed` suspicious trajectories are named in each list, the worst first."""

    num_listed: int = 50

    def inputs(self) -> list[str]:
        """None beside the step values."""
        return []

    def run(self, input_path: str, context: StageContext) -> dict[str, Any]:
        """Return the document. Raises BadInput on an empty file."""
        rows = [with_intervals(row) for row in read_records(StepValues, input_path)]
        if not any(row.steps for row in rows):
            raise BadInput(f"{input_path}: no labelled step to describe")
        impossible = [entry for row in rows for entry in impossible_patterns(row)]
        impossible.sort(key=lambda entry: entry["chance"])
        leaks = [entry for row in rows for entry in _leaks(row, context.task)] if context.task else None
        result = {
            "trajectories": len(rows),
            "problems": len({row.problem_id for row in rows}),
            "steps": sum(len(row.steps) for row in rows),
            "inner": inner_means(rows),
            "terminal": terminal_means(rows),
            "positions": positions(rows),
            "first_errors": first_errors(rows),
            "impossible": {"count": len(impossible), "improbable": sum(entry["chance"] < 0.01 for entry in impossible),
                           "listed": impossible[: self.num_listed]},
            "leaks": None if leaks is None else {"count": len(leaks), "listed": leaks[: self.num_listed]},
            "length": length_bias(rows),
            "widths": widths(rows),
        }  # fmt: skip
        context.counts.update(trajectories=len(rows), steps=result["steps"], impossible=len(impossible))
        return result


def inner_means(rows: Sequence[StepValues]) -> dict[str, Any]:
    """Return `steps`, and means over those whose value (or label) is known, with 95 % intervals over problems."""
    steps = [(row.problem_id, *step) for row in rows
             for step in zip(row.values[:-1], row.labels[:-1], row.low[:-1], row.high[:-1], strict=True)]  # fmt: skip
    known = [(problem, value) for problem, value, *_ in steps if value is not None]
    return {
        "steps": len(steps),
        "mean_value": resampled_mean(known),
        "share_of_zero": resampled_mean([(problem, float(value == 0)) for problem, value in known]),
        "mean_label": resampled_mean([(problem, label) for problem, _, label, *_ in steps if label is not None]),
        "mean_width": resampled_mean([(problem, high - low) for problem, _, _, low, high in steps]),
    }


def terminal_means(rows: Sequence[StepValues]) -> dict[str, Any]:
    """Return the share of right trajectories, with its 95 % interval over problems, and how many last steps have a
    label."""
    labelled = sum(row.labels[-1] is not None for row in rows if row.labels)
    return {
        "accuracy": resampled_mean([(row.problem_id, float(row.is_correct)) for row in rows]),
        "labelled_steps": labelled,
    }


def positions(rows: Sequence[StepValues]) -> list[dict[str, Any]]:
    """Return tenths of the way (step i of S lies at i / S, the last step is a row of its own): number of known values,
    mean value, mean label, and the histogram of the values in tenths (1.0 in the last)."""
    values: list[list[float]] = [[] for _ in range(BINS + 1)]
    labels: list[list[float]] = [[] for _ in range(BINS + 1)]
    for row in rows:
        for step, (value, label) in enumerate(zip(row.values, row.labels, strict=True)):
            place = BINS if step == len(row.steps) - 1 else _bin((step + 1) / len(row.steps))
            values[place] += [] if value is None else [value]
            labels[place] += [] if label is None else [label]
    figures = []
    for place in range(BINS + 1):
        histogram = Counter(map(_bin, values[place]))
        figures.append({"place": "last step" if place == BINS else f"{place / BINS:.1f}", "count": len(values[place]),
                      "mean_value": _mean(values[place]), "mean_label": _mean(labels[place]),
                      "histogram": [histogram[number] for number in range(BINS)]})  # fmt: skip
    return figures


def first_error(row: StepValues) -> int | None:
    """Return the index of the first step from which on every known value is 0; None for a right trajectory and where
    that is not known: a value before it is missing."""
    if row.is_correct or not row.values:
        return None
    first = len(row.values)
    while first and row.values[first - 1] == 0:
        first -= 1
    return None if first == len(row.values) or (first and row.values[first - 1] is None) else first


def first_errors(rows: Sequence[StepValues]) -> dict[str, Any]:
    """Return counts by step (1 is the first) and by tenth of the trajectory; how many wrong ones it is not known of."""
    wrong = [row for row in rows if not row.is_correct]
    known = [(row, error) for row in wrong for error in [first_error(row)] if error is not None]
    steps = Counter(error + 1 for _, error in known)
    tenths = Counter(_bin(error / len(row.steps)) for row, error in known)
    return {
        "wrong": len(wrong),
        "known": len(known),
        "by_step": {str(step): steps[step] for step in sorted(steps)},
        "by_tenth": [tenths[number] for number in range(BINS)],
        "at_last_step": sum(error == len(row.steps) - 1 for row, error in known),
    }


def impossible_patterns(row: StepValues) -> list[dict[str, Any]]:
    """Return steps without any right completion before a step with one: `{"trajectory", "step", "later_step",
    "num_completions", "chance"}`, steps from 1. `chance` is (1 - low)^K, `low` the lower bound of the later value."""
    patterns = []
    best, best_step = 0.0, 0
    for step in reversed(range(len(row.steps))):
        right, total = row.num_correct[step], row.num_completions[step]
        if total and right == 0 and best_step:
            patterns.append({"trajectory": row.id, "step": step + 1, "later_step": best_step, "num_completions": total,
                          "chance": round((1 - best) ** total, 6)})  # fmt: skip
        if right:
            # one right trajectory proves a value above 0, not a value of 1
            low = 0.05 if step == len(row.steps) - 1 else row.low[step]
            if low > best or not best_step:
                best, best_step = max(low, best), step + 1
    return patterns


def _leaks(row: StepValues, task: Any) -> Iterable[dict[str, Any]]:
    """Return the first state of a trajectory, the last apart, whose text the task reads an answer from."""
    text = ""
    for step, piece in enumerate(row.steps[:-1]):
        text += piece
        answer = task.grade("", text, 0).answer
        if answer is not None:
            yield {"trajectory": row.id, "step": step + 1, "num_steps": len(row.steps), "answer": str(answer)[:60]}
            return


def length_bias(rows: Sequence[StepValues]) -> dict[str, Any]:
    """Return means of steps and tokens of right and wrong trajectories, and Pearson correlations (None where
    undefined)."""
    outcomes = [float(row.is_correct) for row in rows]
    steps, tokens = [float(len(row.steps)) for row in rows], [float(len(row.response_ids)) for row in rows]
    spots = [((step + 1) / len(row.steps), value) for row in rows for step, value in enumerate(row.values[:-1])
             if value is not None]  # fmt: skip
    split = {
        name: {"count": outcomes.count(outcome), "mean_steps": _mean_where(steps, outcomes, outcome),
               "mean_tokens": _mean_where(tokens, outcomes, outcome)}
        for name, outcome in (("right", 1.0), ("wrong", 0.0))
    }  # fmt: skip
    return {
        **split,
        "steps_and_outcome": correlation(steps, outcomes),
        "tokens_and_outcome": correlation(tokens, outcomes),
        "position_and_value": correlation([place for place, _ in spots], [value for _, value in spots]),
    }


def widths(rows: Sequence[StepValues]) -> dict[str, Any]:
    """Return the intervals of all steps but the last, in tenths of their width; of their labels those left out, and the
    mean weight of the rest."""
    spans = [high - low for row in rows for low, high in zip(row.low[:-1], row.high[:-1], strict=True)]
    histogram = Counter(map(_bin, spans))
    weights = [
        weight
        for row in rows
        for weight, label in zip(row.weights[:-1], row.labels[:-1], strict=True)
        if label is not None
    ]
    labels = [label for row in rows for label in row.labels[:-1]]
    return {"mean": _mean(spans), "histogram": [histogram[number] for number in range(BINS)],
            "left_out": sum(label is None for label in labels), "mean_weight": _mean(weights)}  # fmt: skip


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Return pearson's; None for fewer than two pairs or a side that never changes."""
    if len(xs) < 2:
        return None
    mean_x, mean_y = statistics.fmean(xs), statistics.fmean(ys)
    spread = math.sqrt(sum((x - mean_x) ** 2 for x in xs) * sum((y - mean_y) ** 2 for y in ys))
    product = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return round(product / spread, 5) if spread > 1e-12 else None


def _bin(share: float) -> int:
    return min(BINS - 1, int(share * BINS + 1e-9))


def _mean(values: Sequence[float]) -> float | None:
    return round(statistics.fmean(values), 5) if values else None


def _mean_where(values: Sequence[float], outcomes: Sequence[float], outcome: float) -> float | None:
    return _mean([value for value, one in zip(values, outcomes, strict=True) if one == outcome])
