"""The reward of verifiers: what each row of the data names is checked, and the weighted scores add up
(docs/verifiers.md).

As with verifiable rewards (Lambert et al. 2024, "Tulu 3"): a verifier adds `scale` times its score times its weight.
The gold of a trajectory says what is checked, so nothing beside it can be shifted against it. A row that names a judge
is asked about beside what can be checked: the judge is another reward with scores from 0 to 1, which sees the row's
ground truth as the right answer.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from espalier.data.records import BadInput, Problem, Trajectory
from espalier.data.sources import BadRow
from espalier.data.verifiers.verify import Judged, Verdict, judged, verify
from espalier.rewards.score import ChecksProblems, HoldsEngines, Reward, Score


@dataclass(frozen=True)
class VerifierReward:
    """`scale` is what a full score of weight 1 is worth; `judge` scores the rows that name one. The parts are mean
    scores by the verifier's name, and the judge's own."""

    scale: float = 1.0
    judge: Reward | None = None

    def check_problems(self, problems: Sequence[Problem]) -> None:
        """Raise BadInput on a problem whose judge is not there, or cannot judge it."""
        asked = [(problem, self._judged(problem.gold, f"problem {problem.id}")) for problem in problems]
        named = [replace(problem, gold=one.reference) for problem, one in asked if one is not None]
        if named and self.judge is None:
            raise BadInput(f"{len(named)} of {len(problems)} problems name a judge ('{named[0].id}' is the first), and "
                           "the reward has none: choose reward=verifiers_and_judge")  # fmt: skip
        if isinstance(self.judge, ChecksProblems):
            self.judge.check_problems(named)

    def close(self) -> None:
        """End what the judge has started."""
        if isinstance(self.judge, HoldsEngines):
            self.judge.close()

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """From text and number of tokens, the end token included.

        Raises BadInput where a gold names no verifiers, or a judge that is not there.
        """
        scores = [self._score(trajectory) for trajectory in trajectories]
        named = [self._judged(row.gold, f"trajectory {row.id}") for row in trajectories]
        rows = [replace(row, gold=one.reference) for row, one in zip(trajectories, named, strict=True) if one]
        if not rows:
            return scores
        if self.judge is None:
            raise BadInput(f"reward=verifiers, trajectory {rows[0].id}: it names a judge: choose "
                           "reward=verifiers_and_judge")  # fmt: skip
        verdicts = iter(self.judge(rows))
        return [score if one is None else self._with(score, one.weight, next(verdicts))
                for score, one in zip(scores, named, strict=True)]  # fmt: skip

    def _with(self, score: Score, weight: float, verdict: Score) -> Score:
        return Score(score.outcome + self.scale * weight * verdict.outcome, parts={**verdict.parts, **score.parts})

    def _score(self, trajectory: Trajectory) -> Score:
        gold = trajectory.gold
        try:
            verdicts = verify(trajectory.response, gold if isinstance(gold, str) else "", len(trajectory.response_ids))
        except BadRow as error:
            raise BadInput(f"reward=verifiers, trajectory {trajectory.id}: {error}") from None
        outcome = self.scale * sum(verdict.weight * verdict.result.score for verdict in verdicts)
        return Score(outcome, parts=mean_scores(verdicts))

    @staticmethod
    def _judged(gold: object, of: str) -> Judged | None:
        try:
            return judged(gold if isinstance(gold, str) else "")
        except BadRow as error:
            raise BadInput(f"reward=verifiers, {of}: {error}") from None


def mean_scores(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Return the mean score of each verifier by its name."""
    scores: dict[str, list[float]] = defaultdict(list)
    for verdict in verdicts:
        scores[verdict.name].append(verdict.result.score)
    return {name: sum(values) / len(values) for name, values in scores.items()}
