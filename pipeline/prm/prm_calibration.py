"""How well step scores predict Monte-Carlo values, on trajectories the model was not trained on.

Inner steps and last steps are apart: an inner step leads to a state whose value is estimated from completions, the last
one to the terminal state, whose value is the outcome and which a model sees with its answer written out. Every distinct
(problem, prefix) counts once. `auc` tells apart steps that lead to a state of value above 1/2 from the rest (the
probability that a random positive outranks a random negative, ties half; of last steps: right from wrong answers);
`ece` is the expected calibration error in ten equal bins of the score against the value; `value_mae` the mean absolute
error, which holds the noise of the values too. Intervals are 95 %, bootstrapped over problems; a calibration error is a
mean of absolute values, so that few problems push it up, in the draws as in the figure.

Later steps are wrong more often, so that the index of a step alone says much: `index_auc` is the AUC of a score that
knows nothing else, `above_index` how far the scores' is above it. Where that may be nothing, a warning says so.
"""

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from espalier.data.examples.token_examples import is_held_out
from espalier.data.jsonl import read_records
from espalier.data.left_out import leave_out
from espalier.data.records import BadInput, StepScores, StepValues
from espalier.pipeline.evaluation.calibration_metrics import calibration_bins, calibration_error
from espalier.pipeline.evaluation.intervals import resampled, resampled_mean
from espalier.pipeline.prm.seen_problems import note_unknown
from espalier.pipeline.stage import StageContext

log = logging.getLogger("stage")
FEWEST_PROBLEMS = 10
"""Below which nothing is said of whether the scores know more than a step's index."""
TARGETS = ("values", "labels")
Numbers = Sequence[float] | np.ndarray


def auc(scores: Numbers, is_positive: Sequence[bool], weights: Numbers | None = None) -> float | None:
    """Return area under the ROC curve (ties count half), every row as often as its weight says; None where one class is
    empty."""
    positive = np.asarray(is_positive, dtype=bool)
    counts = np.ones(len(positive)) if weights is None else np.asarray(weights, dtype=np.float64)
    _, ranks = np.unique(np.asarray(scores, dtype=np.float64), return_inverse=True)
    above = np.bincount(ranks, counts * positive)  # of each distinct score, ascending
    below = np.bincount(ranks, counts * ~positive)
    pairs = above.sum() * below.sum()
    if not pairs:
        return None
    outranked = np.cumsum(below) - below / 2
    return float((above * outranked).sum() / pairs)


def index_shares(indices: Sequence[int], is_positive: Sequence[bool]) -> dict[int, float]:
    """Return the share of positive rows by index: what a score says that knows the index alone."""
    by_index: dict[int, list[bool]] = defaultdict(list)
    for index, one in zip(indices, is_positive, strict=True):
        by_index[index].append(one)
    return {index: fmean(rows) for index, rows in by_index.items()}


@dataclass(frozen=True)
class ScoredStep:
    """The score of a step, its index in the solution (from 1) and the value of the state it leads to."""

    problem_id: str
    index: int
    score: float
    value: float


def quality(steps: Sequence[ScoredStep]) -> dict[str, Any]:
    """Return `{"auc", "ece", "value_mae", "num_steps", "num_problems"}`; the first three are `{"mean", "low", "high",
    "n"}` with n problems, None where they are not defined."""
    problems = [step.problem_id for step in steps]
    scores, values = np.asarray([step.score for step in steps]), np.asarray([step.value for step in steps])
    is_good: Any = values > 0.5
    return {
        "auc": resampled(problems, lambda weights: auc(scores, is_good, weights)),
        "ece": resampled(problems, lambda weights: calibration_error(scores, values, weights)),
        "value_mae": resampled_mean([(step.problem_id, abs(step.score - step.value)) for step in steps]),
        "num_steps": len(steps),
        "num_problems": len(set(problems)),
    }


def beside_index(steps: Sequence[ScoredStep]) -> dict[str, Any]:
    """Return `{"index_auc", "above_index"}`: the AUC of a score that knows the step's index alone, and how far that of
    the scores is above it; as `quality` gives figures."""
    problems, scores = [step.problem_id for step in steps], [step.score for step in steps]
    is_good = [step.value > 0.5 for step in steps]
    by_index = index_shares([step.index for step in steps], is_good)
    shares = [by_index[step.index] for step in steps]

    def above(weights: np.ndarray) -> float | None:
        own, other = auc(scores, is_good, weights), auc(shares, is_good, weights)
        return None if own is None or other is None else own - other

    return {"index_auc": resampled(problems, lambda weights: auc(shares, is_good, weights)),
            "above_index": resampled(problems, above)}  # fmt: skip


@dataclass(frozen=True)
class EvaluateProcessReward:
    """Input: step values; `scores`: step scores of the same trajectories; only held-out problems count (those of which
    the scores do not say whether the model was trained on them too, counted and warned of). `target`: the
    steps' values, or the labels that the model was trained on, as those of contrast are no values (completions as
    solutions that were not scored are left out then)."""

    scores: str
    held_out_share: float
    target: str = "values"

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise BadInput(f"stage.target must be {' or '.join(TARGETS)}, got '{self.target}'")

    def inputs(self) -> list[str]:
        """Return the step scores."""
        return [self.scores]

    def run(self, input_path: str, context: StageContext) -> dict[str, Any]:
        """Give `{"target", "inner", "terminal", "num_problems", "bins", "terminal_bins"}`: `quality` of inner and of
        last steps, where "value" means the target, and `beside_index` of the inner ones.

        Raises BadInput where no problem is held out, the model was trained on one that is, or scores are missing.
        """
        rows = read_records(StepScores, self.scores)
        scores = {row.id: row.scores for row in rows}
        seen = {row.problem_id for row in rows if row.is_seen and is_held_out(row.problem_id, self.held_out_share)}
        if seen:
            raise BadInput(f"{self.scores}: the reward model was trained on {len(seen)} problems that held_out_share "
                           f"{self.held_out_share} holds out: set stage.held_out_share as in its training")  # fmt: skip
        distinct = self.scored_steps(input_path, scores)
        if not distinct:
            raise BadInput(f"{input_path}: no held-out problem (held_out_share {self.held_out_share})")
        note_unknown({problem for problem, _, _ in distinct}, self.scores, context)
        parts = {
            name: [step for (_, _, is_last), step in distinct.items() if is_last == is_terminal]
            for name, is_terminal in (("inner", False), ("terminal", True))
        }
        result: dict[str, Any] = {name: quality(steps) for name, steps in parts.items()}
        for name, row in result.items():
            figures = {key: row[key] and row[key]["mean"] for key in ("auc", "ece", "value_mae")}
            context.counts.update({f"{name}_{key}": value for key, value in figures.items()})
            context.counts[f"{name}_steps"] = row["num_steps"]
        result["inner"] |= beside_index(parts["inner"])
        self._note_index(result["inner"], context)
        context.counts["num_problems"] = len({step.problem_id for step in distinct.values()})
        bins = {
            name: calibration_bins([s.score for s in steps], [s.value for s in steps]) for name, steps in parts.items()
        }
        return {"target": self.target, **result, "num_problems": context.counts["num_problems"], "bins": bins["inner"],
                "terminal_bins": bins["terminal"]}  # fmt: skip

    def _note_index(self, inner: Mapping[str, Any], context: StageContext) -> None:
        """Count the AUC of the index; warn where the scores' may be no better."""
        index, above = inner["index_auc"], inner["above_index"]
        context.counts["inner_index_auc"] = index and index["mean"]
        if above is not None and above["low"] <= 0 and above["n"] >= FEWEST_PROBLEMS:
            log.warning("%s: on held-out inner steps the scores have an AUC of %.3f, the step's index alone one of "
                        "%.3f: take more problems or completions, or score by the log-ratio of a policy that pairs "
                        "have taught (prm/make_log_ratio_reward; scripts/process_rewards.sh labels=contrast does)",
                        self.scores, inner["auc"]["mean"], index["mean"])  # fmt: skip

    def scored_steps(
        self, input_path: str, scores: Mapping[str, Sequence[float]]
    ) -> dict[tuple[str, tuple[int, ...], bool], ScoredStep]:
        """Return (problem, prefix, whether it is the last) → the step, of held-out problems; count steps without value.

        Raises BadInput where scores are missing.
        """
        found: dict[tuple[str, tuple[int, ...], bool], ScoredStep] = {}
        num_steps, num_unknown = 0, 0
        for row in read_records(StepValues, input_path):
            if not is_held_out(row.problem_id, self.held_out_share):
                continue
            if self.target == "labels" and row.id not in scores and "#" in row.id:  # a completion's, by its id
                continue
            values = row.values if self.target == "values" else row.labels
            numbers = f"{len(scores.get(row.id, []))} scores and {len(values)} {self.target}"
            if len(scores.get(row.id, [])) != len(values):
                raise BadInput(f"{self.scores}: trajectory '{row.id}' has {numbers}: score these trajectories")
            for step, (end, value, score) in enumerate(zip(row.step_ends, values, scores[row.id], strict=True), 1):
                key = row.problem_id, tuple(row.response_ids[:end]), step == len(row.steps)
                if value is not None:
                    found[key] = ScoredStep(row.problem_id, step, score, value)
            num_steps, num_unknown = num_steps + len(values), num_unknown + list(values).count(None)
        if self.target == "values":
            leave_out(input_path, num_unknown, num_steps, "steps", "lead to a state whose value is not known")
        return found
