"""Step scores → one score of a trajectory: pure functions on a list of scores in [0, 1].

product and minimum after Lightman et al. 2023; last is the score at the end of the solution, what an
outcome reward model reads. geometric_mean is the product without its preference for short solutions.
log_odds sums ln(p / (1 - p)): each step is evidence for or against, and many good steps outweigh one doubtful
one. It is the only one that is not a share: it runs from minus to plus infinity, neutral at 0.
"""

import math
from collections.abc import Callable, Sequence

# Scores are written with six decimals, so that nothing nearer to 0 or 1 can be distinguished.
_SMALLEST = 1e-6


class BadAggregate(ValueError):
    """An aggregation that does not exist, or scores it is not defined for."""

    exit_code = 2


def _check_shares(scores: Sequence[float], how: str) -> None:
    for score in scores:
        if not 0 <= score <= 1:
            raise BadAggregate(f"{how} needs scores in [0, 1], got {score:g}: choose another aggregate")


def _log_odds(scores: Sequence[float]) -> float:
    """Sum of ln(p / (1 - p)), p kept at least 1e-6 away from 0 and 1."""
    _check_shares(scores, "log_odds")
    kept = [min(max(score, _SMALLEST), 1 - _SMALLEST) for score in scores]
    return math.fsum(math.log(score) - math.log1p(-score) for score in kept)


def _geometric_mean(scores: Sequence[float]) -> float:
    _check_shares(scores, "geometric_mean")
    if min(scores) == 0:
        return 0.0
    return math.exp(math.fsum(map(math.log, scores)) / len(scores))


AGGREGATES: dict[str, Callable[[Sequence[float]], float]] = {
    "product": math.prod,
    "minimum": min,
    "last": lambda scores: scores[-1],
    "mean": lambda scores: sum(scores) / len(scores),
    "geometric_mean": _geometric_mean,
    "sum": math.fsum,
    "log_odds": _log_odds,
}


def check_aggregate(how: str) -> None:
    """Raise BadAggregate where there is no such aggregate."""
    if how not in AGGREGATES:
        raise BadAggregate(f"no aggregate '{how}': there are {', '.join(AGGREGATES)}")


def aggregate(scores: Sequence[float], how: str) -> float:
    """Return one score. A trajectory without steps scores lowest: 0, for log_odds minus infinity.

    Raises BadAggregate on an unknown `how`, and where log_odds or geometric_mean meet a score outside [0, 1].
    """
    check_aggregate(how)
    if not scores:
        return -math.inf if how == "log_odds" else 0.0
    return float(AGGREGATES[how](scores))


def logistic(log_odds: float) -> float:
    """1 / (1 + e^-x) without overflow: the share that stands behind log-odds."""
    if log_odds >= 0:
        return 1 / (1 + math.exp(-log_odds))
    return math.exp(log_odds) / (1 + math.exp(log_odds))
