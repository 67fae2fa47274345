"""States at low-probability cut points (segment policy optimisation, Guo et al. 2025): a trajectory is split anew.

The steps of the new trajectory are the segments between improbable tokens, so that everything that reads steps
(cutting, completing, valuing, labelling) reads these. Only the threshold form (every cut point, or every so many)
is decided by the prefix alone; `num_segments` looks ahead.
"""

from collections.abc import Sequence
from dataclasses import replace

from espalier.data.records import BadInput, Trajectory
from espalier.data.splitters.probability import cut_points_by_probability
from espalier.data.steps import Decode
from espalier.data.token_text import read_response, steps_at_token_ends


def split_at_cut_points(
    trajectory: Trajectory,
    logprobs: Sequence[float],
    decode: Decode,
    *,
    threshold: float = 0.9,
    num_segments: int | None = None,
    cut_points_per_segment: int | None = None,
) -> Trajectory:
    """Return the trajectory with its steps at the cut points of `data.splitters.probability`.

    `logprobs` are natural logarithms of the sampled tokens' probabilities, one for each of `response_ids`. The
    response, its ids and its grade stay as they are. Raises BadInput where their number differs, where the
    tokens do not begin with the response's text (what follows it is of a stop string), and on settings out of range.
    """
    numbers = f"{len(trajectory.response_ids)} tokens and {len(logprobs)} log-probabilities"
    if len(logprobs) != len(trajectory.response_ids) or not logprobs:
        raise BadInput(f"trajectory '{trajectory.id}' has {numbers}: sample it with params.return_logprobs=true")
    ends = cut_points_by_probability(logprobs, num_segments, threshold, cut_points_per_segment)
    place = f"trajectory '{trajectory.id}'"
    tokens = read_response(trajectory.prompt_ids, trajectory.response_ids, decode, trajectory.response, place)
    steps, step_ends = steps_at_token_ends(ends, tokens)
    return replace(trajectory, steps=steps, step_ends=step_ends)
