"""How well step scores judge solutions: thresholds, counts and the figures made of them; pure functions.

A threshold t turns scores into verdicts: a step is called wrong where its score is below t, and the predicted
first error is the first such step, -1 where there is none. Every figure is a function of counts that add up over
solutions, so that a figure of a set of problems is that of the sum of their counts; the 95 % intervals draw
problems 10,000 times and compute the figure of each draw's sum.
"""

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from espalier.pipeline.evaluation.intervals import CELLS, Interval

Figures = dict[str, np.ndarray]

FIRST_ERROR_COUNTS = ("found", "with_error", "passed", "without_error")
STEP_COUNTS = ("tp", "fp", "tn", "fn", "marked", "with_error", "distance", "num_pairs")
FIRST_ERROR_FORMULA = (
    "predicted first error: the first step whose score < threshold, none: -1; f1 = 2 a b / (a + b), "
    "a = accuracy_with_error (index found exactly), b = accuracy_without_error (none predicted)"
)
STEP_FORMULA = (
    "a step is called right where its score >= threshold; f1 = 2 TP / (2 TP + FP + FN), "
    "negative_f1 = 2 TN / (2 TN + FP + FN), prm_score = 0.5 f1 + 0.5 negative_f1"
)


def predict_first_error(scores: Sequence[float], threshold: float) -> int:
    """Return the index of the first score below the threshold, -1 where there is none."""
    return next((index for index, score in enumerate(scores) if score < threshold), -1)


def right_thresholds(scores: Sequence[float], first_error: int) -> tuple[float, float]:
    """Return (low, high): the prediction is right for every threshold t with low < t <= high; none where low >= high.

    A first error e is found where its score is below t and none before it is; no error is found where all
    scores are at least t.
    """
    if first_error < 0:
        return -math.inf, min(scores)
    return scores[first_error], min(scores[:first_error], default=math.inf)


def first_error_counts(scores: Sequence[float], first_error: int, threshold: float) -> list[float]:
    """Return one solution's FIRST_ERROR_COUNTS."""
    is_hit = float(predict_first_error(scores, threshold) == first_error)
    return [0.0, 0.0, is_hit, 1.0] if first_error < 0 else [is_hit, 1.0, 0.0, 0.0]


def first_error_figures(sums: np.ndarray) -> Figures:
    """Return processBench's figures (Zheng et al. 2024) of counts [..., 4], NaN where a share has no solution.

    `accuracy_with_error`: the share of solutions with an error whose first error is found exactly;
    `accuracy_without_error`: the share of solutions without one in which none is found; `f1`: the harmonic
    mean of the two; `accuracy`: the share of all solutions judged right (BIG-Bench-Mistake, Tyen et al. 2024).
    """
    exact, with_error, passed, without_error = np.moveaxis(np.asarray(sums, dtype=np.float64), -1, 0)
    finding, passing = _share(exact, with_error), _share(passed, without_error)
    both = finding + passing
    return {
        "f1": np.where(both == 0, 0.0, _share(2 * finding * passing, both)),
        "accuracy": _share(exact + passed, with_error + without_error),
        "accuracy_with_error": finding,
        "accuracy_without_error": passing,
    }


def step_counts(scores: Sequence[float], labels: Sequence[float | None], threshold: float) -> list[float]:
    """Return one solution's STEP_COUNTS but for the last two: judged steps by truth (right from the label 1/2 on) and
    verdict, and whether its first wrong step is called wrong."""
    tp = fp = tn = fn = 0
    marked, with_error = 0, 0
    for score, label in zip(scores, labels, strict=True):
        if label is None:
            continue
        is_right, is_passed = label >= 0.5, score >= threshold
        tp, fn = tp + (is_right and is_passed), fn + (is_right and not is_passed)
        fp, tn = fp + (not is_right and is_passed), tn + (not is_right and not is_passed)
        if not is_right and not with_error:
            marked, with_error = int(not is_passed), 1
    return [tp, fp, tn, fn, marked, with_error]


def step_figures(sums: np.ndarray) -> Figures:
    """Return PRMBench's figures (Song et al. 2025) of counts [..., 8], NaN where there is nothing to share out: an F1
    of steps of which there are none has no value.

    Positive is a right step. `f1` = 2 TP / (2 TP + FP + FN), `negative_f1` = 2 TN / (2 TN + FP + FN),
    `prm_score` = f1 / 2 + negative_f1 / 2. Of the names published beside these, correct_step_acc is `recall`,
    wrong_step_acc is `negative_recall`, total_step_acc is `step_accuracy`, first_error_acc is
    `first_error_marked`; `similarity` is the mean distance between the shares of steps called right in a
    modified process and in its original.
    """
    tp, fp, tn, fn, marked, with_error, distance, num_pairs = np.moveaxis(np.asarray(sums, dtype=np.float64), -1, 0)
    f1 = np.where(tp + fn > 0, _share(2 * tp, 2 * tp + fp + fn), np.nan)
    negative_f1 = np.where(tn + fp > 0, _share(2 * tn, 2 * tn + fp + fn), np.nan)
    return {
        "prm_score": 0.5 * f1 + 0.5 * negative_f1,
        "f1": f1,
        "negative_f1": negative_f1,
        "precision": _share(tp, tp + fp),
        "recall": _share(tp, tp + fn),
        "negative_precision": _share(tn, tn + fn),
        "negative_recall": _share(tn, tn + fp),
        "step_accuracy": _share(tp + tn, tp + fp + tn + fn),
        "first_error_marked": _share(marked, with_error),
        "similarity": _share(distance, num_pairs),
    }


def pair_figures(sums: np.ndarray) -> Figures:
    """Return counts [..., 2] of pairs won (a tie is half) and of pairs: `pair_accuracy`."""
    won, num_pairs = np.moveaxis(np.asarray(sums, dtype=np.float64), -1, 0)
    return {"pair_accuracy": _share(won, num_pairs)}


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Return part / whole, NaN where whole is 0 or NaN."""
    safe = np.where(whole > 0, whole, 1.0)
    return np.where(whole > 0, part / safe, np.nan)


def figure_intervals(
    counts: np.ndarray, figures: Callable[[np.ndarray], Figures], seed: int = 0, draws: int = 10_000
) -> dict[str, Interval | None]:
    """Figure → `{"mean", "low", "high", "n"}`, from the counts [P, ...] of P problems; None where it has no value.

    `mean` is the figure of all counts; `low` and `high` are the percentiles 2.5 and 97.5 of the draws in which
    it has a value; `n` is P.
    """
    size = len(counts)
    flat = counts.reshape(size, -1)
    rng = np.random.default_rng(seed)
    block = max(1, min(500, CELLS // max(size, 1)))
    drawn: dict[str, np.ndarray] = {}
    for start in range(0, draws, block):
        rows = min(block, draws - start)
        chosen = rng.integers(0, size, (rows, size)) + np.arange(rows)[:, None] * size
        times = np.bincount(chosen.ravel(), minlength=rows * size).reshape(rows, size)
        for name, values in figures((times @ flat).reshape(rows, *counts.shape[1:])).items():
            drawn.setdefault(name, np.empty(draws))[start : start + rows] = values
    intervals: dict[str, Interval | None] = {}
    for name, value in figures(counts.sum(axis=0)).items():
        if math.isnan(float(value)):
            intervals[name] = None
            continue
        low, high = np.nanquantile(drawn[name], [0.025, 0.975])
        rounded = {"mean": float(value), "low": float(low), "high": float(high)}
        intervals[name] = {**{key: round(number, 5) for key, number in rounded.items()}, "n": size}
    return intervals


def _between(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return numbers above low and at most high, in their middle where there is one."""
    middle = (low + high) / 2
    return np.where((low < middle) & (middle <= high), middle, high)


def candidate_thresholds(edges: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return one threshold for each way to divide scores at these edges in [0, 1], ascending: all
    thresholds t with a < t <= b between two neighbouring edges a and b say the same."""
    ends = np.unique(np.asarray(edges, dtype=np.float64))
    lowest = _between(np.zeros(1), ends[:1]) if ends[0] > 0 else [0.0]
    highest = _between(ends[-1:], np.ones(1)) if ends[-1] < 1 else [math.nextafter(float(ends[-1]), 2.0)]
    return np.concatenate([lowest, _between(ends[:-1], ends[1:]), highest])


def best_threshold(thresholds: np.ndarray, values: np.ndarray) -> tuple[float, float] | None:
    """Return (threshold, value): the one with the highest value; among equals the nearest to 1/2, then the lowest. None
    where no threshold has a value."""
    known = ~np.isnan(values)
    if not known.any():
        return None
    best = values[known].max()
    equal = thresholds[known][values[known] == best]
    return float(equal[np.lexsort((equal, np.abs(equal - 0.5)))[0]]), float(best)


def tune_first_error(
    scores: Iterable[Sequence[float]], first_errors: Iterable[int], figure: str
) -> tuple[float, float] | None:
    """Return (threshold, value) with the highest `figure` of `first_error_figures`; None where it has no value. Of
    every score, and of every solution twice, a number is kept."""
    edges, num = array("d"), Counter[bool]()
    ends = {True: array("d"), False: array("d")}  # of solutions with an error and without, where a threshold is right
    for row, first in zip(scores, first_errors, strict=True):
        edges.extend(row)
        num[first >= 0] += 1
        low, high = right_thresholds(row, first)
        if low < high:
            ends[first >= 0].extend((low, high))
    if not num:
        return None
    thresholds = candidate_thresholds(np.asarray(edges))
    columns: list[np.ndarray] = []
    for is_wrong in (True, False):
        able = np.asarray(ends[is_wrong]).reshape(-1, 2)
        hits = _num_below(able[:, 0], thresholds) - _num_below(able[:, 1], thresholds)
        columns += [hits, np.full(len(thresholds), num[is_wrong])]
    return best_threshold(thresholds, first_error_figures(np.stack(columns, axis=-1))[figure])


def tune_steps(
    scores: Iterable[Sequence[float]], labels: Iterable[Sequence[float | None]]
) -> tuple[float, float] | None:
    """Return (threshold, value) with the highest `prm_score`; None where it has no value. Every score is kept, as a
    number."""
    steps = {True: array("d"), False: array("d")}
    for row, truth in zip(scores, labels, strict=True):
        for score, label in zip(row, truth, strict=True):
            if label is not None:
                steps[label >= 0.5].append(score)
    right, wrong = np.asarray(steps[True]), np.asarray(steps[False])
    if not len(right) + len(wrong):
        return None
    thresholds = candidate_thresholds(np.concatenate([right, wrong]))
    fn, tn = _num_below(right, thresholds), _num_below(wrong, thresholds)
    nothing = np.zeros(len(thresholds))
    sums = np.stack([len(right) - fn, len(wrong) - tn, tn, fn, nothing, nothing, nothing, nothing], axis=-1)
    return best_threshold(thresholds, step_figures(sums)["prm_score"])


def _num_below(values: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Return how many values are below each threshold."""
    return np.searchsorted(np.sort(values), thresholds, side="left")
