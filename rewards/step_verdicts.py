"""Step rewards by a verifier that writes a verdict for each step (`data.step_verdicts`), in engines of its own or on a
server: what `rewards.process` makes of a head's scores, made of those that `prm/score_by_step_verdicts` has of the same
rationales.

**A solution of which no rationale can be read is missing**: each of its steps gets the mean score that the other
solutions of its problem have at the same share of their way, or 1/2 where none has any. Its rewards of the form
"progress" so add up to the mean of theirs, however many steps it has.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from espalier.data.asked_texts import Asks
from espalier.data.records import BadInput, Trajectory
from espalier.data.step_verdicts import EACH_STEP
from espalier.rewards.process import check_form, step_reward_range, step_rewards
from espalier.rewards.score import Score, ScoreRange
from espalier.rewards.verifier_rationales import VerifierRationales
from espalier.rewards.written_verdicts import Votes, WrittenVerdictReward, mean_or_unknown, verdict_parts


def filled_in_steps(
    rows: Sequence[list[float]], nums_steps: Sequence[int], problem_ids: Sequence[str]
) -> list[list[float]]:
    """Return the step scores of every solution, of one that has none (and `nums_steps` of it) as the module says."""
    known: dict[str, list[list[float]]] = defaultdict(list)
    for row, name in zip(rows, problem_ids, strict=True):
        if row:
            known[name].append(row)

    def at(name: str, number: int, num_steps: int) -> float:
        """Of step `number` of `num_steps`, from 1 on; the last one is the last of all."""
        return mean_or_unknown([row[-(-number * len(row) // num_steps) - 1] for row in known[name]])

    return [
        row or [at(name, number, num_steps) for number in range(1, num_steps + 1)]
        for row, num_steps, name in zip(rows, nums_steps, problem_ids, strict=True)
    ]


class StepVerdictReward(WrittenVerdictReward):
    """Args: `verdicts`, a verifier that is asked for a verdict per step; who is asked (`asking`); `form`, `offset` and
    `temperature` as of `rewards.process.step_rewards`. The outcome is 0.

    Parts of a score: those of `WrittenVerdictReward`; a rationale's verdict is the lowest of its steps.

    Raises BadInput on another form, a temperature not above 0, and a verifier that gives one verdict in all.
    """

    def __init__(
        self,
        verdicts: VerifierRationales,
        asking: Asks,
        form: str = "progress",
        offset: float = 0.5,
        temperature: float = 0.1,
    ):
        check_form(form, temperature)
        if verdicts.verifier.unit != EACH_STEP:
            raise BadInput("step rewards are of a verdict for each step: choose verifier=each_step for the reward's "
                           "verdicts, or reward=verifier_rationales")  # fmt: skip
        super().__init__(verdicts, asking)
        self.step_form, self.offset, self.temperature = form, offset, temperature

    @classmethod
    def score_range(cls, settings: Mapping[str, Any]) -> ScoreRange:
        """No outcome; with the form "score" there is no bound, because there is none to the number of steps."""
        return ScoreRange(to_come=step_reward_range(settings["form"], settings["offset"], limit=0.0))

    def _scores(self, trajectories: Sequence[Trajectory], votes: Sequence[Votes]) -> list[Score]:
        rows = filled_in_steps(
            [one.steps for one in votes],
            [len(row.steps) for row in trajectories],
            [row.problem_id for row in trajectories],
        )
        return [
            Score(0.0, step_rewards(row, self.step_form, self.offset, self.temperature), verdict_parts(one))
            for row, one in zip(rows, votes, strict=True)
        ]
