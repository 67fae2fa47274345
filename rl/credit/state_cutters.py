"""State cutters: where a rollout is cut into the steps that get a credit of their own.

A cutter gives the rollout's trajectory with these steps; the states that are valued lie between them. Cuts are in the
sampler's own token ids: nothing is tokenised again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from espalier.data.records import Trajectory
from espalier.data.splitters.probability import cut_points_by_probability, is_cut_point
from espalier.data.steps import Decode
from espalier.rl.types import Rollout
from espalier.values.cut_points import split_at_cut_points

StateCutter = Callable[[Rollout, Decode], Trajectory]


def at_least_one_step(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory; one without steps (its response is an end token alone) as one step."""
    if trajectory.steps or not trajectory.response_ids:
        return trajectory
    return replace(trajectory, steps=[trajectory.response], step_ends=[len(trajectory.response_ids)])


def cut_at_step_ends(rollout: Rollout, decode: Decode) -> Trajectory:
    """Cut a rollout at the ends of its own steps."""
    return at_least_one_step(rollout.trajectory)


@dataclass(frozen=True)
class ImprobableTokenCutter:
    """Cuts a rollout behind tokens that were improbable when they were sampled (SPO, Guo et al. 2025).

    See `data.splitters.probability.cut_points_by_probability`. Raises BadInput on settings out of range.
    """

    threshold: float
    """A token below this probability is a cut point."""
    num_segments: int | None
    """At most so many segments, with equally many cut points."""
    cut_points_per_segment: int | None
    """A segment ends after so many cut points; both None: after every one."""

    def __post_init__(self) -> None:
        cut_points_by_probability([], self.num_segments, self.threshold, self.cut_points_per_segment)  # refuses

    def __call__(self, rollout: Rollout, decode: Decode) -> Trajectory:
        """Cut one rollout. Raises BadInput where its tokens are not those of its text."""
        if not rollout.trajectory.response_ids:
            return rollout.trajectory
        segments = split_at_cut_points(
            rollout.trajectory,
            _logprobs(rollout),
            decode,
            threshold=self.threshold,
            num_segments=self.num_segments,
            cut_points_per_segment=self.cut_points_per_segment,
        )
        return at_least_one_step(segments)

    def improbable_tokens(self, rollouts: Sequence[Rollout], response_mask: torch.Tensor) -> torch.Tensor:
        """Mark the tokens below the threshold: [N, T] bool, false where `response_mask` [N, T] is."""
        flat = [value for rollout in rollouts for value in _logprobs(rollout)]
        mask = response_mask.clone()
        mask[response_mask] = torch.tensor(is_cut_point(flat, self.threshold), dtype=torch.bool)
        return mask


def _logprobs(rollout: Rollout) -> list[float]:
    """Return those of the engine, in which rounding may lift a 0."""
    return [min(0.0, value) for value in rollout.logprobs]
