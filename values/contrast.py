"""Labels by contrast: a step is wrong where it leaves far less of the chance to succeed than the best step beside it.

Where success is rare, values of single states say little: most states have no right completion, right prefixes and
wrong ones alike. Two next steps of *one* state on the way of a right solution differ much more, because all that came
before is the same. With V' and V* the values after a step and after the best step sampled from the same state, counted
over all samples drawn from that state or later ones, a step is

- wrong (0) where P(V' < drop V*) is at least `confidence`,
- right (1) where a right solution passed through the state behind it,
- without a label otherwise.

P is by the Beta posteriors of both counts (`values.value_prior`). Every step of a right solution is right, and so is
what leads to a state that a right solution passed through; after a wrong step all steps of a solution that ended wrong
are wrong. The idea of comparing with the value before a step is that of relative progress (GenPRM, Zhao et al. 2025);
here the comparison is with siblings, which share the past, and knows how sure it is.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from espalier.data.records import BadInput, Trajectory
from espalier.values.monte_carlo import Count, StateKey, state_key
from espalier.values.value_prior import CountPair, ValuePrior, fit_prior

_FLAT = ValuePrior(0.5, 0.5)


@dataclass(frozen=True)
class Continuation:
    """A solution sampled from a state: from its first `start` response tokens on (0: from the prompt)."""

    solution: Trajectory
    start: int

    @property
    def first_end(self) -> int | None:
        """Return the end of the first step behind the state, counted in response tokens; None where there is none."""
        return next((end for end in self.solution.step_ends if end > self.start), None)

    def key(self, end: int) -> StateKey:
        """Return the state after `end` response tokens."""
        return state_key(self.solution.problem_id, self.solution.response_ids[:end])


def count_behind(continuations: Sequence[Continuation]) -> dict[StateKey, Count]:
    """Count the samples that passed through each state behind the one they were sampled from: all of them are drawn
    from that state or earlier ones by the policy, so none of them was chosen for its outcome."""
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


def prior_of(counts: Collection[Count]) -> ValuePrior:
    """Fit the prior of values to counts, those of one sample left out; Beta(1/2, 1/2) where they show no variance."""
    several = [count for count in counts if count.num_completions > 1]
    if len(several) < 2:
        return _FLAT
    values = np.asarray([count.value for count in several])
    noise = np.asarray([count.value * (1 - count.value) / (count.num_completions - 1) for count in several])
    return fit_prior(float(values.mean()), float(values.var(ddof=1) - noise.mean())) or _FLAT


def contrast_labels(
    continuations: Sequence[Continuation],
    counts: Mapping[StateKey, Count],
    on_right_ways: Collection[StateKey],
    rule: Contrast,
) -> list[list[float | None]]:
    """Return the labels of every solution's steps, in the order of `continuations`.

    `counts` are those of `count_behind`; `on_right_ways` the states that right solutions passed through
    (`values.first_error.states_on_right_ways`).
    """
    best = _best_beside(continuations, counts, rule.prior)
    labels: list[list[float | None]] = []
    for continuation in continuations:
        solution = continuation.solution
        if solution.is_correct:
            labels.append([1.0] * len(solution.steps))
            continue
        row: list[float | None] = []
        first, is_lost = continuation.first_end, False
        for end in solution.step_ends:
            found: float | None = None
            if continuation.key(end) in on_right_ways:
                found, is_lost = 1.0, False
            elif is_lost:
                found = 0.0
            elif end == first and continuation.key(continuation.start) in best:
                found = rule.label(counts[continuation.key(end)], best[continuation.key(continuation.start)])
                is_lost = found == 0.0
            row.append(found)
        if row:
            row[-1] = 0.0  # the outcome
        labels.append(row)
    return labels


def _best_beside(
    continuations: Sequence[Continuation], counts: Mapping[StateKey, Count], prior: ValuePrior
) -> dict[StateKey, Count]:
    """Return the counts of the best step from every state that has any right sample behind it, by posterior mean."""
    best: dict[StateKey, Count] = {}

    def mean(count: Count) -> float:
        return (count.num_correct + prior.alpha) / (count.num_completions + prior.alpha + prior.beta)

    for continuation in continuations:
        if continuation.first_end is None:
            continue
        count, state = counts[continuation.key(continuation.first_end)], continuation.key(continuation.start)
        if count.num_correct and (state not in best or mean(count) > mean(best[state])):
            best[state] = count
    return best
