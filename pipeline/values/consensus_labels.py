"""StepValues and a judge's StepJudgement → StepValues with the labels that both agree on (`values.consensus`)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from espalier.data.examples.label_balance import check_balance, inner_steps
from espalier.data.jsonl import read_records
from espalier.data.judgements import StepJudgement
from espalier.data.records import BadInput, StepValues
from espalier.pipeline.stage import StageContext
from espalier.values.consensus import ConsensusRule, judged_shares


def votes_by_trajectory(rows: Sequence[StepJudgement]) -> dict[str, list[StepJudgement]]:
    """Trajectory → its judgements, in file order."""
    votes: dict[str, list[StepJudgement]] = {}
    for row in rows:
        votes.setdefault(row.trajectory_id, []).append(row)
    return votes


@dataclass(frozen=True)
class ConsensusLabels:
    """Input: step values; `judgements` of the same trajectories. `policy`, `threshold`, `has_unjudged` are those of
    `values.consensus.ConsensusRule`."""

    judgements: str
    policy: str = "drop"
    threshold: float = 0.0
    has_unjudged: bool = False

    def inputs(self) -> list[str]:
        """Return the judgements."""
        return [self.judgements]

    def run(self, input_path: str, context: StageContext) -> Iterable[StepValues]:
        """Return one record a trajectory. Raises BadInput where no trajectory was judged, or with other steps, and
        where the threshold calls all inner states good, or none, against the labels' own mean."""
        rule = ConsensusRule(self.policy, self.threshold, self.has_unjudged)
        rows = read_records(StepValues, input_path)
        votes = votes_by_trajectory(read_records(StepJudgement, self.judgements))
        inner_labels, _ = inner_steps(rows)
        check_balance(rule.calls(inner_labels), inner_labels, f"{input_path} with stage.threshold={self.threshold:g}",
                      "there would be nothing for a judge to agree with: take another stage.threshold (labels of "
                      "smoothed values are never 0: 0.5)")  # fmt: skip
        judged = sum(row.id in votes for row in rows)
        if not judged:
            raise BadInput(f"{self.judgements}: none of the {len(rows)} trajectories of {input_path} is judged there")
        records: list[StepValues] = []
        agreements: list[bool | None] = []
        for row in rows:
            shares = judged_shares(votes.get(row.id, []), len(row.steps))
            labels, weights = rule.apply(row.labels, row.weights, shares)
            agreements += rule.agreements(row.labels, shares)
            records.append(replace(row, labels=labels, weights=weights))
        compared = [agrees for agrees in agreements if agrees is not None]
        context.counts.update(
            trajectories=len(rows),
            judged=judged,
            labels_before=sum(label is not None for row in rows for label in row.labels),
            labels_after=sum(label is not None for row in records for label in row.labels),
            compared=len(compared),
            agreement=round(sum(compared) / max(len(compared), 1), 5),
        )
        return records
