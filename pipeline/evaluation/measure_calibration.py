"""AnswerForecast or CheckedClaim → accuracy, calibration error and Brier score with intervals, and the reliability
bins.

**Answers.** The most confident answer of a response is right or wrong, its probability is the confidence. A response
that offers no answer counts as wrong with the confidence 1, so that silence does not pay (Band et al. 2024). `ece` is
in bins of equal count, `ece_equal_width` in bins of equal width; `brier` is the mean of (confidence - correct)^2;
`overconfidence` the mean confidence less the accuracy. Where the true probability of answers is known, `truth_error`
is the mean distance of the confidence from it and `truth_ece` the calibration error against it: neither holds the
noise of drawn answers.

**Claims** of long texts are pooled: those that are opinions are left out, alternatives that exclude each other count
once, by the most confident, and a claim without a number has the confidence of its words
(data/answers/confidence_phrases.py), or 1. Without any confidence the error is 1 - accuracy.

Intervals are 95 %, bootstrapped over problems (topics). A calibration error is a mean of absolute values: few rows push
it up. The log score is none of the figures: one probability of 0 would make it infinite.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from espalier.data.answers.confidence_phrases import phrase_confidence
from espalier.data.forecasts import AnswerForecast, CheckedClaim
from espalier.data.jsonl import read_records
from espalier.data.records import BadInput
from espalier.pipeline.evaluation.calibration_metrics import bins_with_intervals, brier_score, calibration_error
from espalier.pipeline.evaluation.evaluation_table import make_row, make_table
from espalier.pipeline.evaluation.intervals import Interval, resampled
from espalier.pipeline.stage import StageContext

KINDS = ("answers", "claims")


@dataclass(frozen=True)
class StatedConfidence:
    """One confidence and what came true; `truth` is the true probability, where it is known."""

    problem_id: str
    confidence: float
    is_correct: bool
    level: str = ""
    truth: float | None = None


def of_answer(row: AnswerForecast) -> StatedConfidence:
    """Return a forecast's most confident answer; without an answer wrong with the confidence 1."""
    return StatedConfidence(row.problem_id, row.confidence, row.is_correct, row.level, row.true_probability)


def pooled_claims(claims: Sequence[CheckedClaim]) -> list[StatedConfidence]:
    """Return what the module says of claims, in their order; the first of equally confident alternatives counts."""
    best: dict[tuple[str, str], tuple[float, CheckedClaim]] = {}
    for claim in claims:
        if claim.is_subjective:
            continue
        confidence = phrase_confidence(claim.text) if claim.confidence is None else claim.confidence
        key = (claim.topic_id, f"/{claim.alternatives}" if claim.alternatives else claim.id)
        if key not in best or confidence > best[key][0]:
            best[key] = (confidence, claim)
    return [StatedConfidence(claim.topic_id, confidence, claim.is_supported) for confidence, claim in best.values()]


def calibration_figures(rows: Sequence[StatedConfidence], num_bins: int, draws: int) -> dict[str, Interval]:
    """Return the module's figures, `{"mean", "low", "high", "n"}` with n problems each."""
    problems = [row.problem_id for row in rows]
    scores = np.asarray([row.confidence for row in rows], dtype=np.float64)
    correct = np.asarray([row.is_correct for row in rows], dtype=np.float64)

    def drawn(figure: Callable[[np.ndarray], float | None]) -> Interval | None:
        return resampled(problems, figure, draws=draws)

    def mean(values: np.ndarray) -> Interval | None:
        return drawn(lambda weights: float(weights @ values / weights.sum()) if weights.sum() else None)

    def error(values: np.ndarray, is_equal_count: bool) -> Interval | None:
        return drawn(lambda weights: calibration_error(scores, values, weights, num_bins, is_equal_count))

    figures = {
        "accuracy": mean(correct),
        "ece": error(correct, True),
        "ece_equal_width": error(correct, False),
        "brier": drawn(lambda weights: brier_score(scores, correct, weights)),
        "confidence": mean(scores),
        "overconfidence": mean(scores - correct),
    }
    known = [row.truth for row in rows if row.truth is not None]
    if len(known) == len(rows):
        truth = np.asarray(known)
        figures |= {"truth_error": mean(np.abs(scores - truth)), "truth_ece": error(truth, True)}
    return {name: figure for name, figure in figures.items() if figure is not None}


@dataclass(frozen=True)
class MeasureCalibration:
    """Input: AnswerForecast rows, or with `kind` "claims" CheckedClaim rows. `num_bins`: the published evaluations have
    20 for questions and 10 otherwise; `draws` of the bootstrap, 10,000 there."""

    kind: str
    num_bins: int
    draws: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.num_bins < 1 or self.draws < 100:
            raise BadInput(f"stage.kind must be {' or '.join(KINDS)}, stage.num_bins at least 1 and stage.draws at "
                           f"least 100, got '{self.kind}', {self.num_bins} and {self.draws}")  # fmt: skip

    def inputs(self) -> list[str]:
        """None beside the input."""
        return []

    def run(self, input_path: str, context: StageContext) -> dict[str, Any]:
        """Return `{"kind", "figures", "bins", "equal_width_bins", "by_level", "num_rows", "num_without_answer",
        "table"}`. Raises BadInput where nothing is left to measure."""
        rows, num_empty, num_read = self._read(input_path)
        if not rows:
            raise BadInput(f"{input_path}: no {self.kind} to measure")
        figures = calibration_figures(rows, self.num_bins, self.draws)
        context.counts.update(rows=len(rows), without_answer=num_empty, left_out=num_read - len(rows))
        context.counts.update({name: figures[name]["mean"] for name in ("accuracy", "ece", "brier")})
        problems = [row.problem_id for row in rows]
        scores = np.asarray([row.confidence for row in rows], dtype=np.float64)
        correct = np.asarray([row.is_correct for row in rows], dtype=np.float64)
        by_level: dict[str, list[StatedConfidence]] = defaultdict(list)
        for row in rows:
            by_level[row.level].append(row)
        return {
            "kind": self.kind,
            "figures": figures,
            "bins": bins_with_intervals(problems, scores, correct, self.num_bins, True),
            "equal_width_bins": bins_with_intervals(problems, scores, correct, self.num_bins, False),
            "by_level": {name: _means(part) for name, part in sorted(by_level.items()) if len(by_level) > 1},
            "num_rows": len(rows),
            "num_without_answer": num_empty,
            "table": make_table([make_row(name, figure) for name, figure in figures.items()]),
        }

    def _read(self, path: str) -> tuple[list[StatedConfidence], int, int]:
        """Return (what is measured, how many responses offer nothing, how many rows there are)."""
        if self.kind == "claims":
            claims = read_records(CheckedClaim, path)
            return pooled_claims(claims), 0, len(claims)
        forecasts = read_records(AnswerForecast, path)
        return [of_answer(row) for row in forecasts], sum(not row.answers for row in forecasts), len(forecasts)


def _means(rows: Sequence[StatedConfidence]) -> dict[str, float]:
    """Return number, accuracy and mean confidence of the rows of a level, and the true probability if known."""
    means = {
        "count": len(rows),
        "accuracy": sum(row.is_correct for row in rows) / len(rows),
        "confidence": sum(row.confidence for row in rows) / len(rows),
    }
    known = [row.truth for row in rows if row.truth is not None]
    if len(known) == len(rows):
        means["truth"] = sum(known) / len(known)
    return {name: round(value, 4) for name, value in means.items()}
