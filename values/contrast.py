"""Labels by contrast: a step is wrong where it leaves far less of the chance to succeed than the best step beside it.

Where success is rare, values of single states say little: most states have no right completion, right prefixes and
wrong ones alike. Two next steps of *one* state on the way of a right solution differ much more, because all that came
before is the same. With V' and V* the values after a step and after the best step sampled from the same state, counted
over the completions drawn from that state or earlier ones, a step is

- wrong (0) where P(V' < drop V*) is at least `confidence`,
- right (1) where a right solution passed through the state behind it,
- without a label otherwise.

P is by the Beta posteriors of both counts (`values.value_prior`). Every step of a right solution is right, and so is
what leads to a state that a right solution passed through; after a wrong step all steps of a solution that ended wrong
are wrong. The idea of comparing with the value before a step is that of relative progress (GenPRM, Zhao et al. 2025);
here the comparison is with siblings, which share the past, and knows how sure it is.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from espalier.data.records import BadInput, Trajectory
from espalier.values.monte_carlo import Count, StateKey, state_key
from espalier.values.value_prior import CountPair, ValuePrior, fit_prior

Step = tuple[StateKey, StateKey]

_FLAT = ValuePrior(0.5, 0.5)
_LEAST_VARIANCE = 1e-9
_NO_SAMPLE = Count(0, 0)


@dataclass(frozen=True)
class Continuation:
    """A solution sampled from a state: from its first `start` response tokens on (0: from the prompt)."""

    solution: Trajectory
    start: int
    is_completion: bool = True
    """whether it was drawn from a state that another solution had reached"""

    @property
    def first_end(self) -> int | None:
        """Return the end of the first step behind the state, counted in response tokens; None where there is none."""
        return next((end for end in self.solution.step_ends if end > self.start), None)

    def key(self, end: int) -> StateKey:
        """Return the state after `end` response tokens."""
        return state_key(self.solution.problem_id, self.solution.response_ids[:end])


def count_behind(continuations: Sequence[Continuation]) -> dict[StateKey, Count]:
    """Count the samples that passed through each state behind the one they were sampled from.

    Give completions of states alone, not the trajectories that the states were cut from: where states are those of
    right trajectories, each of them has had a success behind its own next step, for which it was chosen, and that step
    would look better than its siblings whatever they are worth.
    """
    right: dict[StateKey, int] = defaultdict(int)
    total: dict[StateKey, int] = defaultdict(int)
    for continuation in continuations:
        for end in continuation.solution.step_ends:
            if end > continuation.start:
                key = continuation.key(end)
                total[key] += 1
                right[key] += continuation.solution.is_correct
    return {key: Count(right[key], number) for key, number in total.items()}


@dataclass
class Contrast:
    """Compares the values of two states by their counts. Raises BadInput on settings out of range."""

    prior: ValuePrior = _FLAT
    drop: float = 0.5
    confidence: float = 0.9
    _below: dict[tuple[CountPair, CountPair], float] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.drop < 1 or not 0.5 < self.confidence < 1:
            raise BadInput("stage.drop must be between 0 and 1 and stage.confidence between 0.5 and 1, got "
                           f"{self.drop} and {self.confidence}")  # fmt: skip

    def prob_below(self, one: Count, best: Count) -> float:
        """Return P(V_one < drop V_best | counts), the two states independent of one another."""
        pair = (one.num_correct, one.num_completions), (best.num_correct, best.num_completions)
        if pair not in self._below:
            logits = self.prior.logits
            masses = self.prior.posteriors(pair)
            limits = np.log(self.drop) - np.logaddexp(0, -logits)  # log of drop times a value
            below = np.interp(limits - np.log1p(-np.exp(limits)), logits, np.cumsum(masses[0]), left=0.0)
            self._below[pair] = float(below @ masses[1])
        return self._below[pair]

    def label(self, one: Count, best: Count) -> float | None:
        """Return 0 for a step whose state has the counts `one`, beside the best step's, or None: not known."""
        return 0.0 if self.prob_below(one, best) >= self.confidence else None


def prior_of(counts: Mapping[Count, int]) -> ValuePrior:
    """Fit the prior of values to counts, of which there are so many each, those of one sample left out. Counts that
    differ no more than chance does give a prior of nearly equal values, beside which nothing looks wrong; Beta(1/2,
    1/2) where all are right, or none."""
    several = [(count, number) for count, number in counts.items() if count.num_completions > 1]
    total = sum(number for _, number in several)
    if total < 2:
        return _FLAT
    mean = math.fsum(count.value * number for count, number in several) / total
    variance = math.fsum((count.value - mean) ** 2 * number for count, number in several) / (total - 1)
    noise = math.fsum(
        count.value * (1 - count.value) / (count.num_completions - 1) * number for count, number in several
    )
    return fit_prior(mean, max(variance - noise / total, _LEAST_VARIANCE)) or _FLAT


def contrast_labels(
    continuations: Sequence[Continuation],
    counts: Mapping[StateKey, Count],
    on_right_ways: Collection[StateKey],
    rule: Contrast,
) -> list[list[float | None]]:
    """Return the labels of every solution's steps, in the order of `continuations`.

    `counts` are those of `count_behind` of the completions alone; `on_right_ways` the states that right solutions
    passed through (`values.first_error.states_on_right_ways`).
    """
    best = _best_beside(counts, _steps_behind(row for row in continuations if row.is_completion), rule.prior)
    labels: list[list[float | None]] = []
    for continuation in continuations:
        solution = continuation.solution
        if solution.is_correct:
            labels.append([1.0] * len(solution.steps))
            continue
        row: list[float | None] = []
        is_lost, state = False, continuation.key(0)
        for end in solution.step_ends:
            found: float | None = None
            step = continuation.key(end)
            if step in on_right_ways:
                found, is_lost = 1.0, False
            elif is_lost:
                found = 0.0
            elif state in best and step in counts:
                found = rule.label(counts[step], counts[best[state]])
                is_lost = found == 0.0
            row.append(found)
            state = step
        if row:
            row[-1] = 0.0  # the outcome
        labels.append(row)
    return labels


def _steps_behind(continuations: Iterable[Continuation]) -> set[Step]:
    """Return the steps that were sampled, each as the states before and after it."""
    steps = set()
    for continuation in continuations:
        for start, end in pairwise([0, *continuation.solution.step_ends]):
            if start >= continuation.start:
                steps.add((continuation.key(start), continuation.key(end)))
    return steps


def _best_beside(
    counts: Mapping[StateKey, Count], steps: Iterable[Step], prior: ValuePrior
) -> dict[StateKey, StateKey]:
    """Return what the best step leads to from every state that has any right sample behind it, by posterior mean; of
    equal ones the one with the least key."""
    best: dict[StateKey, StateKey] = {}

    def rank(key: StateKey) -> tuple[float, StateKey]:
        total = counts[key].num_completions + prior.alpha + prior.beta
        return -(counts[key].num_correct + prior.alpha) / total, key

    for state, step in steps:
        if counts[step].num_correct and (state not in best or rank(step) < rank(best[state])):
            best[state] = step
    return best


@dataclass(frozen=True)
class RightEvidence:
    """What the labels of right steps rest on: of `steps` distinct inner ones that were sampled, those that one right
    solution alone passed through, and those that their own counts call wrong beside the best step from the state."""

    steps: int = 0
    by_one: int = 0
    contradicted: int = 0

    def __add__(self, other: "RightEvidence") -> "RightEvidence":
        return RightEvidence(
            self.steps + other.steps, self.by_one + other.by_one, self.contradicted + other.contradicted
        )


def right_evidence(
    continuations: Sequence[Continuation], counts: Mapping[StateKey, Count], rule: Contrast
) -> RightEvidence:
    """Count, from what `contrast_labels` gets: one right solution makes a step right, whatever other samples say."""
    passed: dict[StateKey, int] = defaultdict(int)
    for row in continuations:
        if row.solution.is_correct:
            for end in row.solution.step_ends[:-1]:
                passed[row.key(end)] += 1
    steps = _steps_behind(row for row in continuations if row.is_completion)
    best = _best_beside(counts, steps, rule.prior)
    right = [(state, step) for state, step in steps if step in passed]
    return RightEvidence(
        steps=len(right),
        by_one=sum(passed[step] == 1 for _, step in right),
        contradicted=sum(
            state in best and rule.label(counts[step], counts[best[state]]) == 0.0 for state, step in right
        ),
    )


@dataclass(frozen=True)
class HeldBack:
    """Samples that had no part in a comparison: behind steps that it calls wrong, and behind the best ones beside
    them."""

    wrong: Count = _NO_SAMPLE
    best: Count = _NO_SAMPLE

    def __add__(self, other: "HeldBack") -> "HeldBack":
        return HeldBack(self.wrong + other.wrong, self.best + other.best)

    def contradicts(self, drop: float) -> bool:
        """Say whether the steps called wrong keep at least `drop` of the best ones' success: then right answers are
        luck, or the comparison is noise. False where no sample was held back."""
        if not (self.wrong.num_completions and self.best.num_completions):
            return False
        return self.wrong.value >= drop * self.best.value


def hold_back(continuations: Sequence[Continuation], rule: Contrast) -> HeldBack:
    """Call steps wrong by every second sample of each state, and count the others behind them.

    Where the values of next steps do not differ, some look far worse than the best one all the same; the other half of
    the samples knows nothing of that.
    """
    halves: tuple[list[Continuation], list[Continuation]] = ([], [])
    number: dict[StateKey, int] = defaultdict(int)
    for continuation in continuations:
        state = continuation.key(continuation.start)
        halves[number[state] % 2].append(continuation)
        number[state] += 1
    counts, others = count_behind(halves[0]), count_behind(halves[1])
    wrong, best = [0, 0], [0, 0]
    steps = {(one.key(one.start), one.key(one.first_end)) for one in halves[0] if one.first_end is not None}
    beside = _best_beside(counts, steps, rule.prior)
    for state, step in steps:
        if state not in beside or step not in others or beside[state] not in others or counts[step].num_correct:
            continue
        if rule.label(counts[step], counts[beside[state]]) == 0.0:
            for sums, count in ((wrong, others[step]), (best, others[beside[state]])):
                sums[0] += count.num_correct
                sums[1] += count.num_completions
    return HeldBack(Count(*wrong), Count(*best))
