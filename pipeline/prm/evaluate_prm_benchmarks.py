"""Any step scorer on solutions that somebody judged: first errors, single steps, pairs of solutions.

Input: `AnnotatedSolution`; `scores`: `StepScores` of the same ids, one score in [0, 1] a step. Three sections, each on
the solutions that have what it needs (figures and formulas: `pipeline.prm.step_score_metrics`):

- **first_error**: every solution whose first error is known (ProcessBench, BIG-Bench-Mistake);
- **steps**: every solution with judged steps but for the originals that others were made from (PRMBench),
  overall and by group, the originals as a group of their own;
- **pairs**: solutions joined by `info["pair"]`, one of them marked `info["is_chosen"]`: how often its aggregated
  score is the higher one, a tie counting half. It needs no threshold.

A threshold that is not given is chosen, for each section by itself, on `tune_share` of the problems (by hash of
the problem id: the same problems for every scorer), where `f1` (or `tune_for`) and `prm_score` are highest; the
figures are those of all other problems. What is left out is counted.

Beside the first two stand the figures of a score that knows nothing but a step's index (`pipeline.prm.index_baseline`),
counted on that share of the problems; beside pairs that of preferring the side with fewer steps; and how far scores
separate right from wrong steps at all.

Solutions are read one by one and their scores looked up (`data.row_index`). Thresholds, AUCs and draws of problems need
all numbers at once: score and label of each step are kept, some 100 bytes per step at most while a figure is computed,
50 per solution, and the counts of each problem by group; no text.
"""

import logging
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from espalier.data.records import AnnotatedSolution, BadInput, StepScores
from espalier.data.row_index import ProblemRows
from espalier.pipeline.evaluation.evaluation_table import make_row, make_table
from espalier.pipeline.evaluation.intervals import Interval
from espalier.pipeline.prm.index_baseline import (
    Truth,
    is_right_so_far,
    is_right_step,
    scores_by_index,
    separation,
    shares_by_index,
)
from espalier.pipeline.prm.judged_scores import ORIGINAL, JudgedScores, Taken, gaps_to_originals
from espalier.pipeline.prm.step_score_metrics import (
    FIRST_ERROR_FORMULA,
    STEP_FORMULA,
    Figures,
    figure_intervals,
    first_error_counts,
    first_error_figures,
    pair_figures,
    step_counts,
    step_figures,
    tune_first_error,
    tune_steps,
)
from espalier.pipeline.stage import StageContext
from espalier.rewards.aggregate import aggregate, check_aggregate

log = logging.getLogger("stage")

_ROWS, _SCORES = range(2)  # files of the index


@dataclass(frozen=True)
class EvaluatePRMBenchmarks:
    """`threshold`: a number in [0, 1], or null to choose it on `tune_share` of the problems; `tune_for`: "f1" or
    "accuracy" of first errors; `skip_defects` leaves out rows whose published judgement contradicts itself."""

    scores: str
    threshold: float | None = None
    tune_share: float = 0.2
    tune_for: str = "f1"
    aggregates: Sequence[str] = ("product", "minimum", "last", "mean")
    skip_defects: bool = False

    def inputs(self) -> list[str]:
        """Return the step scores."""
        return [self.scores]

    def run(self, input_path: str, context: StageContext) -> dict[str, Any]:
        """Return `{"first_error", "steps", "pairs", "index", "separation", "left_out", "num_rows", "num_problems",
        "table"}`; a section that no row serves is null. Raises BadInput where scores do not fit, or nothing can be
        evaluated."""
        self._check()
        with ProblemRows(context.output) as rows:
            num_rows = rows.add(AnnotatedSolution, input_path)
            num_scores = rows.add(StepScores, self.scores, finds_ids=True)
            scored, left_out, num_used = self._join(rows, input_path)
            _check_sides(rows, scored)
            problem_places, num_problems = _problem_places(rows, scored), rows.num_problems(_ROWS)
        sections = {
            "first_error": self._first_errors(scored, left_out),
            "steps": self._steps(scored, left_out),
            "pairs": self._pairs(scored, left_out),
        }
        if not any(sections.values()):
            raise BadInput(f"{input_path}: nothing to evaluate: of {num_rows} rows are left out: "
                           + ", ".join(f"{count} ({reason})" for reason, count in left_out.items()))  # fmt: skip
        index = self._index_baseline(scored, sections)
        own = ~scored.is_original
        separated = separation(problem_places[own].tolist(), scored.part(own))
        figures = _flat(sections) | {f"index alone: {name}": figure for name, figure in _flat(index).items()}
        figures |= {f"steps {name}": figure for name, figure in (separated or {}).items() if isinstance(figure, dict)}
        table = make_table([make_row(name, figure) for name, figure in figures.items()])
        context.counts.update({"labelled": num_rows, "scores_not_used": num_scores - num_used})
        context.counts.update({f"left out ({reason})": count for reason, count in left_out.items() if count})
        log.info("%s\n%s", context.output, table["plain"])
        return {
            **sections,
            "index": index,
            "separation": separated,
            "left_out": {reason: count for reason, count in left_out.items() if count},
            "num_rows": num_rows,
            "num_problems": num_problems,
            "table": table,
        }

    def _check(self) -> None:
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise BadInput(f"stage.threshold must be null or lie in [0, 1], got {self.threshold}")
        if self.threshold is None and not 0 < self.tune_share < 1:
            raise BadInput(f"stage.tune_share must lie between 0 and 1, got {self.tune_share}: or give stage.threshold")
        if self.tune_for not in ("f1", "accuracy"):
            raise BadInput(f"stage.tune_for must be f1 or accuracy, got '{self.tune_for}'")
        for how in self.aggregates:
            check_aggregate(how)

    def _join(self, rows: ProblemRows, path: str) -> tuple[JudgedScores, Counter[str], int]:
        """Return the solutions with their scores, how many are left out why, and how many scores are of a solution."""
        left_out: Counter[str] = Counter()
        scored, num_used = Taken(self.tune_share), 0
        row: AnnotatedSolution
        for place, row in enumerate(rows.in_order(_ROWS)):
            if len(row.labels) != len(row.steps) or not -1 <= (row.first_error or 0) < max(len(row.steps), 1):
                raise BadInput(f"{path}: '{row.id}' has {len(row.steps)} steps, {len(row.labels)} labels and the first "
                               f"error {row.first_error}: import it again")  # fmt: skip
            found: StepScores | None = rows.by_id(_SCORES, row.id)
            num_used += found is not None
            if not row.steps:
                left_out["no step"] += 1
            elif found is not None and not found.scores:
                left_out["no score was given"] += 1
            else:
                self._check_scores(row, found.scores if found else [])
                if self.skip_defects and "defect" in row.info:
                    left_out["published judgement contradicts itself"] += 1
                    continue
                scored.add(place, row, found.scores if found else [])
        return scored.all(), left_out, num_used

    def _check_scores(self, row: AnnotatedSolution, scores: Sequence[float]) -> None:
        if len(scores) != len(row.steps):
            raise BadInput(f"{self.scores}: '{row.id}' has {len(scores)} scores and {len(row.steps)} steps: score "
                           "these solutions")  # fmt: skip
        if not all(0 <= score <= 1 for score in scores):
            raise BadInput(f"{self.scores}: '{row.id}' has a score outside [0, 1]: "
                           f"{next(score for score in scores if not 0 <= score <= 1)}")  # fmt: skip

    def _index_baseline(self, scored: JudgedScores, sections: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of the sections that there are, for scores by the index alone, counted where thresholds are
        chosen; of pairs for preferring fewer steps, which needs no judged step."""
        chosen = replace(self, threshold=None)

        def by_index(truth: Truth) -> JudgedScores:
            shares = shares_by_index(chosen._split(scored)[0], truth)
            return replace(scored, scores=scores_by_index(scored.indices, shares))

        first = chosen._first_errors(by_index(is_right_so_far), Counter()) if sections["first_error"] else None
        steps = chosen._steps(by_index(is_right_step), Counter()) if sections["steps"] else None
        pairs = None
        if sections["pairs"]:
            sides, better, other, _ = _sides_of(scored)
            fewer = -np.fromiter((len(row.scores) for row in sides), dtype=np.float64)
            pairs = {"fewer_steps": _won(sides, better, other, fewer)}
        return {"first_error": first, "steps": steps, "pairs": pairs}

    def _split(self, scored: JudgedScores) -> tuple[JudgedScores, JudgedScores]:
        """Return (to choose the threshold on, to report)."""
        if self.threshold is not None:
            return scored.part(np.zeros(len(scored), dtype=bool)), scored
        return scored.part(scored.is_tuning), scored.part(~scored.is_tuning)

    def _choose(self, section: str, tuned: tuple[float, float] | None, tuning: JudgedScores) -> dict[str, Any] | None:
        """Return the threshold and where it comes from; None, with a warning, where it cannot be chosen."""
        if self.threshold is not None:
            return {"threshold": self.threshold, "tuning": None}
        if tuned is None:
            remedy = "raise stage.tune_share or give stage.threshold"
            log.warning("%s: no threshold can be chosen: the %d rows of the tuning share lack solutions with or "
                        "without an error: %s", section, len(tuning), remedy)  # fmt: skip
            return None
        figure = self.tune_for if section == "first_error" else "prm_score"
        origin = {
            "share": self.tune_share,
            "num_problems": len(np.unique(tuning.problems)),
            "num_rows": len(tuning),
            figure: round(tuned[1], 5),
        }
        return {"threshold": tuned[0], "tuning": origin}

    def _first_errors(self, scored: JudgedScores, left_out: Counter[str]) -> dict[str, Any] | None:
        known = scored.part(scored.is_first_error_known)
        left_out["first error not known"] += len(scored) - len(known)
        tuning, reported = self._split(known)
        tuned = tune_first_error((row.scores for row in tuning), tuning.first_errors.tolist(), self.tune_for)
        chosen = self._choose("first_error", tuned, tuning) if len(known) else None
        if chosen is None or not len(reported):
            return None
        counts = array("d")
        for row, first in zip(reported, reported.first_errors.tolist(), strict=True):
            counts.extend(first_error_counts(row.scores, first, chosen["threshold"]))
        return {
            **chosen,
            "formula": FIRST_ERROR_FORMULA,
            "num_rows": len(reported),
            "num_with_error": int(np.sum(reported.first_errors >= 0)),
            "num_without_error": int(np.sum(reported.first_errors < 0)),
            **_breakdown(reported, _per_row(reported, counts), first_error_figures, "f1", has_originals=True),
        }

    def _steps(self, scored: JudgedScores, left_out: Counter[str]) -> dict[str, Any] | None:
        judged = scored.part(scored.is_judged)
        left_out["no judged step"] += len(scored) - len(judged)
        tuning, reported = self._split(judged)
        own = tuning.part(~tuning.is_original)
        tuned = tune_steps((row.scores for row in own), (row.labels for row in own))
        chosen = self._choose("steps", tuned, own) if len(judged) else None
        others = reported.part(~reported.is_original)
        if chosen is None or not len(others):
            return None
        counts, shares = array("d"), array("d")
        for row in reported:
            counts.extend(step_counts(row.scores, row.labels, chosen["threshold"]))
            shares.append(row.share_passed(chosen["threshold"]))
        gaps = gaps_to_originals(reported, np.asarray(shares))
        return {
            **chosen,
            "formula": STEP_FORMULA,
            "num_rows": len(others),
            "num_steps": int(np.sum(~np.isnan(others.labels))),
            **_breakdown(reported, np.hstack([_per_row(reported, counts), gaps]), step_figures, "prm_score"),
        }

    def _pairs(self, scored: JudgedScores, left_out: Counter[str]) -> dict[str, Any] | None:
        sides, chosen, rejected, num_alone = _sides_of(scored)
        left_out["of a pair, the other is missing"] += num_alone
        if not len(chosen):
            return None
        figures: dict[str, Any] = {"num_pairs": len(chosen)}
        for how in self.aggregates:
            values = np.fromiter((aggregate(row.scores, how) for row in sides), dtype=np.float64)
            figures[how] = _won(sides, chosen, rejected, values)
        return figures


def _sides_of(scored: JudgedScores) -> tuple[JudgedScores, np.ndarray, np.ndarray, int]:
    """Return the solutions of pairs, the places of the chosen and of the other ones among them, pair by pair as they
    come, and how many lack the other side."""
    sides = scored.part(scored.sides >= 0)
    pairs, first, number = np.unique(sides.pairs, return_index=True, return_inverse=True)
    both = np.full((len(pairs), 2), -1)
    both[number, sides.sides] = np.arange(len(sides))
    whole = both.min(axis=1) >= 0
    order = np.argsort(first)
    rejected, chosen = both[order][whole[order]].T
    return sides, chosen, rejected, int(np.sum(~whole))


def _won(sides: JudgedScores, chosen: np.ndarray, rejected: np.ndarray, values: np.ndarray) -> dict[str, Any]:
    """Return how often the chosen side has the higher value [N], a tie counting half."""
    counts = 0.5 + 0.5 * np.sign(values[chosen] - values[rejected])
    counts = np.stack([counts, np.ones(len(counts))], axis=1)
    return _breakdown(sides, counts, pair_figures, "pair_accuracy", rows=rejected)


def _check_sides(rows: ProblemRows, scored: JudgedScores) -> None:
    """Raise BadInput where two solutions of a pair are on one side of it."""
    order = np.lexsort((scored.sides, scored.pairs))
    order = order[scored.sides[order] >= 0]
    is_same = (np.diff(scored.pairs[order]) == 0) & (np.diff(scored.sides[order]) == 0)
    if is_same.any():
        place = scored.places[order[1:][is_same].min()]
        row = next(islice(rows.in_order(_ROWS), int(place), None))
        raise BadInput(f"'{row.id}': two solutions of the pair '{row.info['pair']}' are on one side")


def _problem_places(rows: ProblemRows, scored: JudgedScores) -> np.ndarray:
    """Return the place of every solution's problem in the order of the problems' ids [N]."""
    names = np.fromiter(rows.problems_by_id(), dtype=np.int64)
    order = np.argsort(names)
    found: np.ndarray = order[np.searchsorted(names, scored.problems, sorter=order)]
    return found


def _per_row(scored: JudgedScores, counts: "array[float]") -> np.ndarray:
    return np.asarray(counts).reshape(len(scored), -1)


def _breakdown(
    scored: JudgedScores,
    counts: np.ndarray,
    figures: Callable[[np.ndarray], Figures],
    headline: str,
    has_originals: bool = False,
    rows: np.ndarray | None = None,
) -> dict[str, Any]:
    """Return `{"overall", "groups", "mean_over_groups"}`: figures of counts [R, C], of all solutions or of these
    `rows`, with intervals over problems; groups only where there are several, and the mean of their headline where all
    have it. Originals count in their group alone unless `has_originals`."""
    own = slice(None) if rows is None else rows
    _, first, problems = np.unique(scored.problems[own], return_index=True, return_inverse=True)
    codes, group_places = np.unique(scored.groups[own], return_inverse=True)
    names = [scored.group_names[code] for code in codes]
    groups = sorted(names)
    table = np.zeros((len(first), len(groups), counts.shape[1]))
    columns = np.asarray([groups.index(name) for name in names])
    np.add.at(table, (np.argsort(np.argsort(first))[problems], columns[group_places]), counts)
    by_group: dict[str, dict[str, Interval | None]] = {}
    for place, group in enumerate(groups):
        of_group = table[:, place]
        by_group[group] = figure_intervals(of_group[of_group.any(axis=1)], figures)
    counted = [place for place, group in enumerate(groups) if has_originals or group != ORIGINAL]
    kept = table[:, counted]
    kept = kept[kept.any(axis=(1, 2))]
    overall = figure_intervals(kept.sum(axis=1), figures)
    if len(counted) < 2 or (has_originals and ORIGINAL in groups):
        return {"overall": overall, "groups": by_group if len(groups) > 1 else {}}
    mean = figure_intervals(kept, lambda sums: {headline: figures(sums)[headline].mean(axis=-1)})
    return {"overall": overall, "groups": by_group, "mean_over_groups": mean}


def _flat(sections: dict[str, Any]) -> dict[str, Interval]:
    """Return `first_error f1`, `steps prm_score (circular)`, ...: the overall figures, and the headline of each
    group."""
    rows: dict[str, Interval | None] = {}
    for name, section in sections.items():
        parts = {name: section} if name != "pairs" else {
            f"pairs by {how}": part for how, part in (section or {}).items() if isinstance(part, dict)
        }  # fmt: skip
        for title, part in parts.items():
            if part is None:
                continue
            headline = next(iter(part["overall"]))
            rows |= {f"{title} {figure}": value for figure, value in part["overall"].items()}
            rows |= {f"{title} {headline} ({group})": value[headline] for group, value in part["groups"].items()}
    return {name: value for name, value in rows.items() if value is not None}
