"""How well step scores predict Monte-Carlo values, on trajectories the model was not trained on.

Every distinct (problem, prefix) counts once. `auc` tells apart steps that lead to a state of value above
1/2 from the rest (the probability that a random positive outranks a random negative, ties half); `ece` is
the expected calibration error in ten equal bins of the score against the value; `value_mae` the mean
absolute error.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data.examples import is_held_out
from data.jsonl import read_records
from data.records import BadInput, StepScores, StepValues
from pipeline.stage import StageContext


def auc(scores: Sequence[float], is_positive: Sequence[bool]) -> float | None:
    """Area under the ROC curve by ranks (ties count half); None where one class is empty."""
    values = np.asarray(scores, dtype=np.float64)
    positive = np.asarray(is_positive, dtype=bool)
    if positive.all() or not positive.any():
        return None
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks = (ends - (counts - 1) / 2.0)[inverse]
    num_positive, num_negative = positive.sum(), (~positive).sum()
    return float((ranks[positive].sum() - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative))


def calibration(scores: Sequence[float], values: Sequence[float], num_bins: int = 10) -> list[dict[str, float]]:
    """Equal-width bins of the score: mean score, mean value, number; empty bins are left out."""
    predicted, observed = np.asarray(scores), np.asarray(values)
    place = np.minimum((predicted * num_bins).astype(int), num_bins - 1)
    bins = []
    for index in range(num_bins):
        chosen = place == index
        if chosen.any():
            row = (predicted[chosen].mean(), observed[chosen].mean(), int(chosen.sum()))
            bins.append({"score": round(float(row[0]), 4), "value": round(float(row[1]), 4), "count": row[2]})
    return bins


@dataclass(frozen=True)
class EvaluateProcessReward:
    """Input: step values; `scores`: step scores of the same trajectories; only held-out problems count."""

    scores: str
    held_out_share: float

    def inputs(self) -> list[str]:
        """The step scores."""
        return [self.scores]

    def run(self, input_path: str, context: StageContext) -> dict[str, Any]:
        """`{"auc", "ece", "value_mae", "num_steps", "num_problems", "bins"}`."""
        scores = {row.id: row.scores for row in read_records(StepScores, self.scores)}
        found: dict[tuple[str, tuple[int, ...]], tuple[float, float]] = {}
        for row in read_records(StepValues, input_path):
            if not is_held_out(row.problem_id, self.held_out_share):
                continue
            numbers = f"{len(scores.get(row.id, []))} scores and {len(row.values)} values"
            if len(scores.get(row.id, [])) != len(row.values):
                raise BadInput(f"{self.scores}: trajectory '{row.id}' has {numbers}: score these trajectories")
            for end, value, score in zip(row.step_ends, row.values, scores[row.id], strict=True):
                found[row.problem_id, tuple(row.response_ids[:end])] = (score, value)
        if not found:
            raise BadInput(f"{input_path}: no held-out problem (held_out_share {self.held_out_share})")
        predicted = [score for score, _ in found.values()]
        observed = [value for _, value in found.values()]
        bins = calibration(predicted, observed)
        area = auc(predicted, [value > 0.5 for value in observed])
        gaps = sum(row["count"] * abs(row["score"] - row["value"]) for row in bins)
        errors = np.abs(np.asarray(predicted) - np.asarray(observed))
        result = {
            "auc": None if area is None else round(area, 5),
            "ece": round(gaps / len(found), 5),
            "value_mae": round(float(errors.mean()), 5),
            "num_steps": len(found),
            "num_problems": len({problem for problem, _ in found}),
        }
        context.counts.update(result)
        return {**result, "bins": bins}
