"""The reward of verifiers: what each row of the data names is checked, and the weighted scores add up
(docs/verifiers.md).

As with verifiable rewards (Lambert et al. 2024, "Tulu 3"): a verifier adds `scale` times its score times its weight.
The gold of a trajectory says what is checked, so nothing beside it can be shifted against it.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from espalier.data.records import BadInput, Trajectory
from espalier.data.sources import BadRow
from espalier.data.verifiers.verify import Verdict, verify
from espalier.rewards.score import Score


@dataclass(frozen=True)
class VerifierReward:
    """`scale` is what a full score of weight 1 is worth. The parts are mean scores by the verifier's name."""

    scale: float = 1.0

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """From text and number of tokens, the end token included.

        Raises BadInput where a gold names no verifiers.
        """
        return [self._score(trajectory) for trajectory in trajectories]

    def _score(self, trajectory: Trajectory) -> Score:
        gold = trajectory.gold
        try:
            verdicts = verify(trajectory.response, gold if isinstance(gold, str) else "", len(trajectory.response_ids))
        except BadRow as error:
            raise BadInput(f"reward=verifiers, trajectory {trajectory.id}: {error}") from None
        outcome = self.scale * sum(verdict.weight * verdict.result.score for verdict in verdicts)
        return Score(outcome, parts=mean_scores(verdicts))


def mean_scores(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Return the mean score of each verifier by its name."""
    scores: dict[str, list[float]] = defaultdict(list)
    for verdict in verdicts:
        scores[verdict.name].append(verdict.result.score)
    return {name: sum(values) / len(values) for name, values in scores.items()}
