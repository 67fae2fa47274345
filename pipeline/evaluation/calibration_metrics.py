"""How far confidences are from what comes true: bins, expected calibration error and Brier score; pure functions.

The expected calibration error (Naeini et al. 2015) is the sum over bins of |B| / N times |mean outcome - mean
confidence|. Bins are of **equal width**, each with its upper border and without its lower one, ((m - 1) / M, m / M], as
of Guo et al. 2017 (arXiv 1706.04599); the first one holds 0 too. Or they are of **equal count** (Nguyen and O'Connor
2015, arXiv 1508.05154): the rows in the order of their confidence, cut into parts whose sizes differ by one at most, so
that no row is dropped. Confidences that are stated in words are often equal; equal ones that a border parts go to both
sides in proportion, so that nothing depends on the order of a file.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from espalier.pipeline.evaluation.intervals import resampled

NUM_BINS = 10


def bin_shares(scores: np.ndarray, weights: np.ndarray, num_bins: int, is_equal_count: bool) -> np.ndarray:
    """Return the share [B, R] of each of R rows that lies in each bin; every column sums to 1. `weights` [R] are how
    often rows count; whole numbers where `is_equal_count`."""
    if not is_equal_count:
        # k / num_bins is the float next to the fraction, as a stated percentage is: 0.55 lies on the border 11 / 20
        place = np.searchsorted(np.arange(1, num_bins) / num_bins, scores, side="left")
        return (place == np.arange(num_bins)[:, None]).astype(np.float64)
    _, group = np.unique(scores, return_inverse=True)
    sizes = np.bincount(group, weights)
    ends = np.cumsum(sizes)
    total = round(float(ends[-1]))
    borders = np.cumsum([0, *(total // num_bins + (index < total % num_bins) for index in range(num_bins))])
    low, high = np.maximum(ends - sizes, borders[:-1, None]), np.minimum(ends, borders[1:, None])
    shares = np.maximum(high - low, 0.0) / np.where(sizes > 0, sizes, 1.0)
    return shares[:, group]


def calibration_error(
    scores: np.ndarray,
    values: np.ndarray,
    weights: np.ndarray,
    num_bins: int = NUM_BINS,
    is_equal_count: bool = False,
) -> float | None:
    """Return the expected calibration error of scores [R] against values [R], each row as often as its weight says;
    None without weight."""
    if not weights.sum():
        return None
    shares = bin_shares(scores, weights, num_bins, is_equal_count)
    return float(np.abs(shares @ (weights * (scores - values))).sum() / weights.sum())


def calibration_bins(
    scores: Sequence[float] | np.ndarray,
    values: Sequence[float] | np.ndarray,
    num_bins: int = NUM_BINS,
    is_equal_count: bool = False,
) -> list[dict[str, float]]:
    """Return every bin's mean score, mean value and number of rows; empty bins are left out. Rows that a border of
    equal counts parts count in parts."""
    predicted, observed = np.asarray(scores, dtype=np.float64), np.asarray(values, dtype=np.float64)
    shares = bin_shares(predicted, np.ones(len(predicted)), num_bins, is_equal_count)
    return [{"score": round(float(row @ predicted / row.sum()), 4),
             "value": round(float(row @ observed / row.sum()), 4),
             "count": round(float(row.sum()))} for row in shares if row.sum() > 0]  # fmt: skip


def bins_with_intervals(
    problems: Sequence[str], scores: np.ndarray, values: np.ndarray, num_bins: int, is_equal_count: bool
) -> list[dict[str, Any]]:
    """Return the rows of `calibration_bins`, each with "low" and "high": the 95 % interval of its mean value, drawn
    over problems with the bins as they are."""
    shares = bin_shares(scores, np.ones(len(scores)), num_bins, is_equal_count)
    bins = calibration_bins(scores.tolist(), values.tolist(), num_bins, is_equal_count)
    kept = [row for row in shares if row.sum() > 0]
    for row, share in zip(bins, kept, strict=True):

        def mean(weights: np.ndarray, share: np.ndarray = share) -> float | None:
            total = float(share @ weights)
            return float(share @ (weights * values)) / total if total else None

        drawn = resampled(problems, mean)
        row |= {"low": drawn["low"], "high": drawn["high"]} if drawn else {}
    return bins


def brier_score(scores: np.ndarray, values: np.ndarray, weights: np.ndarray) -> float | None:
    """Return the mean of (score - value)^2; None without weight."""
    return float(weights @ (scores - values) ** 2 / weights.sum()) if weights.sum() else None
