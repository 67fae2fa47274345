"""How well a reward model judges responses it was not trained on, from what `mode=predict` wrote.

Of pairs (`PairRewards`): `accuracy`, the share in which the preferred side has the higher reward, a tie being wrong;
`score_accuracy`, the same against the pairs' own scores (of embedded tasks the true rewards, which no label noise has
touched), pairs of equal score left out; `ece`, the calibration error of sigmoid(|margin|), the confidence that the
larger reward is right; mean and standard deviation of margins, and of all rewards (`reward`: the `normaliser` of
reward=outcome_model).

Of single responses (`RewardPrediction`): `auc` (right from wrong targets at 1/2, ties half), `brier`, the mean squared
error against the target, `ece` of the score against the target, `accuracy` at 1/2; `base_brier` is that of the mean
target, which knows nothing of a response.

Intervals are 95 %, bootstrapped over problems.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from espalier.data.jsonl import iter_rows, read_records
from espalier.data.predictions import PairRewards, RewardPrediction
from espalier.data.records import BadInput
from espalier.pipeline.evaluation.calibration_metrics import calibration_error
from espalier.pipeline.evaluation.intervals import Interval, resampled, resampled_mean
from espalier.pipeline.prm.prm_calibration import auc
from espalier.pipeline.stage import StageContext

log = logging.getLogger("stage")


@dataclass(frozen=True)
class ScoredPair:
    """A pair's rewards, and how much its own score prefers the chosen side."""

    problem_id: str
    chosen: float
    rejected: float
    score_gap: float

    @property
    def margin(self) -> float:
        """Chosen less rejected reward."""
        return self.chosen - self.rejected


def pair_figures(pairs: Sequence[ScoredPair]) -> dict[str, Any]:
    """Return the figures of pairs; `score_accuracy` is None where all scores are equal."""
    problems = [pair.problem_id for pair in pairs]
    margins = np.array([pair.margin for pair in pairs])
    confidence, is_right = 1 / (1 + np.exp(-np.minimum(np.abs(margins), 500.0))), (margins > 0).astype(float)
    rewards = np.array([value for pair in pairs for value in (pair.chosen, pair.rejected)])
    ordered = [(pair.problem_id, float(pair.margin * pair.score_gap > 0)) for pair in pairs if pair.score_gap]
    return {
        "accuracy": resampled_mean(list(zip(problems, is_right.tolist(), strict=True))),
        "score_accuracy": resampled_mean(ordered),
        "ece": resampled(problems, lambda weights: calibration_error(confidence, is_right, weights)),
        "margin": _spread(margins),
        "reward": _spread(rewards),
        "num_pairs": len(pairs),
        "num_problems": len(set(problems)),
    }


def response_figures(problems: Sequence[str], scores: Sequence[float], targets: Sequence[float]) -> dict[str, Any]:
    """Return the figures of single responses; `auc` is None where all targets are on one side of 1/2."""
    predicted, wanted = np.asarray(scores, dtype=np.float64), np.asarray(targets, dtype=np.float64)
    is_good: Any = wanted > 0.5

    def mean(values: np.ndarray) -> Interval | None:
        return resampled_mean(list(zip(problems, values.tolist(), strict=True)))

    return {
        "auc": resampled(problems, lambda weights: auc(predicted, is_good, weights)),
        "brier": mean((predicted - wanted) ** 2),
        "base_brier": round(float(np.mean((wanted - wanted.mean()) ** 2)), 5),
        "ece": resampled(problems, lambda weights: calibration_error(predicted, wanted, weights)),
        "accuracy": mean(((predicted > 0.5) == is_good).astype(float)),
        "num_responses": len(predicted),
        "num_problems": len(set(problems)),
    }


def _spread(values: np.ndarray) -> dict[str, float]:
    return {"mean": round(float(values.mean()), 6), "std": round(float(values.std()), 6)}


class _Example(NamedTuple):
    """What is kept of a row of the examples: no text and no ids."""

    problem_id: str
    score_gap: float

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """Return what is kept of a row; equal problems share one text."""
        gap = float(row.get("chosen_score", 0.0)) - float(row.get("rejected_score", 0.0))
        return cls(sys.intern(str(row.get("problem_id"))), gap)


@dataclass(frozen=True)
class MeasureRewardModel:
    """The input is the predictions; `examples` the file that they are of (pairs, trajectories or judged responses),
    which says the problems."""

    examples: str

    def inputs(self) -> list[str]:
        """Return the examples."""
        return [self.examples]

    def run(self, input_path: str, context: StageContext) -> dict[str, Any]:
        """Return `{"kind", ...figures}`. Raises BadInput where there is no prediction, or one of an unknown example."""
        first = next((row for _, row in iter_rows(input_path)), None)
        if first is None:
            raise BadInput(f"{input_path}: no prediction: run the trainer with mode=predict on held-out examples")
        known = {row["id"]: _Example.of(row) for _, row in iter_rows(self.examples)}
        if "chosen_reward" in first:
            kind, pairs = "pairs", read_records(PairRewards, input_path)
            figures = pair_figures([self._pair(row, known) for row in pairs])
        else:
            kind, rows = "responses", read_records(RewardPrediction, input_path)
            problems = [self._example(row.id, known).problem_id for row in rows]
            figures = response_figures(problems, [row.score for row in rows], [row.target for row in rows])
        for name, figure in figures.items():
            if isinstance(figure, dict) and "low" in figure:
                context.counts[name] = figure["mean"]
                log.info("%s: %s %.3f [%.3f, %.3f]", input_path, name, figure["mean"], figure["low"], figure["high"])
        return {"kind": kind, **figures}

    def _example(self, name: str, known: Mapping[str, _Example]) -> _Example:
        if name not in known:
            raise BadInput(f"{self.examples}: no example '{name}': name the file that was predicted on")
        return known[name]

    def _pair(self, row: PairRewards, known: Mapping[str, _Example]) -> ScoredPair:
        example = self._example(row.id, known)
        return ScoredPair(example.problem_id, row.chosen_reward, row.rejected_reward, example.score_gap)
