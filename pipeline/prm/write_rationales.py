"""Trajectory → Verification by a task that knows the truth of every step: a teacher of rationales without a model.

For every question it goes through the steps, says of each whether the solution is right so far, and stops at the first
that is not; in the words of `verifier@stage.verifier=each_step` where a verdict per step is asked for. **The teacher is
imperfect on purpose**: with probability `mistake_rate` it says the opposite about a step.
Its verdict follows from what it said, so that some verdicts are not the truth, as with a model.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass

from espalier.data.judgements import Verification
from espalier.data.records import BadInput
from espalier.data.solutions_to_verify import Question, questions_about, read_solutions, with_task_truth
from espalier.data.step_verdicts import StepVerdictFormat
from espalier.data.verification import VerifierFormat, verdict_name
from espalier.pipeline.stage import StageContext


@dataclass(frozen=True)
class WriteRationales:
    """`split`: the one of the task that the trajectories answer; `mistake_rate` in [0, 1] per step."""

    verifier: VerifierFormat | StepVerdictFormat
    split: str = "train"
    mistake_rate: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.mistake_rate <= 1:
            raise BadInput(f"stage.mistake_rate must be in [0, 1], got {self.mistake_rate:g}")

    def inputs(self) -> list[str]:
        """None beside the input."""
        return []

    def run(self, input_path: str, context: StageContext) -> Iterable[Verification]:
        """Return one rationale of every question in order. Raises BadInput where the task does not know the truth of
        the steps."""
        solutions = with_task_truth(read_solutions(input_path, "trajectories"), context.task, self.split)
        asked = [one for one in questions_about(solutions, self.verifier) if one.num_steps]
        rows = [self._write(one) for one in asked]
        truths = [verdict_name(bool(one.solution.steps_right[one.num_steps - 1])) for one in asked]
        num_true = sum(row.answer == truth for row, truth in zip(rows, truths, strict=True))
        context.counts.update(questions=len(asked), agreeing_with_the_truth=num_true)
        return rows

    def _write(self, asked: Question) -> Verification:
        name = f"{asked.id}/0"
        rng = random.Random(f"{self.seed}/{name}")
        verdicts: list[bool] = []
        for _, is_right in zip(asked.steps, asked.solution.steps_right, strict=False):
            verdicts.append(bool(is_right) != (rng.random() < self.mistake_rate))
            if not verdicts[-1]:
                break
        is_yes = all(verdicts)
        if isinstance(self.verifier, StepVerdictFormat):
            text = self.verifier.answer(asked.steps, verdicts)
        else:
            said = zip(asked.steps, verdicts, strict=False)
            lines = [f"{step.strip()}: {'right' if is_right else 'wrong'}" for step, is_right in said]
            text = self.verifier.answer(is_yes, "\n".join(lines))
        return Verification(name, asked.id, asked.solution.problem_id, asked.digest, verdict_name(is_yes), text, "stop")
