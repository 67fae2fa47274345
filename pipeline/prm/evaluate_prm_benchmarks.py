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
counted on that share of the problems, and how far scores separate right from wrong steps at all.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from espalier.data.examples.token_examples import is_held_out
from espalier.data.jsonl import read_records
from espalier.data.records import AnnotatedSolution, BadInput, StepScores
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

ORIGINAL = "original"


@dataclass(frozen=True)
class Scored:
    """A judged solution and the score of each of its steps."""

    row: AnnotatedSolution
    scores: list[float]

    @property
    def group(self) -> str:
        """What figures are broken down by; the originals that others were made from are a group of their own."""
        return str(self.row.info.get("group", ""))

    @property
    def is_original(self) -> bool:
        """Whether other solutions were made from it."""
        return self.group == ORIGINAL

    def share_passed(self, threshold: float) -> float:
        """Return the share of its steps called right."""
        return sum(score >= threshold for score in self.scores) / len(self.scores)


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
        rows = read_records(AnnotatedSolution, input_path)
        scored, left_out, num_unused = self._join(rows, input_path)
        sections = {
            "first_error": self._first_errors(scored, left_out),
            "steps": self._steps(scored, left_out),
            "pairs": self._pairs(scored, left_out),
        }
        if not any(sections.values()):
            raise BadInput(f"{input_path}: nothing to evaluate: of {len(rows)} rows are left out: "
                           + ", ".join(f"{count} ({reason})" for reason, count in left_out.items()))  # fmt: skip
        index = self._index_baseline(scored, sections)
        own = [s for s in scored if not s.is_original]
        separated = separation([s.row for s in own], [s.scores for s in own])
        figures = _flat(sections) | {f"index alone: {name}": figure for name, figure in _flat(index).items()}
        figures |= {f"steps {name}": figure for name, figure in (separated or {}).items() if isinstance(figure, dict)}
        table = make_table([make_row(name, figure) for name, figure in figures.items()])
        context.counts.update({"labelled": len(rows), "scores_not_used": num_unused})
        context.counts.update({f"left out ({reason})": count for reason, count in left_out.items() if count})
        log.info("%s\n%s", context.output, table["plain"])
        return {
            **sections,
            "index": index,
            "separation": separated,
            "left_out": {reason: count for reason, count in left_out.items() if count},
            "num_rows": len(rows),
            "num_problems": len({row.problem_id for row in rows}),
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

    def _join(self, rows: Sequence[AnnotatedSolution], path: str) -> tuple[list[Scored], Counter[str], int]:
        scores = {row.id: row.scores for row in read_records(StepScores, self.scores)}
        left_out: Counter[str] = Counter()
        scored: list[Scored] = []
        for row in rows:
            if len(row.labels) != len(row.steps) or not -1 <= (row.first_error or 0) < max(len(row.steps), 1):
                raise BadInput(f"{path}: '{row.id}' has {len(row.steps)} steps, {len(row.labels)} labels and the first "
                               f"error {row.first_error}: import it again")  # fmt: skip
            if not row.steps:
                left_out["no step"] += 1
                continue
            steps = scores.get(row.id)
            if steps == []:
                left_out["no score was given"] += 1
                continue
            if steps is None or len(steps) != len(row.steps):
                numbers = f"{len(steps or [])} scores and {len(row.steps)} steps"
                raise BadInput(f"{self.scores}: '{row.id}' has {numbers}: score these solutions")
            if not all(0 <= score <= 1 for score in steps):
                raise BadInput(f"{self.scores}: '{row.id}' has a score outside [0, 1]: "
                               f"{next(score for score in steps if not 0 <= score <= 1)}")  # fmt: skip
            if self.skip_defects and "defect" in row.info:
                left_out["published judgement contradicts itself"] += 1
                continue
            scored.append(Scored(row, steps))
        return scored, left_out, len(scores.keys() - {row.id for row in rows})

    def _index_baseline(self, scored: Sequence[Scored], sections: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of the sections of first errors and of steps that there are, for scores by the index alone,
        counted where thresholds are chosen."""
        chosen = replace(self, threshold=None)

        def by_index(truth: Truth) -> list[Scored]:
            shares = shares_by_index([s.row for s in chosen._split(scored)[0]], truth)
            return [Scored(s.row, scores_by_index(len(s.row.steps), shares)) for s in scored]

        first = chosen._first_errors(by_index(is_right_so_far), Counter()) if sections["first_error"] else None
        steps = chosen._steps(by_index(is_right_step), Counter()) if sections["steps"] else None
        return {"first_error": first, "steps": steps}

    def _split(self, scored: Sequence[Scored]) -> tuple[list[Scored], list[Scored]]:
        """Return (to choose the threshold on, to report)."""
        if self.threshold is not None:
            return [], list(scored)
        tuning = [s for s in scored if is_held_out(s.row.problem_id, self.tune_share)]
        return tuning, [s for s in scored if not is_held_out(s.row.problem_id, self.tune_share)]

    def _choose(
        self, section: str, tuned: tuple[float, float] | None, tuning: Sequence[Scored]
    ) -> dict[str, Any] | None:
        """Return the threshold and where it comes from; None, with a warning, where it cannot be chosen."""
        if self.threshold is not None:
            return {"threshold": self.threshold, "tuning": None}
        if tuned is None:
            remedy = "raise stage.tune_share or give stage.threshold"
            log.warning("%s: no threshold can be chosen: the %d rows of the tuning share lack solutions with or "
                        "without an error: %s", section, len(tuning), remedy)  # fmt: skip
            return None
        problems = len({s.row.problem_id for s in tuning})
        figure = self.tune_for if section == "first_error" else "prm_score"
        origin = {
            "share": self.tune_share,
            "num_problems": problems,
            "num_rows": len(tuning),
            figure: round(tuned[1], 5),
        }
        return {"threshold": tuned[0], "tuning": origin}

    def _first_errors(self, scored: Sequence[Scored], left_out: Counter[str]) -> dict[str, Any] | None:
        known = [s for s in scored if s.row.first_error is not None]
        left_out["first error not known"] += len(scored) - len(known)
        tuning, reported = self._split(known)
        tuned = tune_first_error([s.scores for s in tuning], [_first(s) for s in tuning], self.tune_for)
        chosen = self._choose("first_error", tuned, tuning) if known else None
        if chosen is None or not reported:
            return None
        counts = [first_error_counts(s.scores, _first(s), chosen["threshold"]) for s in reported]
        return {
            **chosen,
            "formula": FIRST_ERROR_FORMULA,
            "num_rows": len(reported),
            "num_with_error": sum(_first(s) >= 0 for s in reported),
            "num_without_error": sum(_first(s) < 0 for s in reported),
            **_breakdown(reported, counts, first_error_figures, "f1", has_originals=True),
        }

    def _steps(self, scored: Sequence[Scored], left_out: Counter[str]) -> dict[str, Any] | None:
        judged = [s for s in scored if any(label is not None for label in s.row.labels)]
        left_out["no judged step"] += len(scored) - len(judged)
        tuning, reported = self._split(judged)
        own = [s for s in tuning if not s.is_original]
        chosen = self._choose("steps", tune_steps([s.scores for s in own], [s.row.labels for s in own]), own)
        if chosen is None or not any(not s.is_original for s in reported):
            return None
        threshold = chosen["threshold"]
        originals = {s.row.info["pair"]: s for s in reported if s.is_original and "pair" in s.row.info}
        counts = []
        for s in reported:
            original = None if s.is_original else originals.get(s.row.info.get("pair"))
            gap = 0.0 if original is None else abs(s.share_passed(threshold) - original.share_passed(threshold))
            counts.append([*step_counts(s.scores, s.row.labels, threshold), gap, float(original is not None)])
        return {
            **chosen,
            "formula": STEP_FORMULA,
            "num_rows": sum(not s.is_original for s in reported),
            "num_steps": sum(len(s.scores) - s.row.labels.count(None) for s in reported if not s.is_original),
            **_breakdown(reported, counts, step_figures, "prm_score"),
        }

    def _pairs(self, scored: Sequence[Scored], left_out: Counter[str]) -> dict[str, Any] | None:
        sides: dict[Any, dict[bool, Scored]] = {}
        for s in scored:
            if "pair" in s.row.info:
                side, is_chosen = sides.setdefault(s.row.info["pair"], {}), bool(s.row.info.get("is_chosen", False))
                if is_chosen in side:
                    raise BadInput(f"'{s.row.id}': two solutions of the pair '{s.row.info['pair']}' are on one side")
                side[is_chosen] = s
        pairs = [side for side in sides.values() if len(side) == 2]
        left_out["of a pair, the other is missing"] += len(sides) - len(pairs)
        if not pairs:
            return None
        figures: dict[str, Any] = {"num_pairs": len(pairs)}
        for how in self.aggregates:
            gaps = [aggregate(pair[True].scores, how) - aggregate(pair[False].scores, how) for pair in pairs]
            counts = [[0.5 + 0.5 * np.sign(gap), 1.0] for gap in gaps]
            figures[how] = _breakdown([pair[False] for pair in pairs], counts, pair_figures, "pair_accuracy")
        return figures


def _first(scored: Scored) -> int:
    first = scored.row.first_error
    assert first is not None
    return first


def _breakdown(
    scored: Sequence[Scored],
    counts: Sequence[Sequence[float]],
    figures: Callable[[np.ndarray], Figures],
    headline: str,
    has_originals: bool = False,
) -> dict[str, Any]:
    """Return `{"overall", "groups", "mean_over_groups"}`: figures with intervals over problems; groups only where there
    are several, and the mean of their headline where all have it. Originals count in their group alone unless
    `has_originals`."""
    problems = {problem: place for place, problem in enumerate(dict.fromkeys(s.row.problem_id for s in scored))}
    groups = sorted({s.group for s in scored})
    table = np.zeros((len(problems), len(groups), len(counts[0])))
    for s, row in zip(scored, counts, strict=True):
        table[problems[s.row.problem_id], groups.index(s.group)] += row
    by_group: dict[str, dict[str, Interval | None]] = {}
    for place, group in enumerate(groups):
        own = table[:, place]
        by_group[group] = figure_intervals(own[own.any(axis=1)], figures)
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
