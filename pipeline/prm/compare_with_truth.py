"""Step scores beside the truth, on tasks that know it: does a score say whether the solution is right so far?

    python run_stage.py -cn prm/compare_with_truth task=long_arithmetic input=trajectories.jsonl output=truth.json \\
      stage.scores=step_scores.jsonl

Truth is `position(...).is_right` (`data.tasks.enumerable`): whoever goes on without an error from here succeeds. Inner
steps only, every distinct (problem, prefix) once; a step outside the grammar is wrong. Beside the AUC over all inner
steps stand the AUC within each step index and that of a score that knows nothing but the index (the share of right
prefixes there). Intervals are 95 %, bootstrapped over problems.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from espalier.data.jsonl import read_records
from espalier.data.records import BadInput, Problem, StepScores, Trajectory
from espalier.data.tasks.enumerable import positions
from espalier.pipeline.evaluation.intervals import resampled
from espalier.pipeline.prm.prm_calibration import auc, index_shares
from espalier.pipeline.prm.seen_problems import note_seen
from espalier.pipeline.stage import StageContext


@dataclass(frozen=True)
class JudgedStep:
    """An inner step: its problem, its number from 1, its score and whether the solution is right so far."""

    problem_id: str
    step: int
    score: float
    is_right: bool


@dataclass(frozen=True)
class CompareWithTruth:
    """Problems that the reward model was trained on take no part and are counted; those of which the scores do not say
    it take part, counted and warned of. `split` is the one that the trajectories answer."""

    scores: str
    """the step scores of the trajectories"""
    split: str = "dev"
    """the task's split that holds their problems"""

    def inputs(self) -> list[str]:
        """Return the step scores."""
        return [self.scores]

    def run(self, input_path: str, context: StageContext) -> dict[str, Any]:
        """Return `{"inner_auc", "index_auc", "right_share", "steps", "num_steps", "num_problems"}`.

        Raises BadInput where the task does not know the truth, scores or problems are missing, or all are seen.
        """
        if not hasattr(context.task, "position"):
            raise BadInput("only an enumerable task knows which steps are right: set task=word_arithmetic, "
                           "long_arithmetic or rule_logic")  # fmt: skip
        found = measures(self.judged_steps(input_path, context))
        context.counts.update(steps=found["num_steps"], right_share=round(found["right_share"], 4))
        context.counts.update({name: found[name] and found[name]["mean"] for name in ("inner_auc", "index_auc")})
        return found

    def judged_steps(self, input_path: str, context: StageContext) -> list[JudgedStep]:
        """Return every distinct inner step, in the order of the trajectories. Raises BadInput as `run`, where the task
        knows the truth."""
        scores = {row.id: row for row in read_records(StepScores, self.scores)}
        problems = {problem.id: problem for problem in context.task.problems(self.split)}
        rows = read_records(Trajectory, input_path)
        note_seen({row.problem_id for row in rows}, self.scores, context, "take no part")
        steps = self._judge(rows, scores, problems, context)
        if not steps:
            raise BadInput(f"{input_path}: no inner step of a problem that the reward model has not seen")
        return steps

    def _judge(
        self,
        rows: Sequence[Trajectory],
        scores: dict[str, StepScores],
        problems: dict[str, Problem],
        context: StageContext,
    ) -> list[JudgedStep]:
        found: dict[tuple[str, tuple[int, ...]], JudgedStep] = {}
        for row in rows:
            scored, problem = scores.get(row.id), problems.get(row.problem_id)
            if scored is None or len(scored.scores) != len(row.steps):
                raise BadInput(f"{self.scores}: no scores for the steps of '{row.id}': score these trajectories")
            if problem is None:
                raise BadInput(f"trajectory '{row.id}': the task's split {self.split} has no problem "
                               f"'{row.problem_id}': set stage.split and task as they were sampled")  # fmt: skip
            if problem.question not in row.prompt or problem.gold != row.gold:
                raise BadInput(f"trajectory '{row.id}' answers another problem than the task's '{row.problem_id}': set "
                               "task and task.* as they were sampled")  # fmt: skip
            if scored.is_seen:
                continue
            places = positions(context.task, problem, row.steps, row.id)
            for number, (end, score) in enumerate(zip(row.step_ends[:-1], scored.scores, strict=False), 1):
                place = places[number - 1]
                is_right = place is not None and place.is_right
                key = row.problem_id, tuple(row.response_ids[:end])
                found.setdefault(key, JudgedStep(row.problem_id, number, score, is_right))
        return list(found.values())


def measures(steps: Sequence[JudgedStep]) -> dict[str, Any]:
    """Return the document of `CompareWithTruth` on distinct inner steps."""
    by_index: dict[int, list[JudgedStep]] = defaultdict(list)
    for step in steps:
        by_index[step.step].append(step)
    shares = index_shares([step.step for step in steps], [step.is_right for step in steps])
    truth = [step.is_right for step in steps]

    def interval(scores: Sequence[float]) -> Any:
        return resampled([step.problem_id for step in steps], lambda weights: auc(scores, truth, weights))

    inner, index = interval([step.score for step in steps]), interval([shares[step.step] for step in steps])
    return {
        "inner_auc": inner,
        "index_auc": index,
        "right_share": float(np.mean(truth)),
        "steps": [
            {
                "step": number,
                "auc": auc([step.score for step in rows], [step.is_right for step in rows]),
                "right_share": shares[number],
                "num": len(rows),
            }
            for number, rows in sorted(by_index.items())
        ],
        "num_steps": len(steps),
        "num_problems": len({step.problem_id for step in steps}),
    }
