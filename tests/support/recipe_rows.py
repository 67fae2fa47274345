"""Small files of every kind that a training recipe reads (conf/examples), of the same solutions: those of the imperfect
teacher of word arithmetic, right ones and wrong ones."""

import json
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from espalier.data.examples.outcome_examples import JudgedResponse
from espalier.data.examples.token_examples import WeightedResponse
from espalier.data.jsonl import write_records
from espalier.data.process_data.math_shepherd import MARK
from espalier.data.records import AnnotatedSolution, Demonstration, PreferencePair, StepValues, Trajectory
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.data.token_text import tokenise_steps


def trajectories(task: Any, tokenizer: Any) -> list[Trajectory]:
    """Return the teacher's solutions of the training problems as a sampler would have written them."""
    golds = {problem.id: problem.gold for problem in task.problems("train")}
    found = []
    for row in task.demonstrations("train"):
        problem_id, steps = row.id.split("/")[0], task.split_steps(row.completion)
        tokens = tokenise_steps(tokenizer, tokenizer(row.prompt).input_ids, steps, is_finished=True)
        assert tokens is not None
        grade = task.grade(golds[problem_id], row.completion)
        found.append(Trajectory(row.id, problem_id, row.prompt, row.completion, steps, tokens.prompt_ids,
                                tokens.response_ids, tokens.step_ends, "stop", golds[problem_id], grade.answer,
                                grade.is_correct))  # fmt: skip
    return found


def _step_values(row: Trajectory) -> StepValues:
    """Values that fall to the outcome: of three completions, so that classes of three can be learnt too."""
    number = len(row.steps)
    correct = [3 if row.is_correct else round(3 * (number - 1 - k) / number) for k in range(number)]
    return StepValues(row.id, row.problem_id, row.prompt, row.steps, row.prompt_ids, row.response_ids, row.step_ends,
                      [one / 3 for one in correct], correct, [3] * (number - 1) + [1], row.is_correct)  # fmt: skip


def _pairs(rows: Iterable[Trajectory]) -> list[PreferencePair]:
    """A right over a wrong solution of every problem that has both."""
    ordered = sorted(rows, key=lambda row: (row.problem_id, not row.is_correct))
    return [
        PreferencePair(f"{one.id}>{other.id}", one.problem_id, "outcome", one.prompt, one.response, other.response,
                       one.prompt_ids, one.response_ids, other.response_ids, 1.0, 0.0)
        for one, other in pairwise(ordered)
        if one.problem_id == other.problem_id and one.is_correct and not other.is_correct
    ]  # fmt: skip


def _annotated(row: Trajectory) -> AnnotatedSolution:
    steps = [step.removesuffix("\n") for step in row.steps]
    last = len(steps) - 1
    labels: list[float | None] = [1.0 if row.is_correct or k < last else 0.0 for k in range(last + 1)]
    return AnnotatedSolution(row.id, row.problem_id, row.prompt.strip(), steps, labels, -1 if row.is_correct else last,
                             row.is_correct, str(row.gold), {"separator": "\n"})  # fmt: skip


def _prm800k(row: AnnotatedSolution) -> dict[str, Any]:
    steps = [{"completions": [{"text": text, "rating": 1 if label else -1}], "human_completion": None,
              "chosen_completion": 0} for text, label in zip(row.steps, row.labels, strict=True)]  # fmt: skip
    question = {"problem": row.question, "ground_truth_answer": row.gold}
    reason = "solution" if row.is_correct else "found_error"
    return {"question": question, "label": {"steps": steps, "finish_reason": reason}}


def _math_shepherd(row: AnnotatedSolution) -> dict[str, Any]:
    def text(marks: list[str]) -> str:
        steps = [f"Step {k}: {step} {mark}" for k, (step, mark) in enumerate(zip(row.steps, marks, strict=True), 1)]
        return f"{row.question} " + "\n".join(steps)

    return {"input": text([MARK] * len(row.steps)), "label": text(["+" if one else "-" for one in row.labels]),
            "task": "GSM8K"}  # fmt: skip


def _verifications(rows: Iterable[Trajectory]) -> list[Demonstration]:
    ask = "{}{}\nIs the answer right (Yes/No)?"
    return [Demonstration(row.id, ask.format(row.prompt, row.response), " Yes" if row.is_correct else " No")
            for row in rows]  # fmt: skip


MAKERS: dict[str, Callable[[list[Trajectory]], Iterable[Any]]] = {
    "demonstrations": lambda rows: [Demonstration(row.id, row.prompt, row.response) for row in rows],
    "verifications": _verifications,
    "trajectories": lambda rows: rows,
    "step_values": lambda rows: map(_step_values, rows),
    "preferences": _pairs,
    "judged_responses": lambda rows: [
        JudgedResponse(row.id, row.problem_id, row.prompt, row.response, 0.9 if row.is_correct else 0.2) for row in rows
    ],
    "weighted_responses": lambda rows: [
        WeightedResponse(row.id, row.problem_id, row.prompt_ids, row.response_ids,
                         [1.0 if row.is_correct else -1.0] * len(row.response_ids)) for row in rows
    ],
    "annotated_solutions": lambda rows: map(_annotated, rows),
}  # fmt: skip


def write_recipe_rows(folder: Path, task: WordArithmetic, tokenizer: Any) -> None:
    """Write `folder/<kind>.jsonl` of every kind, and of the published formats that recipes read as they are."""
    rows = trajectories(task, tokenizer)
    for name, make in MAKERS.items():
        write_records(folder / f"{name}.jsonl", make(rows))
    for name, publish in (("prm800k", _prm800k), ("math_shepherd", _math_shepherd)):
        lines = [json.dumps(publish(_annotated(row))) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines))
