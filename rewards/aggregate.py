"""Step scores → one score of a trajectory: pure functions on a list of scores in [0, 1].

product and minimum after Lightman et al. 2023; last is the score at the end of the solution, what an
outcome reward model reads.
"""

import math
from collections.abc import Callable, Sequence


class BadAggregate(ValueError):
    """An aggregation that does not exist."""

    exit_code = 2


AGGREGATES: dict[str, Callable[[Sequence[float]], float]] = {
    "product": math.prod,
    "minimum": min,
    "last": lambda scores: scores[-1],
    "mean": lambda scores: sum(scores) / len(scores),
}


def aggregate(scores: Sequence[float], how: str) -> float:
    """One score; a trajectory without steps scores 0. Raises BadAggregate on an unknown `how`."""
    if how not in AGGREGATES:
        raise BadAggregate(f"no aggregate '{how}': there are {', '.join(AGGREGATES)}")
    return float(AGGREGATES[how](scores)) if scores else 0.0
