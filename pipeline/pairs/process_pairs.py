"""Pairs of whole solutions ranked by their process rewards: one rule that holds the published builders as options.

The rule of Jiao et al. 2024 (planning-based process rewards): the best right solutions over the highest-scored
wrong ones, and over right ones whose score is lower by more than a margin (a right answer reached by wrong steps).
Its later forms are options here:

    all right ones over worse right ones          over_correct: all
    right over right alone                        over_wrong: false
    among the wrong ones too, with a margin       wrong_margin: 0.5
    who lost to a right one is never chosen       drops_losers: true
    rejection sampling (Liu et al. 2024, RSO)     over_correct: sampled, in place of the margin
    right over right more often                   up_sampling: 3
    only where the problem has a wrong answer     needs_wrong: true

Left out: a margin for each data set of a mixture (build each with its own, then join the files).
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from espalier.data.records import BadInput, PreferencePair, Trajectory
from espalier.pipeline.pairs.trajectory_groups import capped, check_choice, check_counts, sample_order

Scored = tuple[Trajectory, float]

OVER_CORRECT = ("none", "chosen", "all", "sampled")


def is_clear(gap: float, margin: float) -> bool:
    """Say whether a gap is above the margin by more than rounding: 0.9 - 0.6 does not exceed 0.3."""
    return gap > margin + 1e-9


def is_above(one: float, other: float) -> bool:
    """Say whether a score is above another one by more than rounding: products of many steps are as small as 1e-10."""
    return one - other > 1e-9 * max(abs(one), abs(other))


def make_pair(kind: str, chosen: Scored, rejected: Scored) -> PreferencePair:
    """Return two whole solutions of one problem."""
    (good, good_score), (bad, bad_score) = chosen, rejected
    return PreferencePair(
        id=f"{good.id}>{bad.id}",
        problem_id=good.problem_id,
        kind=kind,
        prompt=good.prompt,
        chosen=good.response,
        rejected=bad.response,
        prompt_ids=good.prompt_ids,
        chosen_ids=good.response_ids,
        rejected_ids=bad.response_ids,
        chosen_score=good_score,
        rejected_score=bad_score,
        passage_id=good.passage_id,
    )


def up_to_first_error(trajectory: Trajectory, scores: Sequence[float], below: float) -> Trajectory:
    """Return a wrong trajectory up to its first step that scores below a value, whole where there is none. What follows
    a wrong step is often right by itself, and would be blamed for it."""
    first = next((place for place, score in enumerate(scores) if score < below), len(scores))
    if trajectory.is_correct or first >= len(scores) - 1:
        return trajectory
    end, steps = trajectory.step_ends[first], trajectory.steps[: first + 1]
    return replace(
        trajectory,
        response="".join(steps),
        steps=steps,
        response_ids=trajectory.response_ids[:end],
        step_ends=trajectory.step_ends[: first + 1],
    )


def ranked(scored: Sequence[Scored]) -> list[Scored]:
    """Return highest score first; equal ones as they were sampled."""
    return sorted(scored, key=lambda row: (-row[1], sample_order(row[0].id)))


def rejection_sample(candidates: Sequence[Scored], beta: float, share: float, rng: random.Random) -> list[bool]:
    """Return which candidates are accepted (statistical rejection sampling, Liu et al. 2024, algorithm 1).

    In rounds over those not yet accepted, each is accepted with probability exp((score - highest) / beta), where
    `highest` is the best score still there, until ceil(share * candidates) are. Every round accepts at least one.
    """
    accepted = [False] * len(candidates)
    wanted = math.ceil(share * len(candidates) - 1e-9)
    while sum(accepted) < wanted:
        rest = [place for place, is_taken in enumerate(accepted) if not is_taken]
        highest = max(candidates[place][1] for place in rest)
        for place in rest:
            if sum(accepted) < wanted and rng.random() < math.exp((candidates[place][1] - highest) / beta):
                accepted[place] = True
    return accepted


@dataclass(frozen=True, kw_only=True)
class ProcessRule:
    """Which of a problem's solutions are paired; 0 is "no cap" for every count.

    `max_chosen` right solutions (best first) are chosen; each over `max_rejected` wrong ones (highest score first)
    if `over_wrong`, and over `max_worse` right ones (highest first) as `over_correct` says: `chosen`, those whose
    score is lower by more than `margin`; `all`, the same with every right one as chosen; `sampled`, the accepted
    over the others, where the score is higher; `none`. `wrong_margin` (null: none) pairs the wrong ones among each
    other. Right solutions of fewer than `min_chosen_steps` steps, and wrong ones of fewer than
    `min_rejected_steps`, take no part. `max_pairs` keeps the first pairs of a problem, before `up_sampling` writes
    those of two right solutions that many times, under ids that end in `~2`, `~3`, …
    """

    max_chosen: int = 0
    max_rejected: int = 0
    max_worse: int = 0
    max_pairs: int = 0
    margin: float = 0.5
    over_wrong: bool = True
    over_correct: str = "chosen"
    wrong_margin: float | None = None
    drops_losers: bool = False
    needs_wrong: bool = False
    up_sampling: int = 1
    min_chosen_steps: int = 0
    min_rejected_steps: int = 0
    beta: float = 0.1
    accepted_share: float = 0.5

    def check_rule(self) -> None:
        """Raise BadInput on settings that say nothing."""
        check_choice("over_correct", self.over_correct, OVER_CORRECT)
        check_counts(
            max_chosen=self.max_chosen,
            max_rejected=self.max_rejected,
            max_worse=self.max_worse,
            max_pairs=self.max_pairs,
            min_chosen_steps=self.min_chosen_steps,
            min_rejected_steps=self.min_rejected_steps,
        )
        if self.up_sampling < 1:
            raise BadInput(f"stage.up_sampling must be 1 or more, got {self.up_sampling}")
        if self.beta <= 0 or not 0 < self.accepted_share <= 1:
            raise BadInput(
                f"stage.beta must be above 0 and stage.accepted_share in (0, 1], got {self.beta} and "
                f"{self.accepted_share}"
            )


def process_pairs(scored: Sequence[Scored], rule: ProcessRule, rng: random.Random) -> list[PreferencePair]:
    """Return the pairs of one problem's scored solutions, by the best chosen first; kinds `process` (right over wrong),
    `process_correct` (right over right), `process_wrong` (wrong over wrong). `rng` is used by rejection sampling."""
    correct = ranked([row for row in scored if row[0].is_correct and len(row[0].steps) >= rule.min_chosen_steps])
    distinct: dict[tuple[int, ...], Scored] = {}  # cut ones may be alike
    for row in ranked([row for row in scored if not row[0].is_correct]):
        if len(row[0].steps) >= rule.min_rejected_steps:
            distinct.setdefault(tuple(row[0].response_ids), row)
    wrong = list(distinct.values())
    num_chosen = len(capped(correct, rule.max_chosen))
    takes_correct = rule.over_correct != "none" and not (rule.needs_wrong and not wrong)
    worse_of = _worse_of(correct, num_chosen, rule, rng) if takes_correct else [[] for _ in correct]
    pairs: list[PreferencePair] = []
    for place, chosen in enumerate(correct):
        if rule.over_wrong and place < num_chosen:
            others = [row for row in wrong if not _begins_with(chosen[0], row[0])]
            pairs += [make_pair("process", chosen, rejected) for rejected in capped(others, rule.max_rejected)]
        pairs += [make_pair("process_correct", chosen, other) for other in capped(worse_of[place], rule.max_worse)]
    if rule.wrong_margin is not None:
        gap = rule.wrong_margin
        pairs += [make_pair("process_wrong", a, b) for a in wrong for b in wrong if is_clear(a[1] - b[1], gap)]
    if rule.drops_losers:
        pairs = _without_losers(pairs)
    return _up_sampled(capped(pairs, rule.max_pairs), rule.up_sampling)


def _begins_with(one: Trajectory, other: Trajectory) -> bool:
    """Whether `other`, cut at what was taken for an error, is just how `one` begins: they show no contrast."""
    return one.response_ids[: len(other.response_ids)] == other.response_ids


def _worse_of(correct: list[Scored], num_chosen: int, rule: ProcessRule, rng: random.Random) -> list[list[Scored]]:
    """For every right solution the right ones it is preferred over."""
    if rule.over_correct == "sampled":
        accepted = rejection_sample(correct, rule.beta, rule.accepted_share, rng)
        left = [row for row, is_taken in zip(correct, accepted, strict=True) if not is_taken]
        return [
            [other for other in left if is_above(row[1], other[1])] if is_taken else []
            for row, is_taken in zip(correct, accepted, strict=True)
        ]
    firsts = len(correct) if rule.over_correct == "all" else num_chosen
    return [
        [other for other in correct if is_clear(row[1] - other[1], rule.margin)] if place < firsts else []
        for place, row in enumerate(correct)
    ]


def _without_losers(pairs: list[PreferencePair]) -> list[PreferencePair]:
    """Without the pairs whose chosen one was rejected for another right one."""

    def sides(pair: PreferencePair) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(pair.chosen_ids), tuple(pair.rejected_ids)

    lost = {sides(pair)[1] for pair in pairs if pair.kind == "process_correct"}
    return [pair for pair in pairs if sides(pair)[0] not in lost]


def _up_sampled(pairs: list[PreferencePair], times: int) -> list[PreferencePair]:
    copies = [
        replace(pair, id=f"{pair.id}~{number}")
        for number in range(2, times + 1)
        for pair in pairs
        if pair.kind == "process_correct"
    ]
    return pairs + copies
