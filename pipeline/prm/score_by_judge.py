"""StepJudgement → StepScores, so that a judge is measured by the same stages as a trained model."""

from collections.abc import Iterable
from dataclasses import dataclass

from espalier.data.jsonl import read_records
from espalier.data.judgements import StepJudgement
from espalier.data.records import StepScores
from espalier.pipeline.stage import StageContext
from espalier.pipeline.values.consensus_labels import votes_by_trajectory
from espalier.values.consensus import judged_shares

UNKNOWN = 0.5


@dataclass(frozen=True)
class ScoreByJudge:
    """Input: judgements. The score of a step is the share of the votes by which no step up to it is wrong; UNKNOWN for
    all steps of a solution whose votes have no verdict."""

    def inputs(self) -> list[str]:
        """None beside the input."""
        return []

    def run(self, input_path: str, context: StageContext) -> Iterable[StepScores]:
        """Return one record a solution, in the order of their first vote."""
        votes = votes_by_trajectory(read_records(StepJudgement, input_path))
        records: list[StepScores] = []
        without = 0
        for solution_id, rows in votes.items():
            shares = judged_shares(rows, rows[0].num_steps)
            without += None in shares
            scores = [UNKNOWN if share is None else share for share in shares]
            records.append(StepScores(solution_id, rows[0].problem_id, scores, is_seen=False))
        context.counts.update(solutions=len(records), without_verdict=without)
        return records
