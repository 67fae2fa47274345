"""Which of a group's rollouts are trained on: more are drawn than are kept. A filter stands between what scores
rollouts and their tensors. It is called on rank 0; its network scores on all ranks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from espalier.data.records import BadInput, Trajectory
from espalier.data.training_layout import STEPS
from espalier.models.frozen_reward import PromptWatch, load_frozen_reward, place
from espalier.rewards.process import packs_prompts, score_trajectories
from espalier.rl.group_scores import trajectories_of
from espalier.rl.row_shares import read_shares
from espalier.rl.types import RolloutGroup


class RolloutFilter(Protocol):
    """Built from conf/filter/. May hold models (`rewards.score.HoldsModels`)."""

    num_kept: int
    """Rollouts of each group that are trained on; below `rollout.group_size`."""

    def __call__(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Return scored groups with `num_kept` of their rollouts each, in their order."""


def balanced_counts(num_right: int, num_wrong: int, num_kept: int) -> tuple[int, int]:
    """Return how many right and how many wrong rollouts are kept: so that there are `num_kept`, and their product is
    largest. An odd one out is right. Raises ValueError where there are too few."""
    if num_kept > num_right + num_wrong:
        raise ValueError(f"{num_kept} rollouts are to be kept of {num_right + num_wrong}")
    right = min(num_right, max(num_kept - num_wrong, (num_kept + 1) // 2))
    return right, num_kept - right


class ProcessConsistencyFilter:
    """PROF (Ye et al. 2025, "Beyond Correctness", arXiv 2509.03403): a process reward model (`path`) chooses rollouts,
    and is not optimised.

    A rollout's consistency is the mean of its step scores, less `penalty` where it has one step or at least
    `long_steps` of them (0: no limit), times 1 where it is right and -1 where it is wrong. Of the right and of the
    wrong rollouts of a group, each apart, the most consistent ones stay: right ones whose steps are good, wrong ones
    whose steps are bad; half of each as far as there are enough. With `filters_wrong` false wrong ones are taken
    as they were drawn (PROF-POS). Raises BadInput on settings out of range.
    """

    reads_frozen_reward = True

    def __init__(
        self,
        path: str,
        num_kept: int,
        filters_wrong: bool = True,
        penalty: float = 0.0,
        long_steps: int = 0,
        batch_tokens: int = 16384,
        attention: str = "auto",
    ):
        if num_kept < 1 or long_steps < 0 or penalty < 0:
            raise BadInput(f"filter.num_kept must be at least 1, filter.penalty and filter.long_steps at least 0, got "
                           f"{num_kept}, {penalty:g} and {long_steps}")  # fmt: skip
        self.model = load_frozen_reward(path, STEPS, attention)
        self.prompts = PromptWatch(path)
        self.num_kept, self.filters_wrong, self.batch_tokens = num_kept, filters_wrong, batch_tokens
        self.penalty, self.long_steps = penalty, long_steps

    def to(self, device: torch.device) -> None:
        """Move the network."""
        place(self.model, device)

    def networks(self) -> dict[str, Any]:
        """Name the one network."""
        return {"filter's process reward model": self.model}

    def __call__(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Score the steps of all rollouts, each rank its share, and choose; on rank 0."""
        trajectories = trajectories_of(groups)
        self.prompts(trajectories)
        scores = iter(read_shares(trajectories, self.scores, packs_prompts(self.model)))
        return [self.choose(group, [next(scores) for _ in group.rollouts]) for group in groups]

    def scores(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """Return one score per step, in [0, 1], of each trajectory."""
        return score_trajectories(self.model, trajectories, pad_id=0, batch_tokens=self.batch_tokens)

    def choose(self, group: RolloutGroup, scores: Sequence[Sequence[float]]) -> RolloutGroup:
        """Choose by the step scores of every rollout."""
        is_right = [rollout.trajectory.is_correct for rollout in group.rollouts]
        consistent = [self.consistency(*pair) for pair in zip(scores, is_right, strict=True)]
        right = [index for index, good in enumerate(is_right) if good]
        wrong = [index for index, good in enumerate(is_right) if not good]
        counts = balanced_counts(len(right), len(wrong), self.num_kept)
        right.sort(key=lambda index: -consistent[index])
        if self.filters_wrong:
            wrong.sort(key=lambda index: -consistent[index])
        kept = sorted(right[: counts[0]] + wrong[: counts[1]])
        rollouts, scored = [group.rollouts[index] for index in kept], [group.scores[index] for index in kept]
        return replace(group, rollouts=rollouts, scores=scored)

    def consistency(self, scores: Sequence[float], is_right: bool) -> float:
        """Of one rollout, by the scores of its steps; one without steps counts as of one with score 0."""
        is_odd = len(scores) <= 1 or 0 < self.long_steps <= len(scores)
        mean = sum(scores) / max(1, len(scores)) - self.penalty * is_odd
        return mean if is_right else -mean
