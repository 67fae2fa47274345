"""ResponseScores → the score of a reward-model benchmark (formulas: `pipeline.evaluation.reward_benchmarks`).

Rows without scores (a judge's verdict that cannot be read) count as wrong and are counted, as are ties: scores in bf16
have three digits, and more of them are equal than in float32. Accuracies of subsets have 95 % intervals over rows; a
score whose subsets are not all there is null, never that of a part. The accuracy over all rows has its interval over
prompts, as those of step scorers have (`prm/evaluate_prm_benchmarks`).

Rows are read one by one and their scores looked up (`data.row_index`); three numbers per row are kept, which intervals
are drawn from.
"""

import logging
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from espalier.data.ranked_responses import RankedResponses, ResponseScores
from espalier.data.records import BadInput
from espalier.data.row_index import ProblemRows, hash_of
from espalier.pipeline.evaluation.evaluation_table import make_row, make_table
from espalier.pipeline.evaluation.intervals import Interval, interval, mean_over_problems
from espalier.pipeline.evaluation.reward_benchmarks import (
    REWARD_BENCH_COUNTS,
    TIES,
    TiedPrompts,
    best_of_credit,
    domain_score,
    is_right,
    section_scores,
    style_cells,
    style_scores,
)
from espalier.pipeline.stage import StageContext

log = logging.getLogger("stage")
BENCHMARKS = ("reward_bench", "reward_bench_2", "rm_bench", "pairs")
_ROWS, _SCORES = range(2)  # files of the index


@dataclass
class _Taken:
    """What is kept of rows: of each its worth, and sums."""

    benchmark: str
    tied: TiedPrompts
    worths: dict[str, "array[float]"] = field(default_factory=lambda: defaultdict(lambda: array("d")))
    """by subset, in the order in which they come"""
    prompts: "array[int]" = field(default_factory=lambda: array("q"))
    """the hash of each row's prompt"""
    is_right: "array[int]" = field(default_factory=lambda: array("b"))
    """of each row"""
    right: Counter[str] = field(default_factory=Counter)
    """by subset, how many rows are right"""
    styles: dict[str, np.ndarray] = field(default_factory=lambda: defaultdict(lambda: np.zeros((3, 3))))
    """by subset, the sums of `style_cells`"""
    num_ties: int = 0
    num_without: int = 0

    def add(self, prompt: str, row: ResponseScores) -> None:
        """Take in the scores of a row."""
        self.prompts.append(hash_of(prompt))
        self.is_right.append(int(is_right(row)))
        is_best_of = self.benchmark == "reward_bench_2"
        self.worths[row.subset].append(best_of_credit(row) if is_best_of else is_right(row))
        self.right[row.subset] += int(is_right(row))
        self.num_without += not row.chosen
        self.num_ties += bool(row.chosen) and min(row.chosen) == max(row.rejected)
        if is_best_of and row.subset == TIES:
            self.tied.add(row)
        if self.benchmark == "rm_bench":
            self.styles[row.subset] += style_cells(row)

    @property
    def num_rows(self) -> int:
        """How many there were."""
        return sum(map(len, self.worths.values()))

    def accuracies(self) -> dict[str, Interval]:
        """Return the mean worth of every subset, but for one that is no mean."""
        return {name: interval(np.asarray(mine)) for name, mine in self.worths.items()
                if (self.benchmark, name) != ("reward_bench_2", TIES)}  # fmt: skip

    def score(self, accuracies: Mapping[str, Interval]) -> tuple[float | None, dict[str, Any]]:
        """Return (the overall score, the benchmark's parts of it)."""
        if self.benchmark == "reward_bench":
            self._note_sizes()
            sections = section_scores({name: self.right[name] / len(mine) for name, mine in self.worths.items()})
            return sections.pop("overall"), dict(sections)
        if self.benchmark == "reward_bench_2":
            means = {name: figure["mean"] for name, figure in accuracies.items()}
            parts = means | ({TIES: self.tied.score()} if TIES in self.worths else {})
            is_whole = TIES in self.worths and len(parts) == 6
            return (sum(parts.values()) / 6 if is_whole else None), parts
        if self.benchmark == "rm_bench":
            styles = {name: style_scores(cells / len(self.worths[name])) for name, cells in self.styles.items()}
            return domain_score({name: figures["score"] for name, figures in styles.items()}), dict(styles)
        return self.right.total() / self.num_rows, {}

    def _note_sizes(self) -> None:
        """Warn of subsets of another size than the published ones: their score is not that of the benchmark."""
        published = {**REWARD_BENCH_COUNTS, "math-prm": 447}
        for name, mine in self.worths.items():
            if published.get(name, len(mine)) != len(mine):
                log.warning("the subset %s has %d rows, the published one %d: no score of the benchmark", name,
                            len(mine), published[name])  # fmt: skip


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
        """Return `{"score", "accuracy", "sections", "subsets", "num_rows", "num_ties", "num_without_scores", "table"}`.
        Raises BadInput where a row lacks its scores, or has those of other responses."""
        with ExitStack() as stack:
            taken = _Taken(self.benchmark, stack.enter_context(TiedPrompts(context.output)))
            for prompt, row in self._joined(input_path, context.output):
                taken.add(prompt, row)
            if not taken.num_rows:
                raise BadInput(f"{input_path}: no row to evaluate: import the responses first")
            accuracies = taken.accuracies()
            score, sections = taken.score(accuracies)
        table = make_table([make_row(name or "all", figure) for name, figure in accuracies.items()])
        missing = taken.num_without
        context.counts.update({"score": score, "ties": taken.num_ties, "without_scores": missing})
        if missing:
            log.warning("%s: %d of %d rows have no scores and count as wrong", self.scores, missing, taken.num_rows)
        if score is None:
            log.warning("%s: no overall score: not all subsets of %s are there", input_path, self.benchmark)
        log.info("%s\n%s", context.output, table["plain"])
        accuracy = mean_over_problems(np.asarray(taken.prompts), np.asarray(taken.is_right))
        return {"benchmark": self.benchmark, "score": score, "accuracy": accuracy, "sections": sections,
                "subsets": accuracies, "num_rows": taken.num_rows, "num_ties": taken.num_ties,
                "num_without_scores": missing, "table": table}  # fmt: skip

    def _joined(self, path: str, output: Path) -> Iterator[tuple[str, ResponseScores]]:
        """Yield prompts and scores of the rows in their order."""
        with ProblemRows(output) as rows:
            rows.add(RankedResponses, path, group="id")
            rows.add(ResponseScores, self.scores, finds_ids=True, group="id")
            ranked: RankedResponses
            for ranked in rows.in_order(_ROWS):
                found: ResponseScores | None = rows.by_id(_SCORES, ranked.id)
                sizes = (len(ranked.chosen), len(ranked.rejected))
                if (
                    found is None
                    or found.subset != ranked.subset
                    or (len(found.chosen), len(found.rejected)) not in (sizes, (0, 0))
                ):
                    raise BadInput(
                        f"{self.scores}: no scores of the {sum(sizes)} responses of row '{ranked.id}': score these rows"
                    )
                yield ranked.prompt, found
