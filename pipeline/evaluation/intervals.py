"""95 % intervals of means over problems by the percentile bootstrap: 10,000 draws of problems, seeded.

Problems are drawn, not samples: the n samples of one problem resemble each other. Metrics of the same problems
share their draws, so a table of them costs hardly more than one. The interval of a paired difference is the
interval of the differences' mean.

What is measured on steps is no mean over problems: a problem has more steps than another, and an AUC is no mean at all.
`resampled` draws whole problems there too, and computes the figure anew with every row weighing as often as its problem
was drawn.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

Interval = dict[str, float]  # {"mean", "low", "high", "n"}
Numbers = Sequence[float] | np.ndarray

CELLS = 200_000  # draws times problems at a time: what bounds the memory


def _bootstrap(table: np.ndarray, seed: int, draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (low, high) of every row of `table` (metrics x problems)."""
    size = table.shape[1]
    rng = np.random.default_rng(seed)
    block = max(1, min(500, CELLS // size))
    means = []
    for start in range(0, draws, block):
        rows = min(block, draws - start)
        drawn = rng.integers(0, size, (rows, size)) + np.arange(rows)[:, None] * size
        times = np.bincount(drawn.ravel(), minlength=rows * size).reshape(rows, size)
        means.append(times @ table.T / size)
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975], axis=0)
    return low, high


def intervals(
    rows: Mapping[str, Sequence[float] | np.ndarray], seed: int = 0, draws: int = 10_000
) -> dict[str, Interval]:
    """Name → `{"mean", "low", "high", "n"}`, rounded to five decimals; every row holds one value a problem.

    Raises ValueError where rows are empty or of unequal lengths.
    """
    if not rows:
        return {}
    sizes = {len(values) for values in rows.values()}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(f"intervals need the same number of values, at least 1, in every row: got {sorted(sizes)}")
    table = np.asarray(list(rows.values()), dtype=np.float64)
    low, high = _bootstrap(table, seed, draws)
    size = sizes.pop()
    return {
        name: {"mean": round(float(mean), 5), "low": round(float(a), 5), "high": round(float(b), 5), "n": size}
        for name, mean, a, b in zip(rows, table.mean(axis=1), low, high, strict=True)
    }


def bootstrap_interval(values: Sequence[float], seed: int = 0, draws: int = 10_000) -> tuple[float, float, float]:
    """Return (mean, low, high): the percentile bootstrap's 95 % interval of a mean over problems."""
    table = np.asarray([values], dtype=np.float64)
    low, high = _bootstrap(table, seed, draws)
    return float(table.mean()), float(low[0]), float(high[0])


def resampled(
    problems: Sequence[str] | np.ndarray,
    figure: Callable[[np.ndarray], float | None],
    seed: int = 0,
    draws: int = 2_000,
) -> Interval | None:
    """Return `{"mean", "low", "high", "n"}` of a figure of rows that belong to n `problems`, ids or their places in the
    order of the ids [R]; "mean" is the figure itself.

    `figure(weights)` gets the weight of each row [R]; None says that it is not defined, and such draws are left out.
    None where it is not defined for the rows as they are.
    """
    whole = figure(np.ones(len(problems))) if len(problems) else None
    if whole is None:
        return None
    names, rows = np.unique(np.asarray(problems), return_inverse=True)
    rng = np.random.default_rng(seed)
    values = [figure(np.bincount(rng.integers(0, len(names), len(names)), minlength=len(names))[rows].astype(float))
              for _ in range(draws)]  # fmt: skip
    defined = [value for value in values if value is not None] or [whole]
    low, high = np.quantile(defined, [0.025, 0.975])
    return {"mean": round(whole, 5), "low": round(float(low), 5), "high": round(float(high), 5), "n": len(names)}


def resampled_mean(rows: Sequence[tuple[str, float]]) -> Interval | None:
    """Return `resampled` of the mean of (problem, value) over all rows; None without a row."""
    return mean_over_problems([problem for problem, _ in rows], np.asarray([value for _, value in rows]))


def mean_over_problems(problems: Sequence[str] | np.ndarray, values: np.ndarray) -> Interval | None:
    """Return `resampled` of the mean of values [R]; None without a row."""

    def mean(weights: np.ndarray) -> float | None:
        total = weights.sum()
        return float(weights @ values / total) if total else None

    return resampled(problems, mean)


def interval(values: Numbers) -> Interval:
    """Return `{"mean", "low", "high", "n"}` of one metric."""
    return intervals({"": values})[""]
