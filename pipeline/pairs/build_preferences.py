"""Trajectories → PreferencePair, four ways: by outcome, by process rewards, from a state, between partial solutions.

- **outcome**: correct over incorrect, nothing else known; pairs are drawn by a seeded shuffle. With `keeps_cut` and 64
  pairs a problem these are the pairs of DPO-positive in VinePPO (Kazemnejad et al. 2024).
- **process**: whole solutions ranked by their aggregated step scores (`pipeline.pairs.process_pairs`).
- **step** and **partial**: from inside the solutions, by values or scores (`pipeline.pairs.state_pairs`).

Scores and values are joined by trajectory id, never by text. Trajectories with the same tokens are one. The pairs are
a function of the samples and the seed alone: the order of the rows and other problems in the file change nothing.
`max_pairs` is a cap on the pairs of one problem, 0 for none. `part` and `held_out_share` read a part of the problems.
"""

import logging
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from espalier.data.jsonl import iter_rows, read_records
from espalier.data.records import BadInput, PreferencePair, StepScores, StepValues, Trajectory
from espalier.data.splitters.react import react_steps
from espalier.pipeline.pairs.pair_statistics import pair_statistics
from espalier.pipeline.pairs.process_pairs import (
    ProcessRule,
    Scored,
    make_pair,
    process_pairs,
    up_to_first_error,
)
from espalier.pipeline.pairs.state_pairs import CHOSEN, WHICH, PartialRule, drawn, partial_pairs, step_pairs
from espalier.pipeline.pairs.trajectory_groups import Groups, ProblemPart, check_choice, check_counts, read_groups
from espalier.pipeline.prm.seen_problems import note_seen
from espalier.pipeline.stage import StageContext
from espalier.rewards.aggregate import aggregate, check_aggregate
from espalier.values.step_values import without_gaps

log = logging.getLogger("stage")

FLATTERED = "are ranked by scores that flatter"  # problems that the reward model was trained on


def outcome_pairs(group: Sequence[Trajectory], max_pairs: int, rng: random.Random) -> list[PreferencePair]:
    """Return up to `max_pairs` (0: all) of all correct x incorrect pairs of a problem, drawn without replacement."""
    correct = [t for t in group if t.is_correct]
    wrong = [t for t in group if not t.is_correct]
    everything = [(good, bad) for good in correct for bad in wrong]
    return [make_pair("outcome", (good, 1.0), (bad, 0.0)) for good, bad in drawn(everything, max_pairs, rng)]


def report(pairs: list[PreferencePair], groups: Groups, context: StageContext) -> list[PreferencePair]:
    """Return the pairs, and put into the counts what was read and left out, and the statistics of the pairs."""
    context.counts.update(groups.counts)
    context.counts["problems"] = len(groups.by_problem)
    context.counts["problems_all_right"] = groups.num_of(right=True)
    context.counts["problems_all_wrong"] = groups.num_of(right=False)
    context.counts.update(pair_statistics(pairs))
    if not pairs:
        log.warning("no pair: no problem has trajectories that differ enough (all right, or all wrong?)")
    return pairs


def problem_ids(path: str) -> set[str]:
    """Return the problems of any file whose rows have a `problem_id`. Raises BadInput on a row without one."""
    ids = set()
    for place, row in iter_rows(path):
        if not isinstance(row.get("problem_id"), str):
            raise BadInput(f"{place}: no problem_id: name trajectories, step values or pairs")
        ids.add(row["problem_id"])
    return ids


def read_steps(values: str, scores: str, labels: str = "") -> dict[str, tuple[str, list[float]]]:
    """Trajectory id → (problem id, one number a step), from the values or the labels of StepValues, or from StepScores,
    whichever is named. Trajectories of which a value is not known are left out and counted; a missing label is nan.

    Raises BadInput where more than one or none is.
    """
    if bool(values) + bool(scores) + bool(labels) != 1:
        raise BadInput("name one of stage.values and stage.labels (StepValues) and stage.scores (StepScores)")
    if labels:
        return {
            row.id: (row.problem_id, [math.nan if label is None else label for label in row.labels])
            for row in read_records(StepValues, labels)
        }
    if values:
        rows = without_gaps(read_records(StepValues, values), values)
        return {row.id: (row.problem_id, numbers) for row, numbers in rows}
    return {row.id: (row.problem_id, row.scores) for row in read_records(StepScores, scores)}


def numbers_of_steps(
    trajectory: Trajectory, found: Mapping[str, tuple[str, list[float]]], path: str, may_lack: bool = False
) -> list[float]:
    """Return the numbers of a trajectory's steps. Raises BadInput where they are missing or another trajectory's."""
    if trajectory.id not in found:
        raise BadInput(f"{path}: no scores for trajectory '{trajectory.id}': score these trajectories")
    problem, numbers = found[trajectory.id]
    if problem != trajectory.problem_id or len(numbers) != len(trajectory.steps):
        raise BadInput(
            f"{path}: '{trajectory.id}' has {len(numbers)} steps of problem '{problem}', its trajectory "
            f"{len(trajectory.steps)} of '{trajectory.problem_id}': score these trajectories"
        )
    if not all(math.isfinite(number) or (may_lack and math.isnan(number)) for number in numbers):
        raise BadInput(f"{path}: '{trajectory.id}' has a score that is no finite number: score again")
    return numbers


@dataclass(frozen=True, kw_only=True)
class OutcomePreferences(ProblemPart):
    """Correct over incorrect; at most `max_pairs` a problem. `keeps_cut`: responses cut by their length are wrong
    ones too, as in VinePPO's generator; without it they take no part."""

    max_pairs: int = 0
    keeps_cut: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        self.check_part()
        check_counts(max_pairs=self.max_pairs)

    def inputs(self) -> list[str]:
        """None beside the trajectories."""
        return []

    def run(self, input_path: str, context: StageContext) -> list[PreferencePair]:
        """Return pairs in the order of their problems' ids."""
        groups = read_groups(input_path, self, keeps_cut=self.keeps_cut)
        pairs: list[PreferencePair] = []
        for problem, group in groups.by_problem.items():
            pairs += outcome_pairs(group, self.max_pairs, random.Random(f"{self.seed}/{problem}"))
        return report(pairs, groups, context)


@dataclass(frozen=True, kw_only=True)
class ProcessPreferences(ProcessRule, ProblemPart):
    """By step scores made one (`how`): see `pipeline.pairs.process_pairs.ProcessRule` for which pairs.

    `skips_types` (ReAct's Thought, Action, Observation, State), `drop_first` and `drop_last` leave steps out of the
    score; where nothing would be left, all steps count. `exclude` names a file whose problems make no pair of two
    right solutions (the reward model's training data, whose scores flatter). `excludes_seen` leaves out every problem
    whose scores say that the reward model was trained on it (`StepScores.is_seen`); either way a warning counts them.
    `cut_wrong_below` (null: never) ends wrong solutions, once they are ranked, with their first step that scores below
    it; `min_rejected_steps` counts what is left.
    """

    scores: str
    how: str = "product"
    skips_types: Sequence[str] = ()
    drop_first: int = 0
    drop_last: int = 0
    exclude: str = ""
    excludes_seen: bool = True
    cut_wrong_below: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self.check_part()
        self.check_rule()
        if self.cut_wrong_below is not None and self.wrong_margin is not None:
            raise BadInput("stage.cut_wrong_below cuts wrong solutions, and stage.wrong_margin would choose them: set "
                           "one of them to null")  # fmt: skip
        check_aggregate(self.how)
        check_counts(drop_first=self.drop_first, drop_last=self.drop_last)
        for name in self.skips_types:
            check_choice("skips_types", name, ("Thought", "Action", "Observation", "State"))

    def inputs(self) -> list[str]:
        """Return the step scores, and the problems to exclude."""
        return [path for path in (self.scores, self.exclude) if path]

    def run(self, input_path: str, context: StageContext) -> list[PreferencePair]:
        """Return pairs in the order of their problems' ids. Those whose scorer gave no score that can be read make no
        pair and are counted. Raises BadInput for a trajectory that is not in the scores."""
        scores = read_steps("", self.scores)
        unscored = {name for name, (_, numbers) in scores.items() if not numbers}
        excluded = problem_ids(self.exclude) if self.exclude else set()
        groups = read_groups(input_path, self)
        consequence = "make no pair" if self.excludes_seen else FLATTERED
        seen = note_seen(groups.by_problem, self.scores, context, consequence)
        pairs: list[PreferencePair] = []
        num_unscored = 0
        for problem, group in groups.by_problem.items():
            if self.excludes_seen and problem in seen:
                continue
            known = [t for t in group if t.id not in unscored]
            num_unscored += len(group) - len(known)
            scored: list[Scored] = [self._scored(t, numbers_of_steps(t, scores, self.scores)) for t in known]
            made = process_pairs(scored, self, random.Random(f"{self.seed}/{problem}"))
            pairs += [p for p in made if not (problem in excluded and p.kind == "process_correct")]
        context.counts["problems_excluded"] = len(excluded & groups.by_problem.keys())
        if num_unscored:
            context.counts["without_score"] = num_unscored
        return report(pairs, groups, context)

    def _scored(self, trajectory: Trajectory, scores: Sequence[float]) -> Scored:
        score = self.score(trajectory, scores)
        if self.cut_wrong_below is not None:
            trajectory = up_to_first_error(trajectory, scores, self.cut_wrong_below)
        return trajectory, score

    def score(self, trajectory: Trajectory, scores: Sequence[float]) -> float:
        """Return one score of the steps that count. Raises BadAggregate as `rewards.aggregate` does."""
        positions = range(self.drop_first, len(scores) - self.drop_last)
        if self.skips_types:
            kinds = [react_steps(step)[0].type if step else "" for step in trajectory.steps]
            positions = [place for place in positions if kinds[place] not in self.skips_types]  # type: ignore[assignment]
        return aggregate([scores[place] for place in positions] or scores, self.how)


@dataclass(frozen=True, kw_only=True)
class StepPreferences(ProblemPart):
    """From a shared state, by Monte-Carlo `values` or the `labels` of them (a StepValues file), or by a reward model's
    `scores` (StepScores).

    `which`: best_over_worst or all next steps that differ by more than `margin`; steps without a label make no pair.
    `chosen`: step, or solution: the better step and all that follows it in a right solution.
    Trajectories that are not in the file take no part and are counted as `unknown`.
    """

    values: str = ""
    labels: str = ""
    scores: str = ""
    margin: float = 0.5
    which: str = "best_over_worst"
    chosen: str = "step"
    max_pairs: int = 0

    def __post_init__(self) -> None:
        self.check_part()
        check_choice("which", self.which, WHICH)
        check_choice("chosen", self.chosen, CHOSEN)
        check_counts(max_pairs=self.max_pairs)

    def inputs(self) -> list[str]:
        """Return the step values or the step scores."""
        return [path for path in (self.values, self.labels, self.scores) if path]

    def run(self, input_path: str, context: StageContext) -> list[PreferencePair]:
        """Return pairs in the order of their problems' ids."""
        groups, values = _with_values(self, input_path, self.labels)
        if self.scores:
            note_seen(groups.by_problem, self.scores, context, FLATTERED)
        pairs: list[PreferencePair] = []
        for group in groups.by_problem.values():
            pairs += step_pairs(group, values, self.margin, self.which, self.max_pairs, self.chosen)
        return report(pairs, groups, context)


@dataclass(frozen=True, kw_only=True)
class PartialPreferences(PartialRule, ProblemPart):
    """Partial solutions of one problem, by `values` or `scores`: see `pipeline.pairs.state_pairs.PartialRule`."""

    values: str = ""
    scores: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        self.check_part()
        self.check_rule()

    def inputs(self) -> list[str]:
        """Return the step values, or the step scores."""
        return [path for path in (self.values, self.scores) if path]

    def run(self, input_path: str, context: StageContext) -> list[PreferencePair]:
        """Return pairs in the order of their problems' ids."""
        groups, values = _with_values(self, input_path)
        if self.scores:
            note_seen(groups.by_problem, self.scores, context, FLATTERED)
        pairs: list[PreferencePair] = []
        for problem, group in groups.by_problem.items():
            pairs += partial_pairs(group, values, self, random.Random(f"{self.seed}/{problem}"))
        return report(pairs, groups, context)


def _with_values(stage: Any, input_path: str, labels: str = "") -> tuple[Groups, dict[str, list[float]]]:
    """Return the trajectories that have values, and the values of theirs."""
    numbers = {name: row for name, row in read_steps(stage.values, stage.scores, labels).items() if row[1]}
    groups = read_groups(input_path, stage, known=numbers)
    path = stage.values or stage.scores or labels
    rows = [trajectory for group in groups.by_problem.values() for trajectory in group]
    return groups, {row.id: numbers_of_steps(row, numbers, path, bool(labels)) for row in rows}
