"""Steps by the policy's own probabilities: segment policy optimisation (SPO, Guo et al. 2025).

Where a sampled token was improbable the policy might have gone another way: such a token is a cut point. SPO's
chain form ends a segment after a fixed number of cut points; the value of a state changes there, and between
them hardly.
"""

import math
from collections.abc import Sequence
from numbers import Real

from espalier.data.records import BadInput


def is_cut_point(logprobs: Sequence[float], threshold: float = 0.9) -> list[bool]:
    """Return which tokens were sampled with a probability below `threshold`.

    `logprobs` are natural logarithms, one a token (T values in, T out). Raises BadInput on a value that is no
    log-probability and on a threshold outside (0, 1].
    """
    if not 0 < threshold <= 1:
        raise BadInput(f"the threshold of cut points must be over 0 and at most 1, got {threshold}")
    for token, logprob in enumerate(logprobs):
        if not isinstance(logprob, Real) or not logprob <= 1e-3:  # rounding may lift a 0; NaN fails too
            raise BadInput(f"token {token}: a log-probability is a number of at most 0, got {logprob!r}")
    return [math.exp(logprob) < threshold for logprob in logprobs]


def cut_points_by_probability(
    logprobs: Sequence[float],
    num_segments: int | None = None,
    threshold: float = 0.9,
    cut_points_per_segment: int | None = None,
) -> list[int]:
    """Return token ends of the segments of a response, as `Trajectory.step_ends`: rising, the last is T.

    A segment ends after a cut point (see `is_cut_point`): after every one; with `cut_points_per_segment` after
    every so many, the last segment taking what is left; with `num_segments` so that all segments hold equally
    many cut points, give or take one. There are then fewer segments only where there are fewer cut points. What
    follows the last cut point is a segment of its own in the first two forms and belongs to the last segment
    in the third. No tokens give no segments. Raises BadInput on a number below 1, or on both numbers.
    """
    if num_segments is not None and cut_points_per_segment is not None:
        raise BadInput("give num_segments or cut_points_per_segment, not both")
    for name, number in (("num_segments", num_segments), ("cut_points_per_segment", cut_points_per_segment)):
        if number is not None and (not isinstance(number, int) or number < 1):
            raise BadInput(f"{name} must be a whole number of at least 1, got {number}")
    ends = [token + 1 for token, is_cut in enumerate(is_cut_point(logprobs, threshold)) if is_cut]
    if num_segments is not None:
        num = max(1, min(num_segments, len(ends)))
        ends = [ends[number * len(ends) // num - 1] for number in range(1, num)]
    elif cut_points_per_segment is not None:
        ends = ends[cut_points_per_segment - 1 :: cut_points_per_segment]
    if len(logprobs) and (not ends or ends[-1] < len(logprobs)):
        ends.append(len(logprobs))
    return ends
