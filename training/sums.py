"""Metrics of a step on their way to means over micro-batches and ranks; what a step that is not finite ends in."""

import math
from collections.abc import Mapping

from espalier.runtime.distributed import sum_over_ranks


class NotFinite(RuntimeError):
    """A loss or gradient that is not a number: the run stops before it spoils the weights."""

    exit_code = 1


class Sums:
    """Metrics on their way to a mean over batches and ranks: name → (sum, count)."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[float, float]] = {}

    def add(self, new: Mapping[str, tuple[float, float]]) -> None:
        """Add a batch's sums and counts."""
        for name, (total, count) in new.items():
            old = self.rows.get(name, (0.0, 0.0))
            self.rows[name] = (old[0] + total, old[1] + count)

    def means(self) -> dict[str, float]:
        """Return means over all ranks, each of which holds the same names; none of what no rank has counted."""
        names = sorted(self.rows)
        totals = sum_over_ranks([value for name in names for value in self.rows[name]])
        return _means(dict(zip(names, zip(totals[0::2], totals[1::2], strict=True), strict=True)))

    def means_here(self) -> dict[str, float]:
        """Return means of what was added here."""
        return _means(self.rows)


def _means(totals: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    return finish_metrics({name: total / count for name, (total, count) in totals.items() if count})


def finish_metrics(means: Mapping[str, float]) -> dict[str, float]:
    """Return what is logged, from the means of what the objective gave; no difference of which one side is missing."""
    finished: dict[str, float] = {}
    for name, value in means.items():
        base, _, part = name.partition("|")
        if part == "square":
            finished[f"{base}_std"] = math.sqrt(max(0.0, value - means[base] ** 2))
        elif part in ("plus", "minus"):
            if part == "plus" and f"{base}|minus" in means:
                finished[base] = value - means[f"{base}|minus"]
        elif part:
            finished[base] = finished.get(base, 0.0) + abs(value)
        else:
            finished[name] = value
    return finished
