"""Does a task's grader know the task's golds? Each gold, handed in as an answer in the layout that its kind reads,
must be right, and the same answer changed must not be.

It catches a `kind` that does not fit the task (`choice` for numbers, `marked_number` for formulas), golds that no
answer can equal, and a grader that accepts anything; before a run spends hours on rewards of nought, or of one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from espalier.data.answers.grade import Gold
from espalier.data.answers.plain_numbers import read_number
from espalier.data.records import Problem
from espalier.data.tasks.task import Task
from espalier.data.verifiers.verify import gold_answer

_LAYOUTS = {
    "math": ("{}",),
    "response_math": ("So \\boxed{{{}}}.",),
    "number": ("{}",),
    "response_number": ("The answer is {}.",),
    "marked_number": ("#### {}",),
    "choice": ("The answer is {}.",),
    "boolean3": ("The answer is {}.",),
    "short_answer": ("{}",),
    "think_format": ("<think>Let us see.</think>{}",),
    "verifiers": ("So \\boxed{{{}}}.", "The answer is: {}", "#### {}", "<answer>{}</answer>", "{}"),
}
# A task with a grader of its own says no kind: one of the layouts that graders read must be its own.
_ANY_LAYOUT = ("#### {}", "Finish[{}]", "The answer is {}.", "So \\boxed{{{}}}.", "{}")
_TRUTHS = {"true": "False", "false": "Unknown", "unknown": "True", "uncertain": "True"}


@dataclass(frozen=True)
class GoldCheck:
    """Of `labelled` golds `accepted` were right as answers and `rejected` wrong once changed. `first_refused` and
    `first_passed` name the first that failed either test, "" where none did; `unlabelled` problems have no gold, those
    of `untried` are checked by verifiers that no gold answers: instructions, programs, several at once."""

    labelled: int
    accepted: int
    rejected: int
    unlabelled: int
    first_refused: str = ""
    first_passed: str = ""
    untried: int = 0

    @property
    def is_sound(self) -> bool:
        """Whether every gold was accepted and every changed one rejected, of at least one that can be tried."""
        has_golds = self.labelled + self.untried > 0
        return has_golds and self.labelled == self.accepted == self.rejected

    @property
    def line(self) -> str:
        """What was found, in one line."""
        untried = f"{self.untried} rows have verifiers that no gold answers" if self.untried else ""
        if not self.labelled:
            return untried or f"none of {self.unlabelled} problems has a gold answer: nothing can be graded"
        counts = (
            f"{self.accepted} of {self.labelled} golds are accepted as answers, {self.rejected} rejected once changed"
        )
        return "; ".join(part for part in (counts, untried, self.first_refused, self.first_passed) if part)


def check_golds(task: Task, problems: Sequence[Problem], most: int = 100) -> GoldCheck:
    """Grade the golds of the first `most` problems, as they are and changed, with the task's own grader.

    A gold that is a list counts by its first answer. A second or so where golds are formulas; no model is asked.
    """
    accepted = rejected = labelled = untried = 0
    refused = passed = ""
    chosen = problems[:most]
    for problem in chosen:
        gold = _first(problem.gold)
        if getattr(task, "kind", "") == "verifiers" and gold:
            gold = gold_answer(gold)
            untried += not gold
        if not gold.strip():
            continue
        labelled += 1
        answers = _answers(task, problem.gold, gold)
        grades = [task.grade(problem.gold, answer, len(problem.options)) for answer in answers]
        is_known = any(grade.is_correct for grade in grades)
        accepted += is_known
        if not is_known and not refused:
            refused = f"first refused: {problem.id}: gold '{gold[:60]}' is {grades[0].verdict} ({grades[0].reason})"
        other = changed(gold, len(problem.options))
        while not isinstance(problem.gold, str) and other in problem.gold:
            other = changed(other)
        answers = _answers(task, problem.gold, other)
        is_passed = any(task.grade(problem.gold, answer, len(problem.options)).is_correct for answer in answers)
        rejected += not is_passed
        if is_passed and not passed:
            passed = f"first passed: {problem.id}: '{other[:60]}' is right for gold '{gold[:60]}'"
    return GoldCheck(labelled, accepted, rejected, len(chosen) - labelled - untried, refused, passed, untried)


def _first(gold: Gold) -> str:
    return gold if isinstance(gold, str) else next(iter(gold), "")


def _answers(task: Task, gold: Gold, answer: str) -> list[str]:
    """Return responses that give an answer to this gold: the task's own (`response_with`), or in the layouts that
    graders read."""
    write = getattr(task, "response_with", None)
    return [write(answer)] if write else [layout.format(answer) for layout in _layouts(task, gold)]


def _layouts(task: Task, gold: Gold) -> tuple[str, ...]:
    """Return the layouts that an answer to this gold may have."""
    kind_of = getattr(task, "kind_of", None)
    return _LAYOUTS.get(kind_of(gold), _ANY_LAYOUT) if kind_of else _ANY_LAYOUT


def changed(gold: str, num_options: int = 0) -> str:
    """Return an answer of the gold's form that is not the gold: another letter, another truth value, a number 17
    larger, a formula plus 17, other words."""
    plain = gold.strip()
    if len(plain) == 1 and plain.isupper() and plain.isascii():
        letters = "ABCDEFGHIJ"[: max(num_options, 2)]
        return letters[(letters.find(plain) + 1) % len(letters)]
    if plain.lower() in _TRUTHS:
        return _TRUTHS[plain.lower()]
    number = read_number(plain)
    if number is not None:
        return str(number.value + 17)
    return f"{plain} + 17" if any(mark in plain for mark in "\\^_=+-*/()[]") else f"another {plain} 17"
