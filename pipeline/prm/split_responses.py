"""RankedResponses → AnnotatedSolution: both responses of every pair, cut into steps, for scorers that read steps.

    python run_stage.py -cn evaluation/import_comparisons input=pairs.jsonl output=rows.jsonl stage.layout=pairs
    python run_stage.py -cn prm/split_responses input=rows.jsonl output=solutions.jsonl
    python run_stage.py -cn prm/score_steps input=solutions.jsonl output=scores.jsonl stage.model=MODEL
    python run_stage.py -cn prm/evaluate_prm_benchmarks input=solutions.jsonl output=pairs.json \\
        stage.scores=scores.jsonl

Nobody judged the steps: what an evaluation of their scores says is pair accuracy, by every aggregation, overall and by
subset. Pairs of one prompt are of one problem.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from espalier.data.jsonl import iter_rows
from espalier.data.process_data.published import problem_key
from espalier.data.ranked_responses import RankedResponses
from espalier.data.records import AnnotatedSolution, BadInput, parse_record
from espalier.data.splitters import splitter
from espalier.pipeline.stage import StageContext


@dataclass(frozen=True)
class SplitResponses:
    """`by`: a splitter of `data.splitters`."""

    by: str = "lines"

    def __post_init__(self) -> None:
        splitter(self.by)

    def inputs(self) -> list[str]:
        """Nothing beside the input."""
        return []

    def run(self, input_path: str, context: StageContext) -> Iterator[AnnotatedSolution]:
        """Return two solutions per row, the chosen one first. Raises BadInput on a row with more responses."""
        context.counts["steps"] = 0
        for place, fields in iter_rows(input_path):
            row = parse_record(RankedResponses, fields, place)
            if len(row.chosen) + len(row.rejected) > 2:
                raise BadInput(f"{place}: '{row.id}' has {len(row.chosen)} chosen and {len(row.rejected)} rejected "
                               "responses: pairs have one of each")  # fmt: skip
            for side, text in (("chosen", row.chosen[0]), ("rejected", row.rejected[0])):
                steps = [step.strip() for step in splitter(self.by)(text)]
                steps = [step for step in steps if step]
                context.counts["steps"] += len(steps)
                info = {"pair": row.id, "is_chosen": side == "chosen", "group": row.subset}
                yield AnnotatedSolution(f"{row.id}/{side}", problem_key(row.prompt), row.prompt, steps,
                                        [None] * len(steps), None, None, info=info)  # fmt: skip
