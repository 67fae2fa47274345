"""The process rewards of a run's own reward, by group: what estimators that are made for them read."""

from collections.abc import Sequence
from itertools import accumulate

from espalier.data.records import BadInput
from espalier.rl.types import RolloutGroup


def step_reward_rows(group: RolloutGroup) -> list[list[float]]:
    """Return the process rewards of every rollout, one per step; none where it has no steps (an end token alone).

    Raises BadInput where a rollout has steps and no rewards of them.
    """
    for rollout, score in zip(group.rollouts, group.scores, strict=True):
        if rollout.trajectory.steps and not score.steps:
            raise BadInput("the estimator reads process rewards, and the reward gives none: choose reward=process, "
                           "process_alone or step_verdicts")  # fmt: skip
    return [score.steps for score in group.scores]


def sums_to_come(values: Sequence[float]) -> list[float]:
    """Sum for every step its own number and all behind it."""
    return list(accumulate(reversed(values)))[::-1]
