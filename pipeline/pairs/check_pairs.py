"""PreferencePair → JSON: how often the chosen side is the worse one, by evidence that did not rank the pair.

The evidence is the counts of right completions of the states that the two sides reach, and the outcomes. Every pair
gets the probability that its order is wrong:

- one side right, the other wrong (whole solutions): 0 or 1; but where the wrong one is cut at what was taken for its
  first error (`stage.cut_wrong_below`), and completions succeeded behind that step all the same, P(V_chosen <
  V_rejected | counts) after equally many steps: such a pair teaches against a step that leads to right answers;
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

Pairs are read one by one and their solutions looked up (`data.row_index`), values problem by problem: what is kept is
the numbers of `pipeline.pairs.pair_evidence`, and sums per problem.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from espalier.data.records import BadInput, PreferencePair, StepScores, StepValues
from espalier.data.row_index import ProblemRows
from espalier.pipeline.evaluation.intervals import Interval
from espalier.pipeline.pairs.pair_evidence import PairEvidence, ScoreAgreement, sides_of
from espalier.pipeline.prm.seen_problems import SeenCounts
from espalier.pipeline.stage import StageContext
from espalier.values.label_reliability import CountedState, counted_states, sum_problems
from espalier.values.value_prior import ValuePrior, fit_prior

log = logging.getLogger("stage")

WEAK_ABOVE = 0.2
HARM, WEAK, IN_ORDER, UNKNOWN = "would harm", "weak", "in order", "not known"

_VALUES, _PAIRS, _SCORES = range(3)  # files of the index
_AT_HAND = 64  # solutions that are not read again while pairs have them in common


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
        with ProblemRows(context.output) as rows:
            rows.add(StepValues, self.values, finds_ids=True)
            rows.add(PreferencePair, input_path)
            if self.scores:
                rows.add(StepScores, self.scores, finds_ids=True)
            document, seen = self._document(rows)
        verdict = pair_verdict(document, self.largest_wrong_share)
        document["verdict"] = verdict
        wrong, agreement = document["wrong_order"], document["score_agreement"]
        context.counts.update(pairs=document["pairs"], verdict=verdict, wrong_order=wrong and wrong["mean"])
        if self.scores:
            seen.note(context, "take no part in the agreement of scores and values")
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

    def _document(self, rows: ProblemRows) -> tuple[dict[str, Any], SeenCounts]:
        """Return the document but for its verdict, and what the scores say of the problems of its pairs."""
        solution = lru_cache(_AT_HAND)(lambda name: rows.by_id(_VALUES, name))
        evidence, num_pairs = PairEvidence(), 0
        agreement = ScoreAgreement(self.scores, lru_cache(_AT_HAND)(lambda name: rows.by_id(_SCORES, name)))
        for pair in rows.in_order(_PAIRS):
            num_pairs += 1
            if sides := sides_of(pair, solution):
                evidence.add(pair, *sides)
                if self.scores:
                    agreement.add(*sides)
        order = np.fromiter(rows.problems_by_id(), dtype=np.int64)
        document = evidence.figures(value_prior(rows), order)
        document["pairs"] = num_pairs
        document["score_agreement"] = agreement.figure(order) if self.scores else None
        seen = SeenCounts(self.scores)
        if self.scores:
            for problem in np.unique(np.asarray(evidence.problems)):
                seen.add(row.is_seen for row in rows.rows(_SCORES, int(problem)))
        return document, seen


def value_prior(rows: ProblemRows) -> ValuePrior | None:
    """Return the Beta distribution of the values of all inner states, those of the first file; None where they do not
    differ beyond noise."""

    def read() -> Iterator[list[CountedState]]:
        for problem in rows.problems_by_id():
            states, _ = counted_states(rows.rows(_VALUES, problem))
            if states:
                yield states

    sums = sum_problems(read)
    if not sums.num_states:
        return None
    figures = sums.figures(sums.table.sum(axis=0))
    return fit_prior(float(figures["mean_value"]), float(np.nan_to_num(figures["value_variance"])))


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
