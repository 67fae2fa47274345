"""StepJudgement → StepScores, so that a judge is measured by the same stages as a trained model."""

from collections.abc import Iterator
from dataclasses import dataclass

from espalier.data.judgements import StepJudgement
from espalier.data.records import StepScores
from espalier.data.row_index import ProblemRows
from espalier.pipeline.stage import StageContext
from espalier.values.consensus import judged_shares

UNKNOWN = 0.5


@dataclass(frozen=True)
class ScoreByJudge:
    """Input: judgements. The score of a step is the share of the votes by which no step up to it is wrong; UNKNOWN for
    all steps of a solution whose votes have no verdict."""

    def inputs(self) -> list[str]:
        """None beside the input."""
        return []

    def run(self, input_path: str, context: StageContext) -> Iterator[StepScores]:
        """Return one record a solution, in the order of their first vote."""
        num_solutions = without = 0
        with ProblemRows(context.output) as index:
            index.add(StepJudgement, input_path, group="trajectory_id")
            for solution in index.problems():
                rows = index.rows(0, solution)
                shares = judged_shares(rows, rows[0].num_steps)
                num_solutions, without = num_solutions + 1, without + (None in shares)
                scores = [UNKNOWN if share is None else share for share in shares]
                yield StepScores(rows[0].trajectory_id, rows[0].problem_id, scores, is_seen=False)
        context.counts.update(solutions=num_solutions, without_verdict=without)
