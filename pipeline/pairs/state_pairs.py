"""Pairs from inside the solutions: two next steps of one shared state, or two partial solutions of one problem.

**Step pairs** (Lai et al. 2024): the prompt ends mid-solution, chosen and rejected are one step each, and what is
compared has the same past. `chosen` "solution" lets the better side go on to the end of a right solution: the blame is
one step's all the same, and the pull towards chosen tokens holds what follows it too; by single steps alone a policy
unlearns steps that no pair is about.

**Partial pairs** (the direct value-based pairs of Jiao et al. 2024): two prefixes from different solutions, the prompt
is the problem's. Their forms are options: a discount for every step between the two, positions that may differ only so
far, values accumulated over the steps, a low value that holds for all that follows, full solutions with the partial
ones, without them or apart. Values are shares here, not counts of K: a gap of 2 of 3 is 0.67.

Left out: pairs of prefixes with a loss on their ends alone; a step pair is that, with one past for both sides.
"""

import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from espalier.data.records import BadInput, PreferencePair, Trajectory
from espalier.pipeline.pairs.process_pairs import is_clear
from espalier.pipeline.pairs.trajectory_groups import capped, check_choice, check_counts, sample_order
from espalier.rewards.aggregate import aggregate, check_aggregate

T = TypeVar("T")

Option = tuple[Trajectory, int, float]  # a trajectory, the place of a step in it, the value after that step

FULL = ("with", "without", "apart")
ABSORBED = ("capped", "dropped")
DISCOUNTS = ("earlier", "later")
WHICH = ("best_over_worst", "all")
CHOSEN = ("step", "solution")


def step_pairs(
    group: Sequence[Trajectory],
    values: Mapping[str, Sequence[float]],
    margin: float,
    which: str = "best_over_worst",
    max_pairs: int = 0,
    chosen: str = "step",
) -> list[PreferencePair]:
    """Return next steps of every state that two trajectories share and then leave differently, values by trajectory id
    (nan: this step takes no part).

    `which`: the best over the worst of each state, or all that differ by more than `margin`. Of more than
    `max_pairs` (0: no cap) those with the widest gaps stay. `chosen` "solution": the better step and all that follows
    it in the first right solution with it; of equally good steps one that has such a solution, and without one there is
    no pair. In the order of the states, as they were reached first.
    """
    children: dict[tuple[int, ...], dict[tuple[int, ...], Option]] = defaultdict(dict)
    for trajectory in group:
        starts = [0, *trajectory.step_ends][: len(trajectory.step_ends)]
        rows = zip(starts, trajectory.step_ends, values[trajectory.id], strict=True)
        for step, (start, end, value) in enumerate(rows):
            if math.isnan(value):
                continue
            prefix = tuple(trajectory.response_ids[:start])
            taken = tuple(trajectory.response_ids[start:end])
            if taken not in children[prefix] or _is_first_right(trajectory, children[prefix][taken], chosen):
                children[prefix][taken] = trajectory, step, value
    pairs: list[tuple[tuple[int, ...], Option, Option]] = []
    for prefix, options in children.items():
        order = sorted(options.values(), key=lambda option: (-option[2], sample_order(option[0].id)))
        best = next((a for a in order if a[2] == order[0][2] and _may_be_chosen(a, chosen)), order[0])
        ends = [(best, order[-1])]
        compared = ends if which == "best_over_worst" else [(a, b) for a in order for b in order]
        pairs += [
            (prefix, a, b) for a, b in compared
            if is_clear(a[2] - b[2], margin) and _may_be_chosen(a, chosen)
        ]  # fmt: skip
    if max_pairs and len(pairs) > max_pairs:
        widest = sorted(range(len(pairs)), key=lambda place: (-(pairs[place][1][2] - pairs[place][2][2]), place))
        pairs = [pairs[place] for place in sorted(widest[:max_pairs])]
    return [_step_pair(list(prefix), best, worst, chosen) for prefix, best, worst in pairs]


def _may_be_chosen(option: Option, chosen: str) -> bool:
    return chosen == "step" or option[0].is_correct


def _is_first_right(trajectory: Trajectory, known: Option, chosen: str) -> bool:
    return chosen == "solution" and trajectory.is_correct and not known[0].is_correct


def _step_pair(prefix: list[int], best: Option, worst: Option, chosen: str) -> PreferencePair:
    (good, step, good_value), (bad, bad_step, bad_value) = best, worst
    last = step if chosen == "step" else len(good.steps) - 1
    return PreferencePair(
        id=f"{good.id}#{step}>{bad.id}#{bad_step}",
        problem_id=good.problem_id,
        kind="step",
        prompt=good.prompt + "".join(good.steps[:step]),
        chosen="".join(good.steps[step : last + 1]),
        rejected=bad.steps[bad_step],
        prompt_ids=good.prompt_ids + prefix,
        chosen_ids=good.response_ids[len(prefix) : good.step_ends[last]],
        rejected_ids=bad.response_ids[len(prefix) : bad.step_ends[bad_step]],
        chosen_score=good_value,
        rejected_score=bad_value,
        passage_id=good.passage_id,
    )


@dataclass(frozen=True)
class ValuedPrefix:
    """The first `num_steps` steps of a trajectory, and what they are worth."""

    trajectory: Trajectory
    num_steps: int
    value: float

    @cached_property
    def ids(self) -> list[int]:
        """Response tokens, the end token too where the prefix is the whole solution."""
        return self.trajectory.response_ids[: self.trajectory.step_ends[self.num_steps - 1]]

    @property
    def is_full(self) -> bool:
        """Whether nothing is cut off."""
        return self.num_steps == len(self.trajectory.steps)

    @property
    def position(self) -> float:
        """How far into its solution it ends, 1 at the end."""
        return self.num_steps / len(self.trajectory.steps)

    @property
    def id(self) -> str:
        """`{trajectory}#{steps}`, as a state's."""
        return f"{self.trajectory.id}#{self.num_steps}"


@dataclass(frozen=True, kw_only=True)
class PartialRule:
    """Which prefixes of a problem's solutions are paired; 0 is "no cap" for every count.

    A prefix's value is `how` of its steps' values (`rewards.aggregate`; `last` is the value of the state itself),
    after `threshold` (null: none) has made them 1 where they are above it and 0 where not. `absorbs_at` (null: never):
    once a value is this low, all later ones of that trajectory are at most that (`absorbed: capped`), or left out
    (`dropped`). A pair's `earlier` or `later` side (`discounts`) is multiplied by `decay` for every step between
    them; then the gap must exceed `margin`. `max_position_gap`: how far apart in their solutions they may end, as a
    share. Steps `first_step` to `last_step` are read. `full`: whole solutions with the partial ones, without them, or
    apart (whole over whole, partial over partial). `pairs_nested`: also a prefix and its own continuation. The
    `max_chosen` best prefixes are chosen, each over `max_rejected` drawn by the seed; of more than `max_pairs` some
    are drawn.
    """

    how: str = "last"
    threshold: float | None = None
    absorbs_at: float | None = None
    absorbed: str = "capped"
    decay: float = 1.0
    discounts: str = "later"
    margin: float = 0.6
    max_position_gap: float = 1.0
    first_step: int = 1
    last_step: int = 0
    full: str = "with"
    pairs_nested: bool = False
    max_chosen: int = 0
    max_rejected: int = 0
    max_pairs: int = 0

    def check_rule(self) -> None:
        """Raise BadInput (BadAggregate for `how`) on settings that say nothing."""
        check_aggregate(self.how)
        check_choice("absorbed", self.absorbed, ABSORBED)
        check_choice("discounts", self.discounts, DISCOUNTS)
        check_choice("full", self.full, FULL)
        check_counts(max_chosen=self.max_chosen, max_rejected=self.max_rejected, max_pairs=self.max_pairs)
        check_counts(last_step=self.last_step)
        if self.first_step < 1 or (self.last_step and self.last_step < self.first_step):
            raise BadInput(f"stage.first_step must be 1 or more and at most stage.last_step, got {self.first_step} "
                           f"and {self.last_step}")  # fmt: skip
        if not 0 < self.decay <= 1:
            raise BadInput(f"stage.decay must be above 0 and at most 1, got {self.decay}")


def prefixes(
    group: Sequence[Trajectory], values: Mapping[str, Sequence[float]], rule: PartialRule
) -> list[ValuedPrefix]:
    """Return the prefixes a rule reads, each distinct token sequence once (the trajectory sampled first)."""
    distinct: dict[tuple[int, ...], ValuedPrefix] = {}
    for trajectory in group:
        for prefix in _prefixes_of(trajectory, values[trajectory.id], rule):
            distinct.setdefault(tuple(prefix.ids), prefix)
    return list(distinct.values())


def _prefixes_of(trajectory: Trajectory, values: Sequence[float], rule: PartialRule) -> list[ValuedPrefix]:
    if rule.threshold is not None:
        values = [float(is_clear(value, rule.threshold)) for value in values]
    kept: list[ValuedPrefix] = []
    ceiling: float | None = None
    for number in range(1, len(trajectory.steps) + 1):
        value = aggregate(values[:number], rule.how)
        if ceiling is not None and rule.absorbed == "dropped":
            break
        value = value if ceiling is None else min(value, ceiling)
        if rule.absorbs_at is not None and not is_clear(value, rule.absorbs_at):
            ceiling = value if ceiling is None else min(ceiling, value)
        prefix = ValuedPrefix(trajectory, number, value)
        if number < rule.first_step or (rule.last_step and number > rule.last_step):
            continue
        if not (prefix.is_full and rule.full == "without"):
            kept.append(prefix)
    return kept


def discounted(good: ValuedPrefix, bad: ValuedPrefix, rule: PartialRule) -> tuple[float, float]:
    """Return the two values as a pair compares them."""
    gap = good.num_steps - bad.num_steps
    factor = rule.decay ** abs(gap)
    is_good_discounted = gap != 0 and (gap > 0) == (rule.discounts == "later")
    is_bad_discounted = gap != 0 and not is_good_discounted
    return good.value * (factor if is_good_discounted else 1), bad.value * (factor if is_bad_discounted else 1)


def _may_meet(good: ValuedPrefix, bad: ValuedPrefix, rule: PartialRule) -> bool:
    if is_clear(abs(good.position - bad.position), rule.max_position_gap):
        return False
    if rule.full == "apart" and good.is_full != bad.is_full:
        return False
    shorter, longer = sorted((good.ids, bad.ids), key=len)
    if rule.pairs_nested or longer[len(shorter) - 1] != shorter[-1]:  # the last token tells most apart
        return True
    return longer[: len(shorter)] != shorter


def partial_pairs(
    group: Sequence[Trajectory], values: Mapping[str, Sequence[float]], rule: PartialRule, rng: random.Random
) -> list[PreferencePair]:
    """Return prefix over prefix, by the best chosen first; kind `partial`. Scores are the values that were compared."""
    everything = prefixes(group, values, rule)
    ordered = sorted(everything, key=lambda prefix: (-prefix.value, sample_order(prefix.id)))
    pairs: list[tuple[ValuedPrefix, ValuedPrefix, float, float]] = []
    for good in capped(ordered, rule.max_chosen):
        mine = []
        for bad in ordered:
            good_value, bad_value = discounted(good, bad, rule)
            if is_clear(good_value - bad_value, rule.margin) and _may_meet(good, bad, rule):
                mine.append((good, bad, good_value, bad_value))
        pairs += drawn(mine, rule.max_rejected, rng)
    return [_partial_pair(*row) for row in drawn(pairs, rule.max_pairs, rng)]


def drawn(items: list[T], limit: int, rng: random.Random) -> list[T]:
    """Return `limit` items drawn without replacement, in their order; 0 is no limit."""
    if not limit or len(items) <= limit:
        return items
    return [items[place] for place in sorted(rng.sample(range(len(items)), limit))]


def _partial_pair(good: ValuedPrefix, bad: ValuedPrefix, good_value: float, bad_value: float) -> PreferencePair:
    return PreferencePair(
        id=f"{good.id}>{bad.id}",
        problem_id=good.trajectory.problem_id,
        kind="partial",
        prompt=good.trajectory.prompt,
        chosen="".join(good.trajectory.steps[: good.num_steps]),
        rejected="".join(bad.trajectory.steps[: bad.num_steps]),
        prompt_ids=good.trajectory.prompt_ids,
        chosen_ids=good.ids,
        rejected_ids=bad.ids,
        chosen_score=good_value,
        rejected_score=bad_value,
        passage_id=good.trajectory.passage_id,
    )
