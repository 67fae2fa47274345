"""Trajectory → StepValues: steps labelled by contrast with the other next steps of the same state (`values.contrast`).

    python run_stage.py -cn values/label_by_contrast input=solutions.jsonl output=step_values.jsonl \\
      stage.trajectories=trajectories.jsonl stage.states=states.jsonl

The input are the completions of `states` as whole solutions (`values/join_completions`); the states are those of right
trajectories (`values/cut_states stage.solutions=right`). Problems are worked on one by one (`data.row_index`), twice:
first their counts, which give the prior of values, then their labels.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from espalier.data.records import BadInput, State, StepValues, Trajectory
from espalier.data.row_index import FILE, ProblemRows
from espalier.data.steps import check_ends
from espalier.pipeline.stage import StageContext
from espalier.values.contrast import (
    Continuation,
    Contrast,
    HeldBack,
    RightEvidence,
    contrast_labels,
    count_behind,
    hold_back,
    prior_of,
    right_evidence,
)
from espalier.values.first_error import states_on_right_ways
from espalier.values.monte_carlo import Count, StateKey
from espalier.values.step_values import UNKNOWN, counted, step_values

log = logging.getLogger("stage")


@dataclass
class _Totals:
    """Sums over all problems; `labels` of steps of the continuations behind their states."""

    num_right: int = 0
    num_kept: int = 0
    labels: Counter[float | None] = field(default_factory=Counter)
    evidence: RightEvidence = field(default_factory=RightEvidence)
    held: HeldBack = field(default_factory=HeldBack)


@dataclass(frozen=True)
class LabelByContrast:
    """Values are shares of right samples behind a state, where there are any; labels are 1, 0 or none."""

    trajectories: str
    """the trajectories whose states were completed"""
    states: str
    """the states that were completed"""
    drop: float = 0.5
    """a step is wrong that leaves less than this share of the best sibling's value"""
    confidence: float = 0.9
    """how sure a label must be: the posterior probability of that"""
    max_per_step: int = 2
    """solutions kept per next step of a state behind the prompt, the first sampled (0: all): siblings share most of
    their tokens"""
    fewest_labels: int = 50
    """labels of each kind, of the continuations' steps, below which the stage refuses: there is nothing to learn"""

    def inputs(self) -> list[str]:
        """Return both files."""
        return [self.trajectories, self.states]

    def run(self, input_path: str, context: StageContext) -> Iterator[StepValues]:
        """Yield one record per solution that is kept, the trajectories' own first. Raises BadInput where files do not
        belong together, there are too few labels of a kind, or samples that were held back contradict them: before the
        first record."""
        with ProblemRows(context.output) as rows:
            num_trajectories = rows.add(Trajectory, self.trajectories)
            num_states, num_solutions = rows.add(State, self.states), rows.add(Trajectory, input_path)
            context.counts["solutions"] = num_trajectories + num_solutions
            numbers: Counter[Count] = Counter()
            for problem in rows.problems():
                numbers.update(count_behind(_completions(self._continuations(rows, problem, input_path))).values())
            if num_states and not num_solutions:
                raise BadInput(f"{input_path}: no completion of {num_states} states: complete and join them first "
                               "(values/join_completions)")  # fmt: skip
            rule = Contrast(prior_of(numbers), self.drop, self.confidence)
            yield from rows.sorted_on_disk(self._placed(rows, input_path, rule, context))

    def _placed(
        self, rows: ProblemRows, input_path: str, rule: Contrast, context: StageContext
    ) -> Iterator[tuple[int, StepValues]]:
        """Yield (place among the rows of all files, record) of what is kept, by problem; then check the sums."""
        totals = _Totals()
        for problem in rows.problems():
            continuations = self._continuations(rows, problem, input_path)
            places = [*rows.places(0, problem), *(2 * FILE + place for place in rows.places(2, problem))]
            completions = _completions(continuations)
            counts = count_behind(completions)
            right = states_on_right_ways([continuation.solution for continuation in continuations])
            labels = contrast_labels(continuations, counts, right, rule)
            totals.labels.update(_labels_behind(continuations, labels))
            totals.num_right += sum(not one.is_completion and one.solution.is_correct for one in continuations)
            totals.evidence += right_evidence(continuations, counts, rule)
            totals.held += hold_back(completions, rule)
            for kept in _first_of_each_step(continuations, self.max_per_step):
                totals.num_kept += 1
                yield places[kept], _record(continuations[kept], labels[kept], counts)
        self._check_labels(totals, context)
        self._note_evidence(totals.evidence, context)
        self._check_held_back(totals.held, context)
        context.counts["kept"] = totals.num_kept

    def _continuations(self, rows: ProblemRows, problem: int, input_path: str) -> list[Continuation]:
        trajectories: list[Trajectory] = rows.rows(0, problem)
        states: list[State] = rows.rows(1, problem)
        known = {trajectory.id for trajectory in trajectories}
        if foreign := [state.id for state in states if state.trajectory_id not in known]:
            raise BadInput(f"{self.states}: state '{foreign[0]}' is of no trajectory of {self.trajectories}: name the "
                           "trajectories that the states were cut from")  # fmt: skip
        starts = {state.id: state.prefix_ids for state in states}
        continuations = [Continuation(trajectory, 0, is_completion=False) for trajectory in trajectories]
        for solution in rows.rows(2, problem):
            state = solution.id.rpartition("/")[0]
            start = starts.get(state, starts.get(state.rpartition("@")[0]))
            if start is None or solution.response_ids[: len(start)] != start:
                raise BadInput(f"{input_path}: solution '{solution.id}' continues no state of {self.states}: join the "
                               "completions of these states (values/join_completions)")  # fmt: skip
            continuations.append(Continuation(solution, len(start)))
        for continuation in continuations:
            check_ends(continuation.solution.steps, continuation.solution.step_ends, continuation.solution.id)
        return continuations

    def _check_labels(self, totals: _Totals, context: StageContext) -> None:
        """Put into the counts what the labels are of, and refuse too few of them."""
        num_right, right, wrong, without = (totals.num_right, *(totals.labels[label] for label in (1.0, 0.0, None)))
        context.counts.update(right_trajectories=num_right, steps_wrong=wrong, steps_right=right,
                              steps_unlabelled=without)  # fmt: skip
        log.info(
            "%d right trajectories; steps of the continuations: %d right, %d wrong, %d without a label",
            num_right, right, wrong, without,
        )  # fmt: skip
        if min(wrong, right) < self.fewest_labels:
            raise BadInput(f"{self.trajectories}: {num_right} right trajectories gave labels of {right} right "
                           f"and {wrong} wrong steps, below stage.fewest_labels={self.fewest_labels}: sample "
                           "more problems or more completions per state, or train the policy first")  # fmt: skip

    def _note_evidence(self, found: RightEvidence, context: StageContext) -> None:
        """Count what labels of right steps rest on; warn where that is little."""
        context.counts.update(
            distinct_steps_right=found.steps,
            right_by_one_solution=found.by_one,
            right_beside_far_better=found.contradicted,
        )
        if 2 * found.by_one > found.steps:
            log.warning("%d of %d steps that are called right rest on one right solution each: where answers can be "
                        "right by luck, take more completions per state", found.by_one, found.steps)  # fmt: skip
        if found.contradicted > (1 - self.confidence) * found.steps:
            log.warning("%d of %d steps that are called right, because a right solution passed through them, leave "
                        "less than %g of the best step's success: that solution may be luck", found.contradicted,
                        found.steps, self.drop)  # fmt: skip

    def _check_held_back(self, found: HeldBack, context: StageContext) -> None:
        """Hold what half of the samples call wrong against the other half."""
        if not (found.wrong.num_completions and found.best.num_completions):
            log.warning("no step that half of the samples call wrong has a sample in the other half: nothing to hold "
                        "the labels against: take more completions per state")  # fmt: skip
            return
        wrong, best = found.wrong.value, found.best.value
        context.counts.update(held_back_wrong=round(wrong, 4), held_back_best=round(best, 4))
        if found.contradicts(self.drop):
            raise BadInput(f"{self.trajectories}: after steps that half of the samples call wrong {wrong:.1%} of the "
                           f"other half are right, after the best steps beside them {best:.1%}, and a wrong step is to "
                           f"leave less than {self.drop:g} of that: right answers are luck here, or completions too "
                           "few: take more completions per state, or labels by value (labels=values)")  # fmt: skip


def _completions(continuations: Sequence[Continuation]) -> list[Continuation]:
    return [continuation for continuation in continuations if continuation.is_completion]


def _labels_behind(
    continuations: Sequence[Continuation], labels: Sequence[Sequence[float | None]]
) -> Iterator[float | None]:
    """Yield the labels of steps behind the continuations' states, but for the last ones."""
    for continuation, row in zip(continuations, labels, strict=True):
        for end, label in zip(continuation.solution.step_ends[:-1], row, strict=False):
            if end > continuation.start:
                yield label


def _first_of_each_step(continuations: Sequence[Continuation], limit: int) -> list[int]:
    """Return the places of the first `limit` solutions (0: all) of every next step of every state."""
    taken: dict[StateKey, int] = defaultdict(int)
    kept = []
    for place, continuation in enumerate(continuations):
        end = continuation.first_end
        if end is None:
            continue
        taken[continuation.key(end)] += 1
        if not limit or taken[continuation.key(end)] <= limit or not continuation.start:
            kept.append(place)
    return kept


def _record(continuation: Continuation, labels: list[float | None], counts: Mapping[StateKey, Count]) -> StepValues:
    """Return the values that samples behind the continuation's state give, and the labels. Steps before that state
    weigh nothing: they are the trajectory's, whose own record has them, and would say right thousands of times."""
    solution = continuation.solution
    inner = [
        counted(counts[continuation.key(end)]) if continuation.key(end) in counts else UNKNOWN
        for end in solution.step_ends[:-1]
    ]
    weights = [
        float(label is not None and end > continuation.start)
        for label, end in zip(labels, solution.step_ends, strict=True)
    ]
    return replace(step_values(solution, inner), labels=labels, weights=weights)
