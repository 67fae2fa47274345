"""The reward of verifiers: what each row of the data names is checked, and the weighted scores add up
(docs/verifiers.md).

As with verifiable rewards (Lambert et al. 2024, "Tulu 3"): a verifier adds `scale` times its score times its weight.
The gold of a trajectory says what is checked, so nothing beside it can be shifted against it. A row that names a judge
is asked about beside what can be checked, and the judge sees the row's ground truth as the right answer.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from espalier.data.answers.grade import Gold
from espalier.data.records import BadInput, Problem, Trajectory
from espalier.data.sources import BadRow
from espalier.data.verifiers.verify import JUDGE, Judged, Verdict, has_answer, judged, verify
from espalier.rewards.composed import ComposedReward
from espalier.rewards.score import VERIFIER, Reward, Score
from espalier.rewards.written_verdicts import WrittenVerdictReward

log = logging.getLogger(__name__)
_REMEDY = "choose reward=verifiers_and_judge, or leave the judge out of the rows"


@dataclass(frozen=True)
class VerifierReward:
    """`scale` is what a full score of weight 1 is worth; `judge` scores the rows that name one. The parts are mean
    scores by the verifier's name, and the judge's own: its mean is `verifier` where the row has an answer that the
    grader reads too, else `judge`, since a right form says nothing of it.

    Raises BadInput on a judge that is not asked elsewhere.
    """

    scale: float = 1.0
    judge: WrittenVerdictReward | None = None

    def __post_init__(self) -> None:
        if self.judge is not None and not isinstance(self.judge, WrittenVerdictReward):
            raise BadInput("the judge of verifiers is a rewards.written_verdicts.WrittenVerdictReward: give a reward "
                           "with networks of its own a term beside it (reward.terms)")  # fmt: skip

    def check_problems(self, problems: Sequence[Problem]) -> None:
        """Raise BadInput on a problem that names no verifiers, or whose judge cannot judge it."""
        asked = [(problem, _judged(problem.gold, f"problem {problem.id}")) for problem in problems]
        named = [replace(problem, gold=one.reference) for problem, one in asked if one]
        if self.judge is not None:
            self.judge.check_problems(named)
        elif named:
            raise BadInput(f"{len(named)} of {len(problems)} problems name a judge ('{named[0].id}' is the first), and "
                           f"verifiers ask none here: {_REMEDY}")  # fmt: skip

    @property
    def has_engines(self) -> bool:
        """Whether a judge is asked."""
        return self.judge is not None

    def close(self) -> None:
        """End what the judge has started."""
        if self.judge is not None:
            self.judge.close()

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """From text and number of tokens, the end token included.

        Raises BadInput where a gold names no verifiers, or a judge that is not there.
        """
        scores = [self._score(trajectory) for trajectory in trajectories]
        named = [_judged(row.gold, f"trajectory {row.id}") for row in trajectories]
        rows = [replace(row, gold=one.reference) for row, one in zip(trajectories, named, strict=True) if one]
        if not rows:
            return scores
        if self.judge is None:
            raise BadInput(f"trajectory {rows[0].id} names a judge, and verifiers ask none here: {_REMEDY}")
        verdicts = iter(self.judge(rows))
        return [score if one is None else self._with(score, one.weight, next(verdicts), str(row.gold))
                for row, score, one in zip(trajectories, scores, named, strict=True)]  # fmt: skip

    def _with(self, score: Score, weight: float, verdict: Score, gold: str) -> Score:
        parts = dict(verdict.parts)
        if VERIFIER in parts and not has_answer(gold):
            parts[JUDGE] = parts.pop(VERIFIER)
        return Score(score.outcome + self.scale * weight * verdict.outcome, parts={**parts, **score.parts})

    def _score(self, trajectory: Trajectory) -> Score:
        gold = trajectory.gold
        try:
            verdicts = verify(trajectory.response, gold if isinstance(gold, str) else "", len(trajectory.response_ids))
        except BadRow as error:
            raise BadInput(f"reward=verifiers, trajectory {trajectory.id}: {error}") from None
        outcome = self.scale * sum(verdict.weight * verdict.result.score for verdict in verdicts)
        return Score(outcome, parts=mean_scores(verdicts))


def _judged(gold: Gold, of: str) -> Judged | None:
    try:
        return judged(gold if isinstance(gold, str) else "")
    except BadRow as error:
        raise BadInput(f"reward=verifiers, {of}: {error}") from None


def check_judges(problems: Sequence[Problem], reward: Reward) -> None:
    """Hold problems with verifiers against a run's reward: raise BadInput where some name a judge and nothing asks one,
    and warn where a judge of verifiers is there and none names it."""
    terms = list(_terms(reward))
    has_judge = any(isinstance(term, VerifierReward) and term.judge is not None for term in terms)
    asks_all = any(isinstance(term, WrittenVerdictReward) for term in terms)
    named = [problem.id for problem in problems if _judged(problem.gold, f"problem {problem.id}") is not None]
    if named and not has_judge and not asks_all:
        raise BadInput(f"{len(named)} of {len(problems)} problems name a judge ('{named[0]}' is the first), and the "
                       f"reward asks none: {_REMEDY}")  # fmt: skip
    if has_judge and not named:
        log.warning("the reward has a judge for verifiers, and none of %d problems names one: it is never asked",
                    len(problems))  # fmt: skip


def _terms(reward: Reward) -> Iterator[Reward]:
    yield reward
    for term in reward.terms.values() if isinstance(reward, ComposedReward) else ():
        yield from _terms(term)


def mean_scores(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Return the mean score of each verifier by its name."""
    scores: dict[str, list[float]] = defaultdict(list)
    for verdict in verdicts:
        scores[verdict.name].append(verdict.result.score)
    return {name: sum(values) / len(values) for name, values in scores.items()}
