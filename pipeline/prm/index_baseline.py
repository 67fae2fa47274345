"""What a score that knows a step's index alone would say, and how much of a scorer is more than that.

Position tells much by itself: a late step is wrong more often. So figures of a scorer stand beside those of the share
of right steps at each index, counted on other problems.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from espalier.data.records import AnnotatedSolution
from espalier.pipeline.evaluation.calibration_metrics import calibration_error
from espalier.pipeline.evaluation.intervals import resampled
from espalier.pipeline.prm.prm_calibration import auc

Truth = Callable[[AnnotatedSolution, int], bool | None]


def is_right_so_far(row: AnnotatedSolution, step: int) -> bool | None:
    """Say whether no step up to this one (from 0) is the first error; None where that is not known."""
    if row.first_error is None:
        return None
    return row.first_error < 0 or step < row.first_error


def is_right_step(row: AnnotatedSolution, step: int) -> bool | None:
    """Say whether this step (from 0) is judged right; None where it is not judged so or wrong."""
    label = row.labels[step]
    return None if label not in (0.0, 1.0) else label == 1.0


def shares_by_index(rows: Sequence[AnnotatedSolution], truth: Truth) -> list[float]:
    """Return for every index (from 0) the share of true ones among the steps there that are known; behind the last
    known index nothing, and in a gap the share before it."""
    known: dict[int, list[bool]] = defaultdict(list)
    for row in rows:
        for step in range(len(row.steps)):
            if (found := truth(row, step)) is not None:
                known[step].append(found)
    shares: list[float] = []
    for step in range(max(known, default=-1) + 1):
        shares.append(fmean(known[step]) if known[step] else shares[-1] if shares else 1.0)
    return shares


def scores_by_index(num_steps: int, shares: Sequence[float]) -> list[float]:
    """Return the shares of the first indices; the last one again where there are too few."""
    return [shares[min(step, len(shares) - 1)] if shares else 1.0 for step in range(num_steps)]


def separation(rows: Sequence[AnnotatedSolution], scores: Sequence[Sequence[float]]) -> dict[str, Any] | None:
    """Return how scores separate right from wrong steps: the AUC over inner and over last steps, each with its interval
    over problems, that of the index over the same inner steps (counted on them, which flatters it), the expected
    calibration errors of both against right (1) and wrong (0), and `last_minimum`, the share of solutions of several
    steps whose lowest score is the last one's alone: an outcome model in disguise has many. None where no step of
    either kind is judged."""
    inner: list[tuple[str, float, bool, int]] = []
    last: list[tuple[str, float, bool, int]] = []
    for row, own in zip(rows, scores, strict=True):
        for step, score in enumerate(own):
            if (found := is_right_step(row, step)) is not None:
                kept = last if step + 1 == len(own) else inner
                kept.append((row.problem_id, score, found, step))
    several = [own for own in scores if len(own) > 1]
    figures = {
        "inner_auc": _auc(inner, [score for _, score, _, _ in inner]),
        "inner_auc_of_the_index": _auc(inner, _index_scores(inner)),
        "last_auc": _auc(last, [score for _, score, _, _ in last]),
        "inner_ece": _ece(inner),
        "last_ece": _ece(last),
    }
    if not inner and not last:
        return None
    return figures | {
        "num_inner": len(inner),
        "num_last": len(last),
        "last_minimum": float(np.mean([own[-1] < min(own[:-1]) for own in several])) if several else None,
    }


def _index_scores(steps: Sequence[tuple[str, float, bool, int]]) -> list[float]:
    known: dict[int, list[bool]] = defaultdict(list)
    for _, _, is_right, step in steps:
        known[step].append(is_right)
    return [fmean(known[step]) for _, _, _, step in steps]


def _ece(steps: Sequence[tuple[str, float, bool, int]]) -> Any:
    scores, truth = (np.asarray(column, dtype=np.float64) for column in ([row[1] for row in steps],
                                                                         [row[2] for row in steps]))  # fmt: skip
    return resampled([row[0] for row in steps], lambda weights: calibration_error(scores, truth, weights))


def _auc(steps: Sequence[tuple[str, float, bool, int]], scores: Sequence[float]) -> Any:
    truth = [is_right for _, _, is_right, _ in steps]
    if len(set(truth)) < 2:
        return None
    return resampled([problem for problem, _, _, _ in steps], lambda weights: auc(scores, truth, weights))
