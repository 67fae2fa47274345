"""What step values say of the order of preference pairs, taken in pair by pair (`pipeline.pairs.check_pairs`).

Of a pair a few numbers are kept, 8 bytes each, and one more per equal step of its solutions; no text and no token.
Problems are known by their hashes (`data.row_index`): figures are given these in the order of the problems' ids.
"""

import re
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from espalier.data.records import BadInput, PreferencePair, StepScores, StepValues
from espalier.data.row_index import hash_of
from espalier.pipeline.evaluation.intervals import Interval, mean_over_problems
from espalier.values.value_prior import CountPair, ValuePrior

EXACT = 1_000  # completions that the outcome of a finished solution is worth: its value is known
_OPEN, _COUNTS = -1.0, -2.0  # in the place of a share: nothing is known, or it comes from counts

Side = tuple[StepValues, int | None]  # a solution, and the number of its steps (None: all, a whole solution)
Find = Callable[[str], Any]  # a record by its id, None where there is none


def sides_of(pair: PreferencePair, find: Find) -> tuple[Side, Side] | None:
    """Return the two sides of a pair by its id, None where a solution has no step values, or has no such step. A
    rejected whole solution that was cut at a step (`stage.cut_wrong_below`) has the number of its steps that are left.
    """
    chosen, _, rejected = re.sub(r"(~\d+)?(@round\d+)*$", "", pair.id).partition(">")
    sides: list[Side] = []
    for name in (chosen, rejected):
        number = None
        if pair.kind in ("step", "partial"):
            name, _, steps = name.rpartition("#")
            number = int(steps or 0) + (pair.kind == "step")  # a step pair's id counts the steps before it
        row = find(name)
        if row is None or (number is not None and not 1 <= number <= len(row.steps)):
            return None
        sides.append((row, number))
    if pair.kind not in ("step", "partial"):
        sides[1] = sides[1][0], steps_left(sides[1][0], pair.rejected_ids)
    return sides[0], sides[1]


def steps_left(row: StepValues, ids: Sequence[int]) -> int | None:
    """Return after how many of its steps a solution was cut to these response tokens; None where it is whole."""
    is_cut = 0 < len(ids) < len(row.response_ids) and row.response_ids[: len(ids)] == list(ids)
    return row.step_ends.index(len(ids)) + 1 if is_cut and len(ids) in row.step_ends else None


def state_count(row: StepValues, num_steps: int) -> CountPair:
    """Return the counts of the state after so many steps; a finished solution's outcome counts `EXACT` times."""
    if num_steps == len(row.steps):
        return EXACT * row.is_correct, EXACT
    return row.num_correct[num_steps - 1], row.num_completions[num_steps - 1]


def equal_steps(good: StepValues, bad: StepValues) -> list[int]:
    """Return the numbers of steps after which both solutions are in different inner states with completions."""
    return [
        step
        for step in range(1, min(len(good.steps), len(bad.steps)))
        if good.num_completions[step - 1]
        and bad.num_completions[step - 1]
        and good.response_ids[: good.step_ends[step - 1]] != bad.response_ids[: bad.step_ends[step - 1]]
    ]


def count_pairs(chosen: Side, rejected: Side) -> list[tuple[CountPair, CountPair]]:
    """Return the counts to compare; empty for whole solutions of different outcomes, and where none can be.

    A side that was cut blames its last step. Where completions succeeded behind that step, it is compared with the
    other side after equally many steps, if there are completions there; else its solution's outcome is all there is.
    """
    (good, good_steps), (bad, bad_steps) = chosen, rejected
    if good_steps is not None and bad_steps is not None:
        both = state_count(good, good_steps), state_count(bad, bad_steps)
        return [both] if both[0][1] and both[1][1] else []
    if bad_steps is not None and (blamed := state_count(bad, bad_steps))[0]:
        beside = state_count(good, min(bad_steps, len(good.steps)))
        if beside[1]:
            return [(beside, blamed)]
    if good.is_correct != bad.is_correct:
        return []
    return [(state_count(good, step), state_count(bad, step)) for step in equal_steps(good, bad)]


def _integers() -> "array[int]":
    return array("q")


def _reals() -> "array[float]":
    return array("d")


@dataclass
class PairEvidence:
    """Takes in the pairs whose sides are known."""

    outcomes: Counter[str] = field(
        default_factory=lambda: Counter(right_over_wrong=0, wrong_over_right=0, both_right=0, both_wrong=0, unknown=0)
    )
    """whole solutions by their outcomes, and pairs without evidence"""
    problems: "array[int]" = field(default_factory=_integers)
    """of each pair, by its hash"""
    _codes: dict[tuple[CountPair, CountPair], int] = field(default_factory=dict)
    _kinds: dict[str, int] = field(default_factory=dict)
    _kind: "array[int]" = field(default_factory=_integers)
    _share: "array[float]" = field(default_factory=_reals)
    _num_compared: "array[int]" = field(default_factory=_integers)
    _compared: "array[int]" = field(default_factory=_integers)  # codes of the counts of all pairs, one after the other
    _more_tokens: "array[float]" = field(default_factory=_reals)
    _whole: "array[int]" = field(default_factory=_integers)  # problems of whole solutions
    _more_steps: "array[float]" = field(default_factory=_reals)

    def add(self, pair: PreferencePair, chosen: Side, rejected: Side) -> None:
        """Take in a pair."""
        (good, steps), (bad, _) = chosen, rejected
        problem, compared = hash_of(pair.problem_id), count_pairs(chosen, rejected)
        if steps is None:
            name = {(True, False): "right_over_wrong", (False, True): "wrong_over_right"}.get(
                (good.is_correct, bad.is_correct), "both_right" if good.is_correct else "both_wrong"
            )
            self.outcomes[name] += 1
            self._whole.append(problem)
            self._more_steps.append(len(good.steps) - len(bad.steps))
        share = _COUNTS if compared else _OPEN
        if not compared and steps is None and good.is_correct != bad.is_correct:
            share = float(bad.is_correct)
        self.outcomes["unknown"] += share == _OPEN
        self.problems.append(problem)
        self._kind.append(self._kinds.setdefault(pair.kind, len(self._kinds)))
        self._share.append(share)
        self._num_compared.append(len(compared))
        self._compared.extend(self._codes.setdefault(both, len(self._codes)) for both in compared)
        self._more_tokens.append(len(pair.chosen_ids) - len(pair.rejected_ids))

    def figures(self, prior: ValuePrior | None, order: np.ndarray) -> dict[str, Any]:
        """Return `wrong_order` with its interval over problems and by kind; of whole solutions the pairs right over
        wrong, wrong over right, both right, both wrong; `unknown` pairs without evidence; how much longer the chosen
        side is. `order` [P] are the problems' hashes in the order of their ids.

        Without a prior (values that do not differ) counts say nothing: the order of such a pair is wrong with 1/2.
        """
        shares = self._shares(prior)
        is_known = shares != _OPEN
        problems, kinds = places_of(self.problems, order), np.asarray(self._kind)
        by_kind = {kind: is_known & (kinds == code) for kind, code in sorted(self._kinds.items())}
        return {
            "wrong_order": mean_over_problems(problems[is_known], shares[is_known]),
            "wrong_order_by_kind": {kind: mean_over_problems(problems[rows], shares[rows])
                                    for kind, rows in by_kind.items() if rows.any()},
            **self.outcomes,
            "chosen_more_tokens": mean_over_problems(problems, np.asarray(self._more_tokens)),
            "chosen_more_steps": mean_over_problems(places_of(self._whole, order), np.asarray(self._more_steps)),
        }  # fmt: skip

    def _shares(self, prior: ValuePrior | None) -> np.ndarray:
        """Return the probability that the order of each pair is wrong [N], `_OPEN` where nothing is known."""
        wrong_of = _wrong_probabilities(sorted(self._codes), prior)
        wrong = np.asarray([wrong_of[both] for both in self._codes])
        shares, codes = np.array(self._share), np.asarray(self._compared)
        ends = np.cumsum(np.asarray(self._num_compared))
        for place in np.flatnonzero(shares == _COUNTS):
            start = ends[place] - self._num_compared[place]
            shares[place] = np.mean(wrong[codes[start : ends[place]]])
        return shares


def places_of(problems: "array[int]", order: np.ndarray) -> np.ndarray:
    """Return the place of each problem [N], by its hash, in `order` [P]."""
    by_hash = np.argsort(order)
    return by_hash[np.searchsorted(order, np.asarray(problems), sorter=by_hash)]


def _wrong_probabilities(
    distinct: Sequence[tuple[CountPair, CountPair]], prior: ValuePrior | None
) -> dict[tuple[CountPair, CountPair], float]:
    """Return P(V_chosen < V_rejected | counts) of every two counts; equal exact outcomes are 1/2."""
    if prior is None:
        return dict.fromkeys(distinct, 0.5)
    kinds = sorted({count for both in distinct for count in both})
    place = {count: index for index, count in enumerate(kinds)}
    higher = prior.higher(kinds, kinds) if kinds else np.zeros((0, 0))
    return {(good, bad): float(higher[place[bad], place[good]]) for good, bad in distinct}


@dataclass
class ScoreAgreement:
    """How often, at equal steps of the pairs' solutions, the side with the higher score has the higher share of right
    completions (equal scores half; equal shares are left out), over problems that the reward model has not seen, as
    far as its scores say it. Step and partial pairs are compared by `wrong_order` and are not taken in.

    Two states are compared once: with the scores of the last pair that has them, in the place of the first.
    """

    scores: str
    """their file"""
    find: Find
    """StepScores by their id"""
    _keys: "array[int]" = field(default_factory=_integers)  # hashes of what is compared
    _problems: "array[int]" = field(default_factory=_integers)
    _agrees: "array[float]" = field(default_factory=_reals)

    def add(self, chosen: Side, rejected: Side) -> None:
        """Take in a pair. Raises BadInput where a solution has scores of another number of steps."""
        own = [self._scores(row) for row, _ in (chosen, rejected)]
        (good, steps), (bad, _) = chosen, rejected
        if steps is not None or own[0] is None or own[1] is None:
            return
        for step in equal_steps(good, bad):
            (right, number), (other, others) = state_count(good, step), state_count(bad, step)
            gap = right / number - other / others
            if gap:
                ends = [row.response_ids[: row.step_ends[step - 1]] for row in (good, bad)]
                lead = np.sign(gap) * np.sign(own[0][step - 1] - own[1][step - 1])
                self._keys.append(hash_of(repr((good.problem_id, *ends))))
                self._problems.append(hash_of(good.problem_id))
                self._agrees.append(float(1 + lead) / 2)

    def _scores(self, row: StepValues) -> Sequence[float] | None:
        """Return a solution's scores, None where it has none or the reward model has seen its problem."""
        found: StepScores | None = self.find(row.id)
        if found is None or found.is_seen is True:
            return None
        if len(found.scores) != len(row.steps):
            raise BadInput(f"{self.scores}: '{row.id}' has {len(found.scores)} scores and {len(row.steps)} steps: "
                           "score these trajectories")  # fmt: skip
        return found.scores

    def figure(self, order: np.ndarray) -> Interval | None:
        """Return the share, its interval over problems; None without steps to compare. `order`: as of
        `PairEvidence.figures`."""
        keys = np.asarray(self._keys)
        first = np.unique(keys, return_index=True)[1]
        last = len(keys) - 1 - np.unique(keys[::-1], return_index=True)[1]
        kept = np.argsort(first)
        agrees = np.asarray(self._agrees)[last[kept]]
        return mean_over_problems(places_of(self._problems, order)[first[kept]], agrees)
