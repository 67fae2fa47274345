"""How much of the differences between Monte-Carlo labels is signal: reliability, before anything learns from them.

A label is the share p = c / K of right completions of a state, a noisy reading of its value V. Over states
Var(p) = Var(V) + E[V (1 - V) / K], and p (1 - p) / (K - 1) is an unbiased estimate of a state's V (1 - V) / K. So

    reliability = (Var(p) - mean of p (1 - p) / (K - 1)) / Var(p)

is the share of the labels' variance that is the values' (classical test theory: the squared correlation of label and
value). Like every unbiased estimate of something that can be 0 it may fall below 0. It is estimated over four kinds of
differences:

- `reliability`: between all states;
- `within_step`: between states after equally many steps, each compared with their mean;
- `siblings`: between states that differ in their last step alone, which is what step pairs compare;
- `within_trajectory`: along a solution, which is what step-level credit is.

With K completions the reliability r is T / (T + N / K), T the variance of the values, N the mean of V (1 - V): so a
reliability of 1/2 takes K (1 - r) / r completions (Spearman-Brown). A few states of high value can make the reliability
high while most states have no right completion and cannot be ordered. So two figures are of the order:
`split_half_auc`, how well half of the completions tell states whose other half has any success (AUC over pairs of
different states, averaged exactly over all ways to halve them; 0.5 is chance), and `expected_auc`, how well the labels
tell states of a true value above the mean from the rest, under a Beta distribution of values (`values.value_prior`).

Labels without noise can teach nothing too, where values are small: as soft targets of a cross-entropy, 0.1 of a right
state and 0 of a wrong one both ask for a score near 0. `gain` of a step index says how many nats knowing the values
lowers that loss by (`ValuePrior.loss_gain`), among states after equally many steps; `low_gain_share` is the share of
trajectories' steps at indices where it is below `LOW_GAIN`. On a task with 10 % success heads learned nothing from
exact values, of which 52 % lie there, and all from the same values made hard (benchmarks/credit/signal_links.py).

Every figure is a function of sums that add up over problems, so that intervals draw problems.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from espalier.data.records import StepValues
from espalier.values.value_prior import fit_prior

Figures = dict[str, np.ndarray]

NONE, WEAK, SIGNAL = "none", "weak", "carries signal"
WEAK_BELOW = 0.5
"""a label of this reliability is as much noise as value"""
NONE_BELOW = 0.2
"""five times as many labels are needed as without noise; their correlation with the values is 0.45"""
WEAK_AUC = 0.85
"""below it labels misplace one of seven pairs of a better and a worse state; evenly spread values have 0.90 at K = 4"""
LOW_GAIN, LOW_GAIN_SHARE, FEWEST_STATES = 0.1, 0.4, 20
"""soft labels are weak where this share of the steps or more has an index whose gain (in nats) is lower; fewer states
after equally many steps show no gain"""
RULE = (
    f"r is the lower of reliability and within_trajectory. {NONE}: the 95 % interval of r reaches down to 0 or stays "
    f"below {NONE_BELOW:g}; {WEAK}: r is below {WEAK_BELOW:g}, or its interval reaches below {NONE_BELOW:g}, or "
    f"expected_auc is below {WEAK_AUC:g}, or labels are soft and low_gain_share, of steps whose index has a gain below "
    f"{LOW_GAIN:g} nats, is {LOW_GAIN_SHARE:g} or more; else {SIGNAL}"
)


@dataclass(frozen=True)
class CountedState:
    """`num_correct` of `num_completions` (2 or more) of a state after `step` steps; `parent` is the state before its
    last step, `trajectories` those that pass through it."""

    problem_id: str
    parent: tuple[int, ...]
    step: int
    num_correct: int
    num_completions: int
    trajectories: tuple[str, ...]

    @property
    def label(self) -> float:
        """Share of right completions."""
        return self.num_correct / self.num_completions

    @property
    def noise(self) -> float:
        """Unbiased estimate of the label's binomial variance."""
        return self.label * (1 - self.label) / (self.num_completions - 1)


def counted_states(rows: Iterable[StepValues]) -> tuple[list[CountedState], int]:
    """Return the distinct inner states with two completions or more, and how many have fewer: their noise cannot be
    estimated."""
    found: dict[tuple[str, tuple[int, ...]], tuple[int, int, int, tuple[int, ...], list[str]]] = {}
    for row in rows:
        ends = [0, *row.step_ends]
        for step in range(1, len(row.steps)):
            key = row.problem_id, tuple(row.response_ids[: ends[step]])
            parent = tuple(row.response_ids[: ends[step - 1]])
            counts = row.num_correct[step - 1], row.num_completions[step - 1]
            found.setdefault(key, (step, *counts, parent, []))[-1].append(row.id)
    states = [
        CountedState(problem, parent, step, right, number, tuple(names))
        for (problem, _), (step, right, number, parent, names) in found.items()
        if number > 1
    ]
    return states, len(found) - len(states)


@dataclass(frozen=True)
class SignalSums:
    """Sums over the states of each problem, `table` [P, C], and where they stand in its columns."""

    table: np.ndarray
    kinds: list[tuple[int, int]]
    num_steps: int

    @property
    def num_states(self) -> int:
        """Of all problems."""
        return int(self._parts(self.table)[-1].sum())

    @property
    def num_completions(self) -> int:
        """Of all states."""
        return int(self._parts(self.table)[-1].sum(axis=0) @ np.asarray(self.kinds)[:, 1]) if self.kinds else 0

    def figures(self, sums: np.ndarray) -> Figures:
        """Return the figures of sums [..., C], NaN where one is not defined: see the module, and `mean_value`,
        `share_zero` and `share_one` (states whose completions are all wrong, all right), `value_variance` (T above)
        and `noise_variance`."""
        whole, steps, siblings, along, kinds = self._parts(sums)
        count, total = whole[..., 0], whole[..., 1]
        variance, noise = _pooled(whole[..., None, :])
        variance_step, noise_step = _pooled(steps)
        rights, numbers = np.asarray(self.kinds, dtype=np.float64).reshape(-1, 2).T
        return {
            "mean_value": _ratio(total, count),
            "share_zero": _ratio(kinds @ (rights == 0), count),
            "share_one": _ratio(kinds @ (rights == numbers), count),
            "noise_variance": noise,
            "value_variance": variance - noise,
            "reliability": _ratio(variance - noise, variance),
            "within_step": _ratio(variance_step - noise_step, variance_step),
            "siblings": _ratio(siblings[..., 0] - siblings[..., 1], siblings[..., 0]),
            "within_trajectory": _ratio(along[..., 0] - along[..., 1], along[..., 0]),
            "split_half_auc": self.split_half_auc(kinds),
        }

    def step_figures(self) -> list[dict[str, float | int | None]]:
        """Return a row per step index: `step`, `states`, `mean_value`, `share_zero`, `share_one`, `reliability` (None
        where it is not defined), `gain` (see the module; None of fewer than `FEWEST_STATES`), `trajectories` that pass
        through."""
        _, steps, *_ = self._parts(self.table.sum(axis=0))
        shares = self.table[:, -3 * self.num_steps :].sum(axis=0).reshape(self.num_steps, 3)
        rows: list[dict[str, float | int | None]] = []
        for place, sums in enumerate(steps):
            if sums[0]:
                variance, noise = (float(one) for one in _pooled(sums[None]))
                zero, one, _ = (round(float(share), 4) for share in shares[place] / sums[0])
                reliability = round((variance - noise) / variance, 4) if variance > 0 else None
                mean = float(sums[1] / sums[0])
                gain = _gain(mean, variance - noise) if sums[0] >= FEWEST_STATES else None
                row = {"step": place + 1, "states": int(sums[0]), "mean_value": round(mean, 4)}
                row |= {"share_zero": zero, "share_one": one, "trajectories": int(shares[place][2])}
                rows.append({**row, "reliability": reliability, "gain": gain})
        return rows

    def _parts(self, sums: np.ndarray) -> tuple[np.ndarray, ...]:
        """Cut sums [..., C] into those of all states [..., 4], of each step index [..., T, 4], of siblings and of
        trajectories [..., 2], and the number of states of each kind."""
        ends = np.cumsum([4, 4 * self.num_steps, 2, 2, len(self.kinds)])
        whole, steps, siblings, along, kinds, _ = np.split(sums, ends, axis=-1)
        return whole, steps.reshape(*sums.shape[:-1], self.num_steps, 4), siblings, along, kinds

    def split_half_auc(self, counts: np.ndarray) -> np.ndarray:
        """Return the AUC of half of the completions against "the other half has a success", from the number of states
        [..., M] of each kind (right, completions); NaN where all other halves agree."""
        rows = [_halves(right, number) for right, number in self.kinds]
        scores = sorted({score for row in rows for score, _, _ in row})
        above, below = np.zeros((2, len(rows), len(scores)))
        for kind, row in enumerate(rows):
            for score, prob, is_positive in row:
                (above if is_positive else below)[kind, scores.index(score)] += prob
        won, pairs = _outranked(counts @ above, counts @ below)
        own_won, own_pairs = _outranked(above, below)  # a state is not compared with itself
        return _ratio(won - counts @ own_won, pairs - counts @ own_pairs)


def signal_sums(states: Iterable[CountedState]) -> SignalSums:
    """Return the sums of every problem of these states, in the order of the problems' ids."""
    by_problem: dict[str, list[CountedState]] = defaultdict(list)
    for state in states:
        by_problem[state.problem_id].append(state)
    return sum_problems(lambda: (by_problem[name] for name in sorted(by_problem)))


def sum_problems(read: Callable[[], Iterable[Sequence[CountedState]]]) -> SignalSums:
    """Return the sums of every problem whose states `read` yields, in that order. It is called twice, so that the
    states of one problem alone need be in memory."""
    kinds: set[tuple[int, int]] = set()
    num_problems = num_steps = 0
    for states in read():
        num_problems += 1
        kinds.update((state.num_correct, state.num_completions) for state in states)
        num_steps = max(num_steps, *(state.step for state in states))
    order = sorted(kinds)
    table = np.zeros((num_problems, 8 + 7 * num_steps + len(kinds)))
    for row, states in zip(table, read(), strict=True):
        row[:] = _problem_sums(states, order, num_steps)
    return SignalSums(table, order, num_steps)


def _gain(mean: float, variance: float) -> float:
    prior = fit_prior(mean, variance)
    return round(prior.loss_gain, 4) if prior else 0.0


def _problem_sums(states: Sequence[CountedState], kinds: Sequence[tuple[int, int]], num_steps: int) -> list[float]:
    steps, shares = np.zeros((num_steps, 4)), np.zeros((num_steps, 3))
    siblings: dict[tuple[int, ...], list[CountedState]] = defaultdict(list)
    along: dict[str, list[CountedState]] = defaultdict(list)
    number_of = dict.fromkeys(kinds, 0)
    for state in states:
        steps[state.step - 1] += (1, state.label, state.label**2, state.noise)
        shares[state.step - 1] += (state.label == 0, state.label == 1, len(state.trajectories))
        siblings[state.parent].append(state)
        for name in state.trajectories:
            along[name].append(state)
        number_of[state.num_correct, state.num_completions] += 1
    grouped = [*_group_sums(siblings.values()), *_group_sums(along.values())]
    return [*steps.sum(axis=0), *steps.ravel(), *grouped, *number_of.values(), *shares.ravel()]


def _group_sums(groups: Iterable[Sequence[CountedState]]) -> tuple[float, float]:
    """Return over groups the squares around each group's mean, and what noise adds to them: (1 - 1/n) of the noise of a
    group's n members."""
    squares = noise = 0.0
    for group in groups:
        mean = math.fsum(state.label for state in group) / len(group)
        squares += math.fsum((state.label - mean) ** 2 for state in group)
        noise += (1 - 1 / len(group)) * math.fsum(state.noise for state in group)
    return squares, noise


def _pooled(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the variance around the groups' means, and the noise's part of it, of sums [..., G, 4] over groups:
    number, labels, squared labels, noise."""
    count, total, squares, noise = np.moveaxis(sums, -1, 0)
    safe = np.maximum(count, 1)
    freedom = np.maximum(count - 1, 0).sum(axis=-1)
    around = np.maximum(squares - total**2 / safe, 0).sum(axis=-1)
    return _ratio(around, freedom), _ratio((noise * np.maximum(count - 1, 0) / safe).sum(axis=-1), freedom)


def _halves(right: int, number: int) -> list[tuple[float, float, bool]]:
    """Return (share of right ones in the first half, its probability, whether the other half has one) for every way to
    halve `number` completions of which `right` are right; of an odd number the first half is the smaller."""
    half = number // 2
    ways = math.comb(number, right)
    return [
        (first / half, math.comb(half, first) * math.comb(number - half, right - first) / ways, right > first)
        for first in range(max(0, right - (number - half)), min(half, right) + 1)
    ]


def _outranked(above: np.ndarray, below: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return pairs in which a positive outranks a negative (ties half) and all pairs, of numbers [..., R] by rank."""
    lower = np.cumsum(below, axis=-1) - below / 2
    return (above * lower).sum(axis=-1), above.sum(axis=-1) * below.sum(axis=-1)


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Return part / whole, NaN where whole is not above 0."""
    is_there = np.asarray(whole) > 1e-12
    return np.where(is_there, part / np.where(is_there, whole, 1.0), np.nan)


def completions_for(target: float, reliability: float, num_completions: float) -> int | None:
    """Return the completions per state that give labels the reliability `target`, where `num_completions` give
    `reliability` (Spearman-Brown); None where the values do not differ. At least 2: fewer show no noise."""
    if reliability <= 0:
        return None
    return max(2, math.ceil(target / (1 - target) * (1 - reliability) / reliability * num_completions - 1e-9))


def low_gain_share(steps: Sequence[Mapping[str, float | int | None]]) -> float | None:
    """Return the share of trajectories' steps, which is what is trained on, at step indices (rows of `step_figures`)
    whose gain is below `LOW_GAIN`, among those whose gain is known; None where these are fewer than half of all."""
    known = [(row["trajectories"] or 0, row["gain"]) for row in steps if row["gain"] is not None]
    number = sum(rows for rows, _ in known)
    if not number or 2 * number < sum(row["trajectories"] or 0 for row in steps):
        return None
    return sum(rows for rows, gain in known if gain is not None and gain < LOW_GAIN) / number


def verdict(estimate: float, low: float, high: float, expected_auc: float, low_gain: float) -> str:
    """Return the verdict by `RULE` on r with its 95 % interval, the expected AUC, and the share of states of low gain,
    0 of labels that are hard."""
    if low <= 0 or high < NONE_BELOW:
        return NONE
    is_weak = estimate < WEAK_BELOW or low < NONE_BELOW or expected_auc < WEAK_AUC or low_gain >= LOW_GAIN_SHARE
    return WEAK if is_weak else SIGNAL
