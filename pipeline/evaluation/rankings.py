"""How scores rank the samples of a problem and weigh their votes: a scorer's file, read problem by problem.

The file holds either StepScores (one score a step) or OutcomeScore rows (one score a trajectory). What its scores are
is known when all have been looked at once: `look` at every problem, `settle`, then ask for `rankings`.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from espalier.data.jsonl import iter_rows
from espalier.data.records import BadInput, StepScores, Trajectory
from espalier.data.row_index import ProblemRows
from espalier.pipeline.evaluation.evaluation_inputs import OutcomeScore, ProblemSamples
from espalier.pipeline.prm.seen_problems import SeenCounts
from espalier.pipeline.stage import StageContext
from espalier.rewards.aggregate import aggregate, logistic

log = logging.getLogger("stage")


@dataclass(frozen=True)
class Ranking:
    """One scorer with one aggregation, on a problem: `scores` rank trajectories (best of n), `weights` (at least 0)
    vote. One that the scorer gave no score ranks behind all others and does not vote."""

    name: str
    scores: dict[str, float]
    weights: dict[str, float]

    def scores_of(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """For best of n."""
        return [self.scores[t.id] for t in trajectories]

    def weights_of(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """For the weighted vote."""
        return [self.weights[t.id] for t in trajectories]


class ScoreFile:
    """A scorer's scores, ranked once for each of the `aggregates` and named `name_aggregate`, or once in all, `name`,
    for outcome scores. Raises BadInput on a bad or empty file."""

    def __init__(self, rows: ProblemRows, path: str, name: str, aggregates: Sequence[str]):
        row = next((row for _, row in iter_rows(path)), None)
        if row is None:
            raise BadInput(f"{path}: no scores: score the trajectories first")
        self._path, self._name, self._aggregates, self._rows = path, name, aggregates, rows
        self._place, self._is_of_outcomes = rows.num_files, "score" in row
        rows.add(OutcomeScore if self._is_of_outcomes else StepScores, path)
        self._seen = SeenCounts(path, name)
        self._num_unscored = self._total = 0
        self._has_several, self._is_one_each, self._has_log_odds = False, True, False
        self._num_with_inner = self._num_last_minima = 0
        self._unlike = ""

    def _scores(self, number: int) -> tuple[dict[str, list[float]], list[Any]]:
        """Return trajectory id → its scores, [] where it was given none, of a problem; and the rows."""
        rows = self._rows.rows(self._place, number)
        if self._is_of_outcomes:
            return {row.id: [] if row.score is None else [row.score] for row in rows}, rows
        return {row.id: row.scores for row in rows}, rows

    def _lacks(self, trajectory: Trajectory, scores: Sequence[float]) -> bool:
        return not scores and bool(self._is_of_outcomes or trajectory.steps)

    def look(self, samples: ProblemSamples) -> None:
        """Take in a problem. Raises BadInput where a trajectory has no scores."""
        scores, rows = self._scores(samples.number)
        self._total += len(samples.group)
        self._seen.add(row.is_seen for row in rows)
        for t in samples.group:
            if t.id not in scores:
                raise BadInput(f"{self._path}: no scores for trajectory '{t.id}': score these first")
            mine = scores[t.id]
            if self._lacks(t, mine):
                self._num_unscored += 1
                continue
            self._has_several |= len(t.steps) > 1
            self._is_one_each &= len(mine) == 1
            self._has_log_odds |= not all(0 <= score <= 1 for score in mine)
            if len(mine) > 1:
                self._num_with_inner += 1
                self._num_last_minima += mine[-1] < min(mine[:-1])
            if len(mine) != len(t.steps) and not self._unlike:
                self._unlike = f"'{t.id}' has {len(mine)} scores and {len(t.steps)} steps"

    def settle(self, context: StageContext) -> None:
        """Decide what the scores are, and warn of what they lack or have seen. Raises BadInput where a trajectory has
        not one score for each of its steps."""
        if self._num_unscored:
            log.warning("%s: %d of %d trajectories were given no score: they rank behind all others and do not vote",
                        self._path, self._num_unscored, self._total)  # fmt: skip
        if self._unlike and not self._is_outcome:
            raise BadInput(f"{self._path}: trajectory {self._unlike}: score these trajectories again")
        self._seen.note(context, "look better by its scores than other problems would")

    @property
    def name(self) -> str:
        """What the file is called."""
        return self._name or "scores"

    @property
    def last_minimum(self) -> float | None:
        """The share of trajectories of several scores whose lowest one is the last's alone: a process reward model with
        many is an outcome model in disguise. None where no trajectory has several."""
        return self._num_last_minima / self._num_with_inner if self._num_with_inner else None

    @property
    def _is_outcome(self) -> bool:
        """Whether every trajectory has one score; where none has several steps, a step's is as good."""
        return self._is_of_outcomes or (self._has_several and self._is_one_each)

    def rankings(self, samples: ProblemSamples) -> list[Ranking]:
        """Return those of a problem. Outcome scores that are no shares are taken for log-odds."""
        scores, _ = self._scores(samples.number)
        unscored = [t.id for t in samples.group if self._lacks(t, scores[t.id])]
        known = {t.id: scores[t.id] for t in samples.group if not self._lacks(t, scores[t.id])}
        if self._is_outcome:
            first = {name: mine[0] for name, mine in known.items()}
            return [_ranking(self._name or "outcome", first, unscored, self._has_log_odds)]
        return [
            _ranking(
                f"{self._name}_{how}".lstrip("_"),
                {name: aggregate(mine, how) for name, mine in known.items()},
                unscored,
                is_log_odds=how == "log_odds",
            )
            for how in self._aggregates
        ]


def _ranking(name: str, scores: dict[str, float], unscored: Sequence[str], is_log_odds: bool) -> Ranking:
    """Weigh log-odds as shares, as a vote's weights cannot be negative."""
    weights = {key: logistic(score) for key, score in scores.items()} if is_log_odds else scores
    return Ranking(name, scores | dict.fromkeys(unscored, -math.inf), weights | dict.fromkeys(unscored, 0.0))
