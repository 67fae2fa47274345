"""StepValues and a judge's StepJudgement → StepValues with the labels that both agree on (`values.consensus`)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from espalier.data.examples.label_balance import LabelCounts, judge_balance
from espalier.data.judgements import StepJudgement
from espalier.data.records import BadInput, StepValues
from espalier.data.row_index import ProblemRows, hash_of
from espalier.pipeline.stage import StageContext
from espalier.values.consensus import ConsensusRule, judged_shares

_VALUES, _JUDGEMENTS = range(2)  # files of the index


def votes_about(rows: ProblemRows, number: int, trajectory_id: str) -> list[StepJudgement]:
    """Return the judgements of a trajectory in that file of the index, in file order."""
    return [row for row in rows.rows(number, hash_of(trajectory_id)) if row.trajectory_id == trajectory_id]


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

    def run(self, input_path: str, context: StageContext) -> Iterator[StepValues]:
        """Return one record a trajectory. Raises BadInput where no trajectory was judged, or with other steps, and
        where the threshold calls all inner states good, or none, against the labels' own mean."""
        rule = ConsensusRule(self.policy, self.threshold, self.has_unjudged)
        with ProblemRows(context.output) as rows:
            num_rows = rows.add(StepValues, input_path, group="id")
            rows.add(StepJudgement, self.judgements, group="trajectory_id")
            judged = self._check(rule, rows, input_path, num_rows)
            num_before = num_after = num_compared = num_agreed = 0
            for row in rows.in_order(_VALUES):
                shares = judged_shares(votes_about(rows, _JUDGEMENTS, row.id), len(row.steps))
                labels, weights = rule.apply(row.labels, row.weights, shares)
                agreements = [agrees for agrees in rule.agreements(row.labels, shares) if agrees is not None]
                num_compared, num_agreed = num_compared + len(agreements), num_agreed + sum(agreements)
                num_before += sum(label is not None for label in row.labels)
                num_after += sum(label is not None for label in labels)
                yield replace(row, labels=labels, weights=weights)
        context.counts.update(
            trajectories=num_rows,
            judged=judged,
            labels_before=num_before,
            labels_after=num_after,
            compared=num_compared,
            agreement=round(num_agreed / max(num_compared, 1), 5),
        )

    def _check(self, rule: ConsensusRule, rows: ProblemRows, path: str, num_rows: int) -> int:
        """Return how many trajectories are judged. Raises BadInput."""
        calls, judged = LabelCounts(), 0
        for row in rows.in_order(_VALUES):
            inner = row.labels[:-1]
            calls.add(rule.calls(inner), inner)
            judged += bool(votes_about(rows, _JUDGEMENTS, row.id))
        judge_balance(calls.balance, f"{path} with stage.threshold={self.threshold:g}",
                      "there would be nothing for a judge to agree with: take another stage.threshold (labels of "
                      "smoothed values are never 0: 0.5)")  # fmt: skip
        if not judged:
            raise BadInput(f"{self.judgements}: none of the {num_rows} trajectories of {path} is judged there")
        return judged
