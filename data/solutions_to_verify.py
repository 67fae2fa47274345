"""Solutions in any of their files → what a verifier is asked about: whole solutions, or every step of them.

| kind | a file of | a whole solution is right | a step is right |
|---|---|---|---|
| trajectories | `Trajectory` | as it was graded | as the task says (`data.tasks.enumerable`), if it knows |
| step_values | `StepValues` | as it was graded | its label is 1/2 or more |
| labelled | `AnnotatedSolution` | no step is wrong; where that is not known, its answer is right | before the first error; where that is not known, its label is 1/2 or more |
"""  # noqa: E501

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from espalier.data.jsonl import read_records
from espalier.data.judgements import Verification
from espalier.data.process_data.formats import to_step_texts
from espalier.data.process_data.published import content_key
from espalier.data.prompts import PromptTemplate
from espalier.data.records import AnnotatedSolution, BadInput, Problem, StepValues, Trajectory
from espalier.data.step_verdicts import EACH_STEP, StepVerdictFormat
from espalier.data.tasks.enumerable import positions
from espalier.data.verification import VerifierFormat

KINDS = ("trajectories", "step_values", "labelled")


@dataclass(frozen=True)
class Solution:
    """`steps_right`: of each step whether the solution is right up to it; None where nobody knows. `is_cut`: it did not
    end by itself. `gold`: the right answer, "" where it is not known."""

    id: str
    problem_id: str
    prompt: str
    steps: list[str]
    is_right: bool | None
    steps_right: list[bool | None]
    is_cut: bool = False
    gold: str = ""
    passage_id: str = ""


@dataclass(frozen=True)
class Question:
    """What a verifier is asked about: the first `num_steps` steps of a solution. The id is the solution's where all of
    it is asked about, else `{solution}#{num_steps}`."""

    id: str
    solution: Solution
    num_steps: int
    is_right: bool | None

    @property
    def steps(self) -> list[str]:
        """The steps that are asked about."""
        return self.solution.steps[: self.num_steps]

    @property
    def digest(self) -> str:
        """A hash of the problem and these steps."""
        return content_key([self.solution.prompt, *self.steps])


def check_asked(row: Verification, digest: str, path: str) -> None:
    """Raise BadInput where a verification is about other steps than those of its id here."""
    if row.asked != digest:
        raise BadInput(f"{path}: '{row.id}' is about another solution than the input's '{row.question_id}': ask about "
                       "these solutions, and name that file")  # fmt: skip


def read_solutions(path: str, kind: str, template: PromptTemplate | None = None) -> list[Solution]:
    """Return the solutions of a file in order; `template` asks the question of a labelled one (None: the question and a
    newline). Raises BadInput on another kind, two solutions of one id, and steps and labels that differ in number."""
    if kind not in KINDS:
        raise BadInput(f"kind must be {', '.join(KINDS)}, got '{kind}'")
    read: dict[str, Callable[[], list[Solution]]] = {
        "trajectories": lambda: [_of_trajectory(row) for row in read_records(Trajectory, path)],
        "step_values": lambda: [_of_values(row) for row in read_records(StepValues, path)],
        "labelled": lambda: [of_annotated(row, template, path) for row in read_records(AnnotatedSolution, path)],
    }
    solutions = read[kind]()
    ids = [solution.id for solution in solutions]
    if len(set(ids)) < len(ids):
        repeated = next(name for place, name in enumerate(ids) if name in ids[:place])
        raise BadInput(f"{path}: two solutions have the id '{repeated}': give every solution once")
    return solutions


def questions_about(solutions: Sequence[Solution], verifier: VerifierFormat | StepVerdictFormat) -> list[Question]:
    """Return the questions of a format in order: one a solution, or one a step."""
    if verifier.unit in ("solution", EACH_STEP):
        return [Question(row.id, row, len(row.steps), row.is_right) for row in solutions]
    return [Question(f"{row.id}#{number}", row, number, row.steps_right[number - 1])
            for row in solutions for number in range(1, len(row.steps) + 1)]  # fmt: skip


def with_task_truth(solutions: Sequence[Solution], task: Any, split: str) -> list[Solution]:
    """Return the solutions with what an enumerable task knows of their steps, a step outside its grammar being wrong.

    Raises BadInput where the task does not know it, its split has not their problems, or steps are not the task's."""
    if not hasattr(task, "position"):
        raise BadInput("nobody knows which steps of these are right: set task=word_arithmetic or another that does, or "
                       "read StepValues (stage.kind=step_values)")  # fmt: skip
    problems: dict[str, Problem] = {problem.id: problem for problem in task.problems(split)}
    found = []
    for row in solutions:
        problem = problems.get(row.problem_id)
        if problem is None or problem.question not in row.prompt or (row.gold and str(problem.gold) != row.gold):
            raise BadInput(f"'{row.id}' answers no problem of the task's split {split}: set stage.split and task.* as "
                           "they were sampled")  # fmt: skip
        right = [place is not None and place.is_right for place in positions(task, problem, row.steps, row.id)]
        found.append(replace(row, steps_right=[*right]))
    return found


def _of_trajectory(row: Trajectory) -> Solution:
    gold = row.gold[0] if isinstance(row.gold, list) and row.gold else row.gold
    unknown: list[bool | None] = [None] * len(row.steps)
    is_cut = row.finish_reason != "stop"
    known = str(gold or ""), row.passage_id
    return Solution(row.id, row.problem_id, row.prompt, row.steps, row.is_correct, unknown, is_cut, *known)


def _of_values(row: StepValues) -> Solution:
    right = [None if label is None else label >= 0.5 for label in row.labels]
    return Solution(row.id, row.problem_id, row.prompt, row.steps, row.is_correct, right, passage_id=row.passage_id)


def of_annotated(row: AnnotatedSolution, template: PromptTemplate | None, path: str) -> Solution:
    """Return a judged solution of the file `path`, its problem asked by `template`. Raises BadInput where steps and
    labels differ in number."""
    prompt, steps, labels = to_step_texts(row, template)
    if len(steps) != len(labels):
        raise BadInput(f"{path}: '{row.id}' has {len(steps)} steps and {len(labels)} labels: give one per step")
    right: list[bool | None] = [None if label is None else label >= 0.5 for label in labels]
    first = row.first_error
    if first is not None:
        right = [first < 0 or place < first for place in range(len(steps))]
    is_right = row.is_correct if first is None else first < 0
    opening = template.before_response if template is not None else ""
    return Solution(row.id, row.problem_id, prompt + opening, steps, is_right, right, gold=row.gold)
