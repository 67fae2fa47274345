"""What a score that knows a step's index alone would say, and how much of a scorer is more than that.

Position tells much by itself: a late step is wrong more often. So figures of a scorer stand beside those of the share
of right steps at each index, counted on other problems.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from espalier.pipeline.evaluation.calibration_metrics import calibration_error
from espalier.pipeline.evaluation.intervals import resampled
from espalier.pipeline.prm.judged_scores import Judged, ScoredSolution
from espalier.pipeline.prm.prm_calibration import auc

Truth = Callable[[Judged, int], bool | None]


def is_right_so_far(row: Judged, step: int) -> bool | None:
    """Say whether no step up to this one (from 0) is the first error; None where that is not known."""
    if row.first_error is None:
        return None
    return row.first_error < 0 or step < row.first_error


def is_right_step(row: Judged, step: int) -> bool | None:
    """Say whether this step (from 0) is judged right; None where it is not judged so or wrong."""
    label = row.labels[step]
    return None if label not in (0.0, 1.0) else label == 1.0


def shares_by_index(rows: Iterable[Judged], truth: Truth) -> list[float]:
    """Return for every index (from 0) the share of true ones among the steps there that are known; behind the last
    known index nothing, and in a gap the share before it."""
    known: dict[int, list[int]] = defaultdict(lambda: [0, 0])  # index → true ones, all of them
    for row in rows:
        for step in range(len(row.labels)):
            if (found := truth(row, step)) is not None:
                known[step][0] += found
                known[step][1] += 1
    shares: list[float] = []
    for step in range(max(known, default=-1) + 1):
        num_true, num = known.get(step, (0, 0))
        shares.append(num_true / num if num else shares[-1] if shares else 1.0)
    return shares


def scores_by_index(indices: np.ndarray, shares: Sequence[float]) -> np.ndarray:
    """Return the share of each index (from 0); the last one again behind the last, 1 where there is none."""
    table = np.asarray(shares or [1.0], dtype=np.float64)
    return table[np.minimum(indices, len(table) - 1)]


@dataclass
class _Steps:
    """Steps that are judged right or wrong, as numbers: 21 bytes for each."""

    problems: "array[int]" = field(default_factory=lambda: array("q"))
    scores: "array[float]" = field(default_factory=lambda: array("d"))
    is_right: "array[int]" = field(default_factory=lambda: array("b"))
    indices: "array[int]" = field(default_factory=lambda: array("i"))

    def add(self, problem: int, score: float, is_right: bool, index: int) -> None:
        self.problems.append(problem)
        self.scores.append(score)
        self.is_right.append(is_right)
        self.indices.append(index)

    def auc(self, scores: np.ndarray | None = None) -> Any:
        """Return that of the scores, or of others."""
        own, truth = np.asarray(self.scores) if scores is None else scores, np.asarray(self.is_right, dtype=bool)
        if len(np.unique(truth)) < 2:
            return None
        return resampled(np.asarray(self.problems), lambda weights: auc(own, truth, weights))

    def ece(self) -> Any:
        """Return the calibration error against right (1) and wrong (0)."""
        scores, truth = np.asarray(self.scores), np.asarray(self.is_right, dtype=np.float64)
        return resampled(np.asarray(self.problems), lambda weights: calibration_error(scores, truth, weights))

    def shares(self) -> np.ndarray:
        """Return for every step the share of right ones at its index."""
        indices = np.asarray(self.indices)
        num = np.bincount(indices)
        found: np.ndarray = (np.bincount(indices, np.asarray(self.is_right)) / np.maximum(num, 1))[indices]
        return found


def separation(problems: Iterable[int], solutions: Iterable[ScoredSolution]) -> dict[str, Any] | None:
    """Return how scores separate right from wrong steps: the AUC over inner and over last steps, each with its interval
    over problems, that of the index over the same inner steps (counted on them, which flatters it), the expected
    calibration errors of both against right (1) and wrong (0), and `last_minimum`, the share of solutions of several
    steps whose lowest score is the last one's alone: an outcome model in disguise has many. None where no step of
    either kind is judged. `problems`: of every solution the place of its problem in the order of the ids."""
    inner, last = _Steps(), _Steps()
    num_several = num_last_minima = 0
    for problem, row in zip(problems, solutions, strict=True):
        for step, score in enumerate(row.scores):
            if (found := is_right_step(row, step)) is not None:
                (last if step + 1 == len(row.scores) else inner).add(problem, score, found, step)
        if len(row.scores) > 1:
            num_several += 1
            num_last_minima += row.scores[-1] < min(row.scores[:-1])
    if not inner.scores and not last.scores:
        return None
    return {
        "inner_auc": inner.auc(),
        "inner_auc_of_the_index": inner.auc(inner.shares()),
        "last_auc": last.auc(),
        "inner_ece": inner.ece(),
        "last_ece": last.ece(),
        "num_inner": len(inner.scores),
        "num_last": len(last.scores),
        "last_minimum": num_last_minima / num_several if num_several else None,
    }
