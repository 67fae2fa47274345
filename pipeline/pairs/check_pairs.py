"""PreferencePair → JSON: how often the chosen side is the worse one, by evidence that did not rank the pair.

The evidence is the counts of right completions of the states that the two sides reach, and the outcomes. Every pair
gets the probability that its order is wrong:

- one side right, the other wrong (whole solutions): 0 or 1;
- whole solutions of one outcome: the mean over equal steps of P(V_chosen < V_rejected | counts), where their states
  differ: values of another than the ranking reward model, if it has not seen the problem;
- step and partial pairs: the same of the two states they end in. Where these very counts chose the pair, the posterior
  still says how often a gap of that size is chance; it takes the two values as independent draws, so that siblings,
  which resemble one another, are in the wrong order rather more often.

The posterior is a Beta distribution's that is fitted to all states of the values' file (`values.value_prior`). With a
share w of pairs in the wrong order 1 - 2 w of what they teach is left. `verdict` is "would harm" where w's 95 %
interval over problems is all above `largest_wrong_share`: exit code 2; "weak" where w is above 0.2, or the scores order
states at equal steps no better than chance (`score_agreement`'s interval reaches 0.5); else "in order". A kind of pairs
that would harm by itself is named in a warning.
"""

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from espalier.data.jsonl import read_records
from espalier.data.records import BadInput, PreferencePair, StepScores, StepValues
from espalier.pipeline.evaluation.intervals import Interval, resampled_mean
from espalier.pipeline.prm.seen_problems import note_seen
from espalier.pipeline.stage import StageContext
from espalier.values.label_reliability import counted_states, signal_sums
from espalier.values.value_prior import CountPair, ValuePrior, fit_prior

log = logging.getLogger("stage")

WEAK_ABOVE = 0.2
EXACT = 1_000  # completions that the outcome of a finished solution is worth: its value is known
HARM, WEAK, IN_ORDER, UNKNOWN = "would harm", "weak", "in order", "not known"

Side = tuple[StepValues, int | None]  # a solution, and the number of its steps (None: all, a whole solution)
KnownPair = tuple[PreferencePair, tuple[Side, Side]]


def sides_of(pair: PreferencePair, rows: Mapping[str, StepValues]) -> tuple[Side, Side] | None:
    """Return the two sides of a pair by its id, None where a solution is not among `rows`, or has no such step."""
    chosen, _, rejected = re.sub(r"(~\d+)?(@round\d+)*$", "", pair.id).partition(">")
    sides: list[Side] = []
    for name in (chosen, rejected):
        number = None
        if pair.kind in ("step", "partial"):
            name, _, steps = name.rpartition("#")
            number = int(steps or 0) + (pair.kind == "step")  # a step pair's id counts the steps before it
        if name not in rows or (number is not None and not 1 <= number <= len(rows[name].steps)):
            return None
        sides.append((rows[name], number))
    return sides[0], sides[1]


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
    """Return the counts to compare; empty for whole solutions of different outcomes, and where none can be."""
    (good, good_steps), (bad, bad_steps) = chosen, rejected
    if good_steps is not None and bad_steps is not None:
        both = state_count(good, good_steps), state_count(bad, bad_steps)
        return [both] if both[0][1] and both[1][1] else []
    if good.is_correct != bad.is_correct:
        return []
    return [(state_count(good, step), state_count(bad, step)) for step in equal_steps(good, bad)]


@dataclass(frozen=True)
class CheckPairs:
    """The input is preference pairs."""

    values: str
    """step values of the pairs' trajectories, with the counts of completions"""
    scores: str = ""
    """step scores that ranked the pairs; empty: none"""
    largest_wrong_share: float = 0.4
    """pairs are refused where the share in the wrong order is clearly above it: a fifth of what they teach is left;
    1 refuses nothing"""

    def __post_init__(self) -> None:
        if not 0 <= self.largest_wrong_share <= 1:
            raise BadInput(f"stage.largest_wrong_share must be from 0 to 1 (refuses nothing), got "
                           f"{self.largest_wrong_share}")  # fmt: skip

    def inputs(self) -> list[str]:
        """Return the step values and the step scores."""
        return [path for path in (self.values, self.scores) if path]

    def run(self, input_path: str, context: StageContext) -> dict[str, Any]:
        """Return the document. Raises BadInput where the pairs are refused."""
        values = read_records(StepValues, self.values)
        rows = {row.id: row for row in values}
        pairs = read_records(PreferencePair, input_path)
        known = [(pair, sides) for pair in pairs if (sides := sides_of(pair, rows)) is not None]
        document = pair_evidence(known, value_prior(values))
        document["pairs"] = len(pairs)
        document["score_agreement"] = score_agreement(known, self.scores) if self.scores else None
        verdict = pair_verdict(document, self.largest_wrong_share)
        document["verdict"] = verdict
        wrong, agreement = document["wrong_order"], document["score_agreement"]
        context.counts.update(pairs=len(pairs), verdict=verdict, wrong_order=wrong and wrong["mean"])
        if self.scores:
            problems = {pair.problem_id for pair, _ in known}
            note_seen(problems, self.scores, context, "take no part in the agreement of scores and values")
            context.counts["score_agreement"] = agreement and agreement["mean"]
        line = f"{input_path}: the pairs' verdict is '{verdict}': {_shown(document)}"
        if verdict == HARM:
            raise BadInput(f"{line}. Refused before training; stage.largest_wrong_share=1 trains on them anyway")
        if verdict != IN_ORDER:
            log.warning("%s", line)
        for kind, share in document["wrong_order_by_kind"].items():
            if share["low"] > self.largest_wrong_share:
                log.warning("%s: of pairs of kind %s %s are expected in the wrong order: leave this kind out",
                            input_path, kind, _percent(share))  # fmt: skip
        return document


def value_prior(rows: Sequence[StepValues]) -> ValuePrior | None:
    """Return the Beta distribution of the values of all inner states; None where they do not differ beyond noise."""
    states, _ = counted_states(rows)
    if not states:
        return None
    sums = signal_sums(states)
    figures = sums.figures(sums.table.sum(axis=0))
    return fit_prior(float(figures["mean_value"]), float(np.nan_to_num(figures["value_variance"])))


def pair_evidence(
    known: Sequence[tuple[PreferencePair, tuple[Side, Side]]], prior: ValuePrior | None
) -> dict[str, Any]:
    """Return `wrong_order` with its interval over problems and by kind; of whole solutions the pairs right over wrong,
    wrong over right, both right, both wrong; `unknown` pairs without evidence; how much longer the chosen side is.

    Without a prior (values that do not differ) counts say nothing: the order of such a pair is wrong with 1/2.
    """
    compared = {id(pair): count_pairs(*sides) for pair, sides in known}
    distinct = sorted({both for rows in compared.values() for both in rows})
    wrong_of = _wrong_probabilities(distinct, prior)
    wrong: list[tuple[str, str, float]] = []
    outcomes: Counter[str] = Counter(right_over_wrong=0, wrong_over_right=0, both_right=0, both_wrong=0, unknown=0)
    for pair, ((good, steps), (bad, _)) in known:
        if steps is None:
            name = {(True, False): "right_over_wrong", (False, True): "wrong_over_right"}.get(
                (good.is_correct, bad.is_correct), "both_right" if good.is_correct else "both_wrong"
            )
            outcomes[name] += 1
        rows = compared[id(pair)]
        if rows:
            wrong.append((pair.problem_id, pair.kind, float(np.mean([wrong_of[both] for both in rows]))))
        elif steps is None and good.is_correct != bad.is_correct:
            wrong.append((pair.problem_id, pair.kind, float(bad.is_correct)))
        else:
            outcomes["unknown"] += 1
    tokens = [(pair.problem_id, float(len(pair.chosen_ids) - len(pair.rejected_ids))) for pair, _ in known]
    steps_more = [(pair.problem_id, float(len(good.steps) - len(bad.steps)))
                  for pair, ((good, steps), (bad, _)) in known if steps is None]  # fmt: skip
    return {
        "wrong_order": resampled_mean([(problem, share) for problem, _, share in wrong]),
        "wrong_order_by_kind": {
            kind: resampled_mean([(problem, share) for problem, one, share in wrong if one == kind])
            for kind in sorted({kind for _, kind, _ in wrong})
        },
        **outcomes,
        "chosen_more_tokens": resampled_mean(tokens),
        "chosen_more_steps": resampled_mean(steps_more),
    }


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


def score_agreement(known: Sequence[KnownPair], path: str) -> Interval | None:
    """Return how often, at equal steps of the pairs' solutions, the side with the higher score has the higher share of
    right completions (equal scores half; equal shares are left out), over problems that the reward model has not seen,
    as far as its scores say it.

    None without such steps: step and partial pairs are compared by `wrong_order`. Raises BadInput where a solution has
    scores of another number of steps.
    """
    scores = {row.id: row.scores for row in read_records(StepScores, path) if row.is_seen is not True}
    for side, _ in (one for _, sides in known for one in sides):
        if side.id in scores and len(scores[side.id]) != len(side.steps):
            raise BadInput(f"{path}: '{side.id}' has {len(scores[side.id])} scores and {len(side.steps)} steps: score "
                           "these trajectories")  # fmt: skip
    hits: dict[tuple[str, tuple[int, ...], tuple[int, ...]], tuple[str, float]] = {}
    for _, ((good, steps), (bad, _)) in known:
        if steps is not None or good.id not in scores or bad.id not in scores:
            continue
        for step in equal_steps(good, bad):
            (right, number), (other, others) = state_count(good, step), state_count(bad, step)
            gap = right / number - other / others
            if gap:
                ends = (tuple(row.response_ids[: row.step_ends[step - 1]]) for row in (good, bad))
                lead = np.sign(gap) * np.sign(scores[good.id][step - 1] - scores[bad.id][step - 1])
                hits[good.problem_id, next(ends), next(ends)] = good.problem_id, float(1 + lead) / 2
    return resampled_mean(list(hits.values()))


def pair_verdict(document: Mapping[str, Any], largest_wrong_share: float) -> str:
    """Return the verdict by the rule of the module."""
    wrong, agreement = document["wrong_order"], document["score_agreement"]
    if wrong is None:
        return UNKNOWN
    if wrong["low"] > largest_wrong_share:
        return HARM
    is_chance = agreement is not None and agreement["low"] <= 0.5
    return WEAK if wrong["mean"] > WEAK_ABOVE or is_chance else IN_ORDER


def _shown(document: Mapping[str, Any]) -> str:
    wrong, agreement = document["wrong_order"], document["score_agreement"]
    if wrong is None:
        return "no pair has evidence: name the step values of the trajectories that the pairs were built from"
    parts = [f"{_percent(wrong)} of {document['pairs']} pairs are expected in the wrong order"]
    if agreement is not None:
        parts.append(f"scores agree with values at equal steps in {_percent(agreement)} (50 is chance)")
    remedy = "complete more per state, raise stage.margin of the pairs, or build outcome pairs"
    return f"{', '.join(parts)}: {remedy}"


def _percent(share: Interval) -> str:
    return f"{100 * share['mean']:.0f} % [{100 * share['low']:.0f}, {100 * share['high']:.0f}]"
