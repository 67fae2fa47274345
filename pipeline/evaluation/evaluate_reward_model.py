"""ResponseScores → the score of a reward-model benchmark (formulas: `pipeline.evaluation.reward_benchmarks`).

Rows without scores (a judge's verdict that cannot be read) count as wrong and are counted, as are ties: scores in bf16
have three digits, and more of them are equal than in float32. Accuracies of subsets have 95 % intervals over rows; a
score whose subsets are not all there is null, never that of a part.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from espalier.data.jsonl import read_records
from espalier.data.ranked_responses import RankedResponses, ResponseScores
from espalier.data.records import BadInput
from espalier.pipeline.evaluation.evaluation_table import make_row, make_table
from espalier.pipeline.evaluation.intervals import Interval, interval
from espalier.pipeline.evaluation.reward_benchmarks import (
    REWARD_BENCH_COUNTS,
    TIES,
    best_of_credit,
    domain_score,
    is_right,
    section_scores,
    style_scores,
    style_table,
    ties_score,
)
from espalier.pipeline.stage import StageContext

log = logging.getLogger("stage")
BENCHMARKS = ("reward_bench", "reward_bench_2", "rm_bench", "pairs")


def by_subset(rows: Sequence[ResponseScores]) -> dict[str, list[ResponseScores]]:
    """Return the rows of each subset, in the order in which they come."""
    subsets: dict[str, list[ResponseScores]] = defaultdict(list)
    for row in rows:
        subsets[row.subset].append(row)
    return dict(subsets)


@dataclass(frozen=True)
class EvaluateRewardModel:
    """The input is the rows; `scores` those of a scorer; `benchmark`: reward_bench, reward_bench_2, rm_bench, pairs."""

    scores: str
    benchmark: str = "pairs"

    def __post_init__(self) -> None:
        if self.benchmark not in BENCHMARKS:
            raise BadInput(f"stage.benchmark must be one of {', '.join(BENCHMARKS)}, got '{self.benchmark}'")

    def inputs(self) -> list[str]:
        """Return the scores."""
        return [self.scores]

    def run(self, input_path: str, context: StageContext) -> dict[str, Any]:
        """Return `{"score", "sections", "subsets", "num_rows", "num_ties", "num_without_scores", "table"}`. Raises
        BadInput where a row lacks its scores, or has those of other responses."""
        rows = self._join(read_records(RankedResponses, input_path))
        subsets = by_subset(rows)
        value = best_of_credit if self.benchmark == "reward_bench_2" else is_right
        accuracies = {name: interval([value(row) for row in mine]) for name, mine in subsets.items()
                      if (self.benchmark, name) != ("reward_bench_2", TIES)}  # fmt: skip
        score, sections = self._score(rows, subsets, accuracies)
        table = make_table([make_row(name or "all", figure) for name, figure in accuracies.items()])
        missing = sum(not row.chosen for row in rows)
        ties = sum(bool(row.chosen) and min(row.chosen) == max(row.rejected) for row in rows)
        context.counts.update({"score": score, "ties": ties, "without_scores": missing})
        if missing:
            log.warning("%s: %d of %d rows have no scores and count as wrong", self.scores, missing, len(rows))
        if score is None:
            log.warning("%s: no overall score: not all subsets of %s are there", input_path, self.benchmark)
        log.info("%s\n%s", context.output, table["plain"])
        return {"benchmark": self.benchmark, "score": score, "sections": sections, "subsets": accuracies,
                "num_rows": len(rows), "num_ties": ties, "num_without_scores": missing, "table": table}  # fmt: skip

    def _join(self, ranked: Sequence[RankedResponses]) -> list[ResponseScores]:
        """Return the scores of the rows in their order."""
        known = read_records(ResponseScores, self.scores)
        repeated = [name for name, count in Counter(row.id for row in known).items() if count > 1]
        if repeated:
            raise BadInput(f"{self.scores}: two rows have the id '{repeated[0]}': score these rows again")
        scores = {row.id: row for row in known}
        for row in ranked:
            found = scores.get(row.id)
            sizes = (len(row.chosen), len(row.rejected))
            if (
                found is None
                or found.subset != row.subset
                or (len(found.chosen), len(found.rejected)) not in (sizes, (0, 0))
            ):
                raise BadInput(
                    f"{self.scores}: no scores of the {sum(sizes)} responses of row '{row.id}': score these rows"
                )
        return [scores[row.id] for row in ranked]

    def _score(
        self, rows: Sequence[ResponseScores], subsets: dict[str, list[ResponseScores]], accuracies: dict[str, Interval]
    ) -> tuple[float | None, dict[str, Any]]:
        """Return (the overall score, the benchmark's parts of it)."""
        means = {name: figure["mean"] for name, figure in accuracies.items()}
        if self.benchmark == "reward_bench":
            _note_sizes(subsets)
            exact = {name: sum(map(is_right, mine)) / len(mine) for name, mine in subsets.items()}
            sections = section_scores(exact)
            return sections.pop("overall"), sections
        if self.benchmark == "reward_bench_2":
            parts = means | ({TIES: ties_score(subsets[TIES])} if TIES in subsets else {})
            is_whole = TIES in subsets and len(parts) == 6
            return (sum(parts.values()) / 6 if is_whole else None), parts
        if self.benchmark == "rm_bench":
            styles = {name: style_scores(style_table(mine)) for name, mine in subsets.items()}
            return domain_score({name: figures["score"] for name, figures in styles.items()}), styles
        return sum(map(is_right, rows)) / len(rows), {}


def _note_sizes(subsets: dict[str, list[ResponseScores]]) -> None:
    """Warn of subsets of another size than the published ones: their score is not that of the benchmark."""
    published = {**REWARD_BENCH_COUNTS, "math-prm": 447}
    for name, rows in subsets.items():
        if published.get(name, len(rows)) != len(rows):
            log.warning("the subset %s has %d rows, the published one %d: no score of the benchmark", name, len(rows),
                        published[name])  # fmt: skip
