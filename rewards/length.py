"""The length penalty: long responses cost, before they are cut (DAPO, Yu et al. 2025, "soft overlong punishment")."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from espalier.data.records import BadInput, Trajectory
from espalier.rewards.score import Score, ScoreRange


@dataclass(frozen=True)
class LengthPenalty:
    """0 up to `free_tokens` of response, then linearly down to `worst` at `max_tokens` and beyond.

    Raises BadInput unless 0 <= free_tokens < max_tokens and worst <= 0.
    """

    free_tokens: int
    max_tokens: int
    worst: float = -1.0

    def __post_init__(self) -> None:
        if not 0 <= self.free_tokens < self.max_tokens or self.worst > 0:
            raise BadInput(
                f"a length penalty needs 0 <= free_tokens < max_tokens and worst <= 0, got {self.free_tokens}, "
                f"{self.max_tokens} and {self.worst:g}"
            )

    @classmethod
    def score_range(cls, settings: Mapping[str, Any]) -> ScoreRange:
        """From the worst to nothing."""
        return ScoreRange((settings["worst"], 0.0))

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """From the number of response tokens, the end token included."""
        room = self.max_tokens - self.free_tokens
        scores = []
        for trajectory in trajectories:
            over = min(max(len(trajectory.response_ids) - self.free_tokens, 0), room)
            value = self.worst * over / room
            scores.append(Score(value, parts={"length": value}))
        return scores
