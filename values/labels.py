"""Labels of steps from the counts of their states, with the interval they rest on.

- "soft": the value itself (soft estimation of Math-Shepherd, Wang et al. 2024);
- "hard": 1 where the value is above `threshold`, else 0. Threshold 0 is hard estimation, any right completion, for
  values that are shares of samples; a posterior mean is never 0 and needs a threshold above it;
- "classes": the number of right completions of K as a share of K, K + 1 classes (Jiao et al. 2024).
"""

import math
from dataclasses import dataclass

from espalier.data.records import BadInput

KINDS = ("soft", "hard", "classes")


def wilson_interval(num_correct: float, num_completions: float, z: float = 1.96) -> tuple[float, float]:
    """Return (low, high) of a share (Wilson 1927); (0, 1) where nothing was sampled. `z` 1.96 gives 95 %."""
    n = num_completions
    if n <= 0:
        return 0.0, 1.0
    share = num_correct / n
    centre = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low, high = (centre - half) / scale, (centre + half) / scale
    return (0.0 if num_correct <= 0 else max(0.0, low)), (1.0 if num_correct >= n else min(1.0, high))


@dataclass(frozen=True)
class LabelRule:
    """How a value becomes a label in [0, 1]; `num_classes` K + 1 is read by "classes" alone.

    Raises BadInput on an unknown kind, a threshold outside [0, 1) or fewer than 2 classes.
    """

    kind: str = "soft"
    threshold: float = 0.0
    num_classes: int = 5

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BadInput(f"there are no labels of kind '{self.kind}': choose from {', '.join(KINDS)}")
        if not 0 <= self.threshold < 1:
            raise BadInput(f"the threshold of hard labels must be from 0 to below 1, got {self.threshold}")
        if self.num_classes < 2:
            raise BadInput(f"num_classes must be at least 2 (K completions make K + 1), got {self.num_classes}")

    def label(self, value: float) -> float:
        """Return the label of a value in [0, 1]; halves between two classes go up."""
        if self.kind == "soft":
            return value
        if self.kind == "hard":
            return float(value > self.threshold)
        return math.floor(value * (self.num_classes - 1) + 0.5) / (self.num_classes - 1)

    def is_settled(self, num_correct: int, num_completions: int, max_completions: int) -> bool:
        """Say whether no outcome of the completions that are left up to `max_completions` can change the label."""
        left = max(0, max_completions - num_completions)
        lowest, highest = num_correct / max_completions, (num_correct + left) / max_completions
        return self.label(lowest) == self.label(highest)

    def is_clear(self, low: float, high: float) -> bool:
        """Say whether every value of the interval has the same label (never for soft labels with low < high)."""
        return self.label(low) == self.label(high)
