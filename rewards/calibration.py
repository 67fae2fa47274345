"""Rewards of calibrated answers: what a reader of the response should believe is scored against the gold answer.

**Linguistic calibration** (Band et al. 2024, arXiv 2404.00474): with p_a the reader's forecast of each answer a that
the response offers, and p_y that of the gold,

    R = log(max(p_y, epsilon)) - sum_weight |1 - sum_a p_a| + constant

The gold's own forecast is no part of the sum unless the response offers it. Without an offered answer the sum is 0.
With `sum_weight` above 1 the highest expectation is at the true probabilities alone: a sum of Z above 1 gains at most
log Z and pays sum_weight (Z - 1).

**Reinforcement learning with calibration rewards** (RLCR, Damani et al. 2025, arXiv 2507.16806): correctness plus a
proper score of the confidence q in the one answer, -(q - correctness)^2 as published.

A response that was cut by its length has said nothing: no answer, full confidence. A group's division by its standard
deviation (`advantage.divide_by_std`) makes any of these improper; docs/calibration.md has the figures.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from espalier.data.answers.short_answers import golds
from espalier.data.answers.stated_answers import Forecast, stated_forecast
from espalier.data.records import BadInput, Problem, Trajectory
from espalier.rewards.score import ChecksProblems, HoldsEngines, Score, ScoreRange, asks_engines

SCORES = ("brier", "log")
_SMALLEST = 1e-4


def linguistic_calibration(
    gold: float, offered: Sequence[float], epsilon: float = 1e-4, sum_weight: float = 5.0, constant: float = 5.0
) -> tuple[float, float, float]:
    """Return (reward, log score, distance of the sum from 1) of the gold's and the offered answers' forecasts."""
    log_score = math.log(min(max(gold, epsilon), 1.0))
    distance = abs(1.0 - math.fsum(offered))
    return log_score - sum_weight * distance + constant, log_score, distance


def confidence_score(confidence: float, is_correct: bool, score: str) -> float:
    """Return a proper score of a confidence in [0, 1], at most 0: "brier", or "log" with at least 1e-4 in the
    logarithm."""
    if score == "brier":
        return -((confidence - is_correct) ** 2)
    return math.log(max(confidence if is_correct else 1 - confidence, _SMALLEST))


def check_has_golds(problems: Sequence[Problem]) -> None:
    """Raise BadInput on a problem without a gold answer, by which every answer would be wrong."""
    for problem in problems:
        if not golds(problem.gold):
            raise BadInput(f"problem '{problem.id}' has no gold answer: a calibration reward needs one")


class Forecasts(Protocol):
    """What reads responses."""

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Forecast]:
        """Return one forecast a trajectory, in order."""


@runtime_checkable
class MovesNetworks(Protocol):
    """A reader with networks of its own."""

    def to(self, device: torch.device) -> None:
        """Move them."""


class StatedForecasts:
    """Takes the probabilities that a response states at their word (`data.answers.stated_answers`)."""

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Forecast]:
        """Read the text; one that was cut by its length offers nothing."""
        return [stated_forecast(trajectory.response, trajectory.gold) if trajectory.finish_reason == "stop"
                else Forecast() for trajectory in trajectories]  # fmt: skip


@dataclass(frozen=True)
class LinguisticCalibrationReward:
    """The reward of the module's first formula. Raises BadInput on an epsilon outside (0, 1), and where `sum_weight` is
    not above 1: such a reward pays for probabilities that do not sum to 1."""

    forecasts: Forecasts
    epsilon: float = 1e-4
    sum_weight: float = 5.0
    constant: float = 5.0

    is_proper_score: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < 1 or self.sum_weight <= 1:
            raise BadInput("a calibration reward needs 0 < reward.epsilon < 1 and reward.sum_weight > 1, got "
                           f"{self.epsilon:g} and {self.sum_weight:g}")  # fmt: skip

    @property
    def has_readers(self) -> bool:
        """Whether the reader has networks."""
        return isinstance(self.forecasts, MovesNetworks)

    def to(self, device: torch.device) -> None:
        """Move the networks of the reader, where it has some."""
        if isinstance(self.forecasts, MovesNetworks):
            self.forecasts.to(device)

    def networks(self) -> dict[str, Any]:
        """None that is given the policy's ids: readers are given texts."""
        return {}

    @property
    def has_engines(self) -> bool:
        """Whether the reader asks some."""
        return asks_engines(self.forecasts)

    def close(self) -> None:
        """End the reader's engines, where it has some."""
        if isinstance(self.forecasts, HoldsEngines):
            self.forecasts.close()

    def check_problems(self, problems: Sequence[Problem]) -> None:
        """Raise BadInput on a problem without a gold answer, and on one that the reader does not know."""
        check_has_golds(problems)
        if isinstance(self.forecasts, ChecksProblems):
            self.forecasts.check_problems(problems)

    @classmethod
    def score_range(cls, settings: Mapping[str, Any]) -> ScoreRange:
        """Return no lower bound: nothing bounds a sum."""
        return ScoreRange((-math.inf, settings["constant"]))

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Return an outcome each; parts: the log score, the sum's distance from 1, the number of offered answers and
        the gold's probability; answers: each offered one's probability."""
        scores = []
        for forecast in self.forecasts(trajectories):
            value, log_score, distance = linguistic_calibration(
                forecast.gold, forecast.probabilities, self.epsilon, self.sum_weight, self.constant
            )
            parts = {
                "log_score": log_score,
                "sum_distance": distance,
                "num_answers": float(len(forecast.answers)),
                "gold_probability": forecast.gold,
            }
            answers = dict(zip(forecast.answers, forecast.probabilities, strict=True))
            scores.append(Score(value, parts=parts, answers=answers))
        return scores


@dataclass(frozen=True)
class ConfidenceReward:
    """`correctness_weight` times correctness, plus the `score` of the confidence in the most confident answer.

    Correctness is as graded when sampled. With a weight of 0 a policy may answer what it knows to be wrong, with the
    confidence 0. Raises BadInput on another score or a negative weight.
    """

    correctness_weight: float = 1.0
    score: str = "brier"

    is_proper_score: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.score not in SCORES or self.correctness_weight < 0:
            raise BadInput(f"a confidence reward needs reward.score {' or '.join(SCORES)} and a weight of at least 0, "
                           f"got '{self.score}' and {self.correctness_weight:g}")  # fmt: skip

    def check_problems(self, problems: Sequence[Problem]) -> None:
        """Raise BadInput on a problem without a gold answer."""
        check_has_golds(problems)

    @classmethod
    def score_range(cls, settings: Mapping[str, Any]) -> ScoreRange:
        """From the worst score of a wrong answer to a right one with full confidence."""
        worst = confidence_score(1.0, False, settings["score"])
        return ScoreRange((worst, settings["correctness_weight"]))

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Return an outcome each; parts: correctness, confidence and the score; answers: the most confident one."""
        scores = []
        for trajectory, forecast in zip(trajectories, StatedForecasts()(trajectories), strict=True):
            answer, confidence = forecast.most_confident
            is_correct = trajectory.is_correct and answer is not None
            proper = confidence_score(confidence, is_correct, self.score)
            parts = {"outcome": float(is_correct), "confidence": confidence, self.score: proper}
            answers = {} if answer is None else {answer: confidence}
            scores.append(Score(self.correctness_weight * is_correct + proper, parts=parts, answers=answers))
        return scores
