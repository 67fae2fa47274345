"""Rewards on one scale over a run: the score of a response divided by the standard deviation of all scores so far.

"Score scaling" of PPO's published code: the iteration's own scores are counted first, a KL penalty is taken off what is
scaled, and estimators that read rewards of tokens see both. The score of a response is the sum of its rewards, outcome
and steps. Scores of responses that are not trained on (groups that agree, say) are not counted.

Rank 0 holds all rollouts of an iteration, so the moments are those over all ranks. They are kept in double precision
and come back from a checkpoint to the last bit.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from espalier.training.engine import BadCheckpoint

SCALINGS = ("none", "scale", "standard")
_FILE = "reward_moments.json"
_ROUNDING = 1e-6  # of rewards, which are float32: a spread below it is none


@dataclass(frozen=True)
class Moments:
    """Of numbers so far: how many, their mean, the sum of their squared distances from it."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def with_numbers(self, numbers: Sequence[float]) -> "Moments":
        """Return the moments of these numbers and those before (Chan et al. 1983, eq. 1.5)."""
        if not numbers:
            return self
        own = math.fsum(numbers) / len(numbers)
        squares = math.fsum((number - own) ** 2 for number in numbers)
        count, shift = self.count + len(numbers), own - self.mean
        share = len(numbers) / count
        return Moments(count, self.mean + shift * share, self.squares + squares + shift**2 * self.count * share)

    @property
    def deviation(self) -> float:
        """Of a sample (count - 1); 1 where the numbers do not differ."""
        found = math.sqrt(self.squares / max(1, self.count - 1))
        return found if found > _ROUNDING * abs(self.mean) else 1.0


@dataclass
class RewardScaling:
    """`kind`: "scale", or "standard", which takes the mean off too, at the last token of a response. `limit`: no reward
    of a token is further from 0 behind that (0: any may be)."""

    kind: str
    limit: float = 0.0
    moments: Moments = field(default_factory=Moments)
    """Of all iterations that were learnt from."""

    def __post_init__(self) -> None:
        self._next = self.moments

    def __call__(self, rewards: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
        """Return the rewards [N, T] of an iteration, scaled. Those of a response without tokens are none."""
        rows = response_mask.any(-1)
        scaled = rewards.double()
        self._next = self.moments.with_numbers(scaled[rows].sum(-1).tolist())
        if self.kind == "standard":
            last = response_mask.shape[1] - 1 - response_mask.flip(-1).int().argmax(-1)
            scaled[rows, last[rows]] -= self._next.mean
        scaled /= self._next.deviation
        if self.limit > 0:
            scaled = scaled.clamp(-self.limit, self.limit)
        return scaled.to(rewards.dtype)

    def keep(self) -> None:
        """Count the last iteration's scores from now on: an iteration that a signal ends before anything is learnt is
        made again by the resume."""
        self.moments = self._next

    def metrics(self) -> dict[str, float]:
        """Return the moments that the last iteration was scaled by."""
        return {"rollout/running_mean": self._next.mean, "rollout/running_std": self._next.deviation}

    def save(self, folder: Path) -> None:
        """`reward_moments.json`."""
        (folder / _FILE).write_text(json.dumps(asdict(self.moments)) + "\n")

    def load(self, folder: Path) -> None:
        """What `save` wrote. Raises BadCheckpoint where there is none."""
        if not (folder / _FILE).is_file():
            raise BadCheckpoint(f"{folder} has no moments of rewards ({_FILE}): choose another output_dir")
        self.moments = Moments(**json.loads((folder / _FILE).read_text()))
