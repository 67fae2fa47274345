"""Consensus of Monte-Carlo labels with a judge: what both say is kept, or weighted by how far they agree.

Monte-Carlo labels miss errors that the policy corrects later and call right what reached the answer by luck; a judge
misses others. Keeping what both agree on is the consensus filter of Zhang et al. 2025 (The Lessons of Developing
Process Reward Models, arXiv 2501.07301), which keeps a solution where both put the first error at the same step.

Both speak of states here: a label above `threshold` calls the state after a step good, and a judge calls a state good
that no wrong step has led to. The threshold 0 is for labels that can be 0: shares of samples, or hard ones. Soft labels
of smoothed values never are, and with 0 all of them would be called good.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from espalier.data.judgements import StepJudgement
from espalier.data.records import BadInput

POLICIES = ("drop", "weight", "solution")


def judged_shares(judgements: Sequence[StepJudgement], num_steps: int) -> list[float | None]:
    """For each of S states the share of the votes with a verdict that call it good; None without such a vote.

    Raises BadInput where a judgement is of another number of steps.
    """
    for row in judgements:
        if row.num_steps != num_steps or len(row.labels) not in (0, num_steps):
            raise BadInput(f"judgement '{row.id}' is of {row.num_steps} steps, the trajectory has {num_steps}: judge "
                           "the same file that was labelled")  # fmt: skip
    votes = [row.states for row in judgements if row.labels]
    if not votes:
        return [None] * num_steps
    return [sum(states) / len(votes) for states in zip(*votes, strict=True)]


def _is_good(share: float | None) -> bool | None:
    """Return the majority's verdict; None without one."""
    return None if share is None or share == 0.5 else share > 0.5


@dataclass(frozen=True)
class ConsensusRule:
    """What becomes of labels that a judge looked at as well; `has_unjudged` keeps those without a judge's verdict.

    - "drop": a label stays where the majority of the judge's votes agrees with it;
    - "weight": its weight is multiplied by the share of the votes that agree with it;
    - "solution": all labels of a solution stay where both see the same first error, or none; else none stays.

    Raises BadInput on an unknown policy or a threshold outside [0, 1).
    """

    policy: str = "drop"
    threshold: float = 0.0
    has_unjudged: bool = False

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise BadInput(f"there is no consensus policy '{self.policy}': choose from {', '.join(POLICIES)}")
        if not 0 <= self.threshold < 1:
            raise BadInput(f"threshold must be from 0 to below 1, got {self.threshold}")

    def calls(self, labels: Sequence[float | None]) -> list[float | None]:
        """Return what the labels call their states: 1 good, 0 not good; None where there is no label."""
        return [None if label is None else float(label > self.threshold) for label in labels]

    def agreements(self, labels: Sequence[float | None], shares: Sequence[float | None]) -> list[bool | None]:
        """For each state whether label and judge agree; None where one of them says nothing."""
        agreements: list[bool | None] = []
        for label, share in zip(labels, shares, strict=True):
            verdict = _is_good(share)
            agreements.append(None if label is None or verdict is None else (label > self.threshold) == verdict)
        return agreements

    def apply(
        self, labels: Sequence[float | None], weights: Sequence[float], shares: Sequence[float | None]
    ) -> tuple[list[float | None], list[float]]:
        """Return (labels, weights) [S] after the consensus; a label that goes is None with the weight 0."""
        factors = [
            0.0 if label is None else self._factor(label, share) for label, share in zip(labels, shares, strict=True)
        ]
        if self.policy == "solution" and not all(share is None for share in shares):
            factors = [float(self._is_same_first_error(labels, shares))] * len(labels)
        kept = [label if factor > 0 else None for label, factor in zip(labels, factors, strict=True)]
        return kept, [
            0.0 if label is None else weight * factor
            for label, weight, factor in zip(kept, weights, factors, strict=True)
        ]

    def _factor(self, label: float, share: float | None) -> float:
        if share is None:
            return float(self.has_unjudged)
        is_right = label > self.threshold
        if self.policy == "weight":
            return share if is_right else 1.0 - share
        verdict = _is_good(share)
        return float(self.has_unjudged) if verdict is None else float(verdict == is_right)

    def _is_same_first_error(self, labels: Sequence[float | None], shares: Sequence[float | None]) -> bool:
        ours = next((i for i, label in enumerate(labels) if label is not None and label <= self.threshold), None)
        theirs = next((i for i, share in enumerate(shares) if share is not None and share < 0.5), None)
        return ours == theirs
