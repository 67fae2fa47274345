"""Group-relative advantages: a rollout is as good as its reward is above its group's mean. No critic.

GRPO (Shao et al. 2024, "DeepSeekMath", section 4.1.2) divides by the group's standard deviation; Dr. GRPO
(Liu et al. 2025, "Understanding R1-Zero-Like Training", section 3.2) does not, because the division gives
problems that are nearly always or nearly never solved more weight than the rest.

Left out: their different ways to average over tokens. All our losses are sums divided by the token count of
the whole minibatch, so no token weighs less because its response is long.
"""

import math
from collections.abc import Sequence

import torch

from rl.types import Experience, RolloutGroup

_SMALLEST_STD = 1e-6


def group_advantages(rewards: Sequence[float], divide_by_std: bool) -> list[float]:
    """A_i = r_i - mean(r), divided by std(r) (of a sample, G - 1 below) where asked.

    A group whose rewards are all equal (std below 1e-6) teaches nothing: its advantages are exactly 0.
    """
    mean = sum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    std = math.sqrt(sum(value * value for value in centred) / max(1, len(rewards) - 1))
    if std < _SMALLEST_STD:
        return [0.0] * len(rewards)
    return [value / std for value in centred] if divide_by_std else centred


class GroupRelativeAdvantage:
    """Every response token of a rollout gets the rollout's advantage."""

    def __init__(self, divide_by_std: bool):
        self.divide_by_std = divide_by_std

    def __call__(
        self, groups: Sequence[RolloutGroup], experience: Experience
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(advantages [N, T], None)."""
        rows = [value for group in groups for value in group_advantages(group.rewards, self.divide_by_std)]
        advantages_N = torch.tensor(rows, dtype=torch.float32)
        return advantages_N[:, None] * experience.response_mask, None
