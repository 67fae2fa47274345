"""Trajectories → PreferencePair, four ways: by outcome, by process rewards, from a state, between partial solutions.

- **outcome**: correct over incorrect, nothing else known; pairs are drawn by a seeded shuffle. With `keeps_cut` and 64
  pairs a problem these are the pairs of DPO-positive in VinePPO (Kazemnejad et al. 2024).
- **process**: whole solutions ranked by their aggregated step scores (`pipeline.pairs.process_pairs`).
- **step** and **partial**: from inside the solutions, by values or scores (`pipeline.pairs.state_pairs`).

Scores and values are joined by trajectory id, never by text. Trajectories with the same tokens are one. The pairs are
a function of the samples and the seed alone: the order of the rows and other problems in the file change nothing.
They are built problem by problem (`data.row_index`): no file is held in memory.
`max_pairs` is a cap on the pairs of one problem, 0 for none. `part` and `held_out_share` read a part of the problems.
"""

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from espalier.data.jsonl import iter_rows
from espalier.data.records import BadInput, PreferencePair, StepScores, StepValues, Trajectory
from espalier.data.row_index import ProblemRows
from espalier.data.splitters.react import react_steps
from espalier.pipeline.pairs.pair_statistics import PairStatistics
from espalier.pipeline.pairs.process_pairs import (
    ProcessRule,
    Scored,
    make_pair,
    process_pairs,
    up_to_first_error,
)
from espalier.pipeline.pairs.state_pairs import CHOSEN, WHICH, PartialRule, drawn, partial_pairs, step_pairs
from espalier.pipeline.pairs.step_numbers import StepNumbers
from espalier.pipeline.pairs.trajectory_groups import (
    GroupCounts,
    ProblemPart,
    check_choice,
    check_counts,
    iter_groups,
)
from espalier.pipeline.prm.seen_problems import SeenCounts
from espalier.pipeline.stage import StageContext
from espalier.rewards.aggregate import aggregate, check_aggregate

log = logging.getLogger("stage")

MakePairs = Callable[[str, Sequence[Trajectory], Mapping[str, list[float]]], list[PreferencePair]]

FLATTERED = "are ranked by scores that flatter"  # problems that the reward model was trained on


def outcome_pairs(group: Sequence[Trajectory], max_pairs: int, rng: random.Random) -> list[PreferencePair]:
    """Return up to `max_pairs` (0: all) of all correct x incorrect pairs of a problem, drawn without replacement."""
    correct = [t for t in group if t.is_correct]
    wrong = [t for t in group if not t.is_correct]
    everything = [(good, bad) for good in correct for bad in wrong]
    return [make_pair("outcome", (good, 1.0), (bad, 0.0)) for good, bad in drawn(everything, max_pairs, rng)]


def report(
    made: Iterable[Sequence[PreferencePair]], counts: GroupCounts, context: StageContext
) -> Iterator[PreferencePair]:
    """Yield the pairs of one problem after the other; then put into the counts what was read and left out, and the
    statistics of the pairs."""
    statistics = PairStatistics()
    for pairs in made:
        statistics.add(pairs)
        yield from pairs
    figures = statistics.figures()
    context.counts.update({**counts.figures(), **figures})
    if not figures["pairs"]:
        log.warning("no pair: no problem has trajectories that differ enough (all right, or all wrong?)")


def problem_ids(path: str) -> set[str]:
    """Return the problems of any file whose rows have a `problem_id`. Raises BadInput on a row without one."""
    ids = set()
    for place, row in iter_rows(path):
        if not isinstance(row.get("problem_id"), str):
            raise BadInput(f"{place}: no problem_id: name trajectories, step values or pairs")
        ids.add(row["problem_id"])
    return ids


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

    def run(self, input_path: str, context: StageContext) -> Iterator[PreferencePair]:
        """Yield pairs in the order of their problems' ids."""
        counts = GroupCounts()
        with ProblemRows(context.output) as rows:
            rows.add(Trajectory, input_path)
            groups = iter_groups(rows, self, counts, keeps_cut=self.keeps_cut)
            made = (outcome_pairs(group, self.max_pairs, random.Random(f"{self.seed}/{problem}"))
                    for _, problem, group in groups)  # fmt: skip
            yield from report(made, counts, context)


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

    def run(self, input_path: str, context: StageContext) -> Iterator[PreferencePair]:
        """Yield pairs in the order of their problems' ids. Those whose scorer gave no score that can be read make no
        pair and are counted. Raises BadInput for a trajectory that is not in the scores."""
        counts = GroupCounts()
        with ProblemRows(context.output) as rows:
            rows.add(Trajectory, input_path)
            scores = StepNumbers(rows, StepScores, self.scores)
            yield from report(self._made(rows, scores, counts, context), counts, context)

    def _made(
        self, rows: ProblemRows, scores: StepNumbers, counts: GroupCounts, context: StageContext
    ) -> Iterator[list[PreferencePair]]:
        excluded = problem_ids(self.exclude) if self.exclude else set()
        seen, num_excluded, num_unscored = SeenCounts(self.scores), 0, 0
        for number, problem, group in iter_groups(rows, self, counts):
            known = scores.of(number)
            num_excluded += problem in excluded
            is_seen = seen.add(row.is_seen for row in scores.records)
            if self.excludes_seen and is_seen:
                continue
            unscored = {row.id for row in scores.records} - known.keys()
            rest = [t for t in group if t.id not in unscored]
            num_unscored += len(group) - len(rest)
            scored: list[Scored] = [self._scored(t, scores.of_steps(t)) for t in rest]
            pairs = process_pairs(scored, self, random.Random(f"{self.seed}/{problem}"))
            yield [p for p in pairs if not (problem in excluded and p.kind == "process_correct")]
        seen.note(context, "make no pair" if self.excludes_seen else FLATTERED)
        context.counts["problems_excluded"] = num_excluded
        if num_unscored:
            context.counts["without_score"] = num_unscored

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

    `which`: best_over_worst or all next steps that differ by more than `margin`; steps without a label, or into a state
    whose value is not known, make no pair.
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

    def run(self, input_path: str, context: StageContext) -> Iterator[PreferencePair]:
        """Yield pairs in the order of their problems' ids."""

        def make(_: str, group: Sequence[Trajectory], values: Mapping[str, list[float]]) -> list[PreferencePair]:
            return step_pairs(group, values, self.margin, self.which, self.max_pairs, self.chosen)

        yield from _valued_pairs(self, input_path, context, make, self.labels, keeps_gaps=True)


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

    def run(self, input_path: str, context: StageContext) -> Iterator[PreferencePair]:
        """Yield pairs in the order of their problems' ids."""

        def make(problem: str, group: Sequence[Trajectory], values: Mapping[str, list[float]]) -> list[PreferencePair]:
            return partial_pairs(group, values, self, random.Random(f"{self.seed}/{problem}"))

        yield from _valued_pairs(self, input_path, context, make)


def _valued_pairs(
    stage: Any, input_path: str, context: StageContext, make: MakePairs, labels: str = "", keeps_gaps: bool = False
) -> Iterator[PreferencePair]:
    """Yield the pairs that are made of the trajectories of each problem that have values, with `keeps_gaps` also of
    those with some that are not known. Raises BadInput where more than one file of numbers is named, or none."""
    if bool(stage.values) + bool(stage.scores) + bool(labels) != 1:
        raise BadInput("name one of stage.values and stage.labels (StepValues) and stage.scores (StepScores)")
    path, counts = stage.values or stage.scores or labels, GroupCounts()
    seen = SeenCounts(path)

    def made(rows: ProblemRows, numbers: StepNumbers) -> Iterator[list[PreferencePair]]:
        for _, problem, group in iter_groups(rows, stage, counts, known=numbers.of):
            if stage.scores:
                seen.add(row.is_seen for row in numbers.records)
            yield make(problem, group, {row.id: numbers.of_steps(row) for row in group})
        numbers.note_gaps()
        if stage.scores:
            seen.note(context, FLATTERED)

    with ProblemRows(context.output) as rows:
        rows.add(Trajectory, input_path)
        numbers = StepNumbers(rows, StepScores if stage.scores else StepValues, path, bool(labels), keeps_gaps)
        yield from report(made(rows, numbers), counts, context)
