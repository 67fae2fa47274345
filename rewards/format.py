"""The format reward: does the response have the form that was asked for, right or wrong."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from espalier.data.records import BadInput, Trajectory
from espalier.rewards.score import Score, ScoreRange, hull


@dataclass(frozen=True)
class FormatReward:
    """`good` where the whole response matches `pattern` (a regular expression; `.` matches line ends), else `bad`.

    Raises BadInput on a pattern that is none.
    """

    pattern: str
    good: float = 1.0
    bad: float = 0.0

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise BadInput(f"the pattern of a format reward is no regular expression: {error}") from None

    @classmethod
    def score_range(cls, settings: Mapping[str, Any]) -> ScoreRange:
        """Return either of the two."""
        return ScoreRange(hull(*((settings[name],) * 2 for name in ("good", "bad"))))

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """From the text alone, without the end token."""
        matches = [re.fullmatch(self.pattern, trajectory.response, re.DOTALL) for trajectory in trajectories]
        values = [self.bad if match is None else self.good for match in matches]
        return [Score(value, parts={"format": value}) for value in values]
