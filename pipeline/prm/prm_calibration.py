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

Problems are read one by one (`data.row_index`). An AUC needs the scores of all steps at once: some 40 bytes of numbers
are kept per distinct step, and no text and no token.
"""

import logging
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from espalier.data.examples.token_examples import is_held_out
from espalier.data.left_out import leave_out
from espalier.data.records import BadInput, StepScores, StepValues
from espalier.data.row_index import ProblemRows
from espalier.data.splits import split_key
from espalier.pipeline.evaluation.calibration_metrics import calibration_bins, calibration_error
from espalier.pipeline.evaluation.intervals import Numbers, mean_over_problems, resampled
from espalier.pipeline.prm.seen_problems import SeenCounts
from espalier.pipeline.stage import StageContext

log = logging.getLogger("stage")
FEWEST_PROBLEMS = 10
"""Below which nothing is said of whether the scores know more than a step's index."""
TARGETS = ("values", "labels")

_STEPS = 1 << 22  # more steps than a solution has: what its place in the file is multiplied by to order them


def auc(scores: Numbers, is_positive: Sequence[bool] | np.ndarray, weights: Numbers | None = None) -> float | None:
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
class ScoredSteps:
    """Distinct steps, in the order in which a file has them first. All arrays are [R]."""

    problems: np.ndarray
    """place of the step's problem in the order of all problems' ids"""
    indices: np.ndarray
    """of the step in its solution, from 1"""
    scores: np.ndarray
    """of the step"""
    values: np.ndarray
    """of the state that it leads to"""
    is_last: np.ndarray
    """whether the solution ends with it"""

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def num_problems(self) -> int:
        """That have such a step."""
        return len(np.unique(self.problems))

    def part(self, is_last: bool) -> "ScoredSteps":
        """Return the last steps, or the others."""
        rows = self.is_last == is_last
        return ScoredSteps(
            self.problems[rows], self.indices[rows], self.scores[rows], self.values[rows], self.is_last[rows]
        )


@dataclass
class _Found:
    """Takes in steps in any order, and counts those of all solutions."""

    num_steps: int = 0
    num_unknown: int = 0
    """without a value"""
    wrong: tuple[int, str] | None = None
    """the first solution, by its place, that does not fit its scores, and the line that says so"""
    orders: "array[int]" = field(default_factory=lambda: array("q"))
    problems: "array[int]" = field(default_factory=lambda: array("l"))
    indices: "array[int]" = field(default_factory=lambda: array("l"))
    scores: "array[float]" = field(default_factory=lambda: array("d"))
    values: "array[float]" = field(default_factory=lambda: array("d"))
    is_last: "array[int]" = field(default_factory=lambda: array("b"))

    def add(self, order: int, problem: int, index: int, score: float, value: float, is_last: bool) -> None:
        """Take in a step; `order` is the number that they are sorted by."""
        self.orders.append(order)
        self.problems.append(problem)
        self.indices.append(index)
        self.scores.append(score)
        self.values.append(value)
        self.is_last.append(is_last)

    def steps(self) -> ScoredSteps:
        """Return them in order."""
        order = np.argsort(np.asarray(self.orders), kind="stable")
        problems, indices = np.asarray(self.problems), np.asarray(self.indices)
        scores, values, is_last = np.asarray(self.scores), np.asarray(self.values), np.asarray(self.is_last, dtype=bool)
        return ScoredSteps(problems[order], indices[order], scores[order], values[order], is_last[order])


def quality(steps: ScoredSteps) -> dict[str, Any]:
    """Return `{"auc", "ece", "value_mae", "num_steps", "num_problems"}`; the first three are `{"mean", "low", "high",
    "n"}` with n problems, None where they are not defined."""
    problems, scores, values = steps.problems, steps.scores, steps.values
    is_good = values > 0.5
    return {
        "auc": resampled(problems, lambda weights: auc(scores, is_good, weights)),
        "ece": resampled(problems, lambda weights: calibration_error(scores, values, weights)),
        "value_mae": mean_over_problems(problems, np.abs(scores - values)),
        "num_steps": len(steps),
        "num_problems": steps.num_problems,
    }


def beside_index(steps: ScoredSteps) -> dict[str, Any]:
    """Return `{"index_auc", "above_index"}`: the AUC of a score that knows the step's index alone, and how far that of
    the scores is above it; as `quality` gives figures."""
    problems, scores, is_good = steps.problems, steps.scores, steps.values > 0.5
    by_index = np.bincount(steps.indices, is_good) / np.maximum(np.bincount(steps.indices), 1)
    shares = by_index[steps.indices]

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
        steps = self.scored_steps(input_path, context)
        parts = {"inner": steps.part(is_last=False), "terminal": steps.part(is_last=True)}
        result: dict[str, Any] = {name: quality(part) for name, part in parts.items()}
        for name, row in result.items():
            figures = {key: row[key] and row[key]["mean"] for key in ("auc", "ece", "value_mae")}
            context.counts.update({f"{name}_{key}": value for key, value in figures.items()})
            context.counts[f"{name}_steps"] = row["num_steps"]
        result["inner"] |= beside_index(parts["inner"])
        self._note_index(result["inner"], context)
        context.counts["num_problems"] = steps.num_problems
        bins = {name: calibration_bins(part.scores, part.values) for name, part in parts.items()}
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

    def scored_steps(self, input_path: str, context: StageContext) -> ScoredSteps:
        """Return the distinct steps of held-out problems whose value is known; count steps without value, and problems
        that were perhaps trained on.

        A step that several solutions have counts with the score and the value of the last one. Raises BadInput as `run`
        does.
        """
        found, seen, num_trained_on = _Found(), SeenCounts(self.scores), 0
        with ProblemRows(context.output) as rows:
            rows.add(StepValues, input_path)
            rows.add(StepScores, self.scores)
            if moved := rows.elsewhere(0, 1):
                raise BadInput(f"{self.scores}: the scores of '{moved[0].id}' are said to be of problem "
                               f"'{moved[1].problem_id}', its {self.target} of '{moved[0].problem_id}': score these "
                               "trajectories")  # fmt: skip
            for number, problem in enumerate(rows.problems_by_id()):
                placed = list(zip(rows.places(0, problem), rows.rows(0, problem), strict=True))
                scored: list[StepScores] = rows.rows(1, problem)
                if placed and is_held_out(split_key(placed[0][1]), self.held_out_share):
                    num_trained_on += any(row.is_seen for row in scored)
                    if self._take_in(found, number, placed, {row.id: row.scores for row in scored}):
                        seen.add(row.is_seen for row in scored)
        if num_trained_on:
            raise BadInput(f"{self.scores}: the reward model was trained on {num_trained_on} problems that "
                           f"held_out_share {self.held_out_share} holds out: set stage.held_out_share as in its "
                           "training")  # fmt: skip
        if found.wrong:
            raise BadInput(found.wrong[1])
        if self.target == "values":
            reason = "lead to a state whose value is not known"
            leave_out(input_path, found.num_unknown, found.num_steps, "steps", reason)
        if not found.orders:
            raise BadInput(f"{input_path}: no held-out problem (held_out_share {self.held_out_share})")
        seen.note_unknown(context)
        return found.steps()

    def _take_in(
        self,
        found: _Found,
        number: int,
        placed: Sequence[tuple[int, StepValues]],
        scores: Mapping[str, Sequence[float]],
    ) -> bool:
        """Take in the distinct steps of a problem, each of its solutions behind its place; whether there are any."""
        distinct: dict[tuple[tuple[int, ...], bool], tuple[int, int, float, float]] = {}
        for place, row in placed:
            if self.target == "labels" and row.id not in scores and "#" in row.id:  # a completion's, by its id
                continue
            values = row.values if self.target == "values" else row.labels
            numbers = scores.get(row.id, [])
            if len(numbers) != len(values):
                line = (f"{self.scores}: trajectory '{row.id}' has {len(numbers)} scores and {len(values)} "
                        f"{self.target}: score these trajectories")  # fmt: skip
                found.wrong = min(found.wrong or (place, line), (place, line))
                break
            for step, (end, value, score) in enumerate(zip(row.step_ends, values, numbers, strict=True), 1):
                if value is not None:
                    key = tuple(row.response_ids[:end]), step == len(row.steps)
                    order = distinct[key][0] if key in distinct else place * _STEPS + step
                    distinct[key] = order, step, score, value
            found.num_steps, found.num_unknown = found.num_steps + len(values), found.num_unknown + values.count(None)
        for (_, is_last), (order, step, score, value) in distinct.items():
            found.add(order, number, step, score, value, is_last)
        return bool(distinct)
