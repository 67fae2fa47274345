"""Rows of a benchmark whose prompts a policy would be trained on by reinforcement learning: they are refused.

What a run is given are prompts; responses it draws itself. So prompts are compared, by their text without case and
white space: a problem's question alone, with its passage, and as the task writes it, with a row's whole prompt, or the
question of a row whose other turns are the system's. Paraphrases are not found, nor questions that a prompt holds among
other text; a row without a prompt of its own (`has_implicit_prompt`) cannot be compared, and is counted aloud.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from espalier.data.jsonl import read_records
from espalier.data.ranked_responses import RankedResponses
from espalier.data.records import BadInput, Problem
from espalier.data.seen_responses import response_hash

log = logging.getLogger("rl")


def prompts_of_problem(task: Any, problem: Problem) -> Iterator[str]:
    """Yield the texts that a problem's prompt may have in a benchmark."""
    yield problem.question
    yield problem.context + problem.question
    yield task.prompt(problem)


def prompts_of_row(row: RankedResponses) -> Iterator[str]:
    """Yield the texts of a row's prompt: all of it, and its question where that is the only turn of a user."""
    yield row.prompt
    spoken = [turn["content"] for turn in row.turns if turn["role"] != "system"]
    if len(spoken) == 1:
        yield spoken[0]


def check_benchmark_prompts(task: Any, files: Sequence[str]) -> None:
    """Raise BadInput where training problems of the task have prompts of rows of the `files`
    (`evaluation/import_comparisons`), and where no row of a file could be compared; warn of rows that cannot be."""
    if not files:
        return
    asked: dict[str, str] = {}
    for problem in task.problems("train"):
        for text in prompts_of_problem(task, problem):
            asked.setdefault(response_hash(text), problem.id)
    for file in files:
        rows = read_records(RankedResponses, file)
        known = [row for row in rows if not row.has_implicit_prompt]
        if rows and not known:
            raise BadInput(f"held_out_benchmarks compares prompts, and none of {len(rows)} rows of {file} has one of "
                           "its own: import it with prompts, or leave it out")  # fmt: skip
        if len(known) < len(rows):
            log.warning("held_out_benchmarks: %d of %d rows of %s have no prompt of their own and cannot be compared "
                        "with the task's problems", len(rows) - len(known), len(rows), file)  # fmt: skip
        found = {row.id: asked[key] for row in known for key in map(response_hash, prompts_of_row(row)) if key in asked}
        if found:
            row, problem = next(iter(found.items()))
            raise BadInput(f"the task's training problems have the prompts of {len(found)} of {len(rows)} rows of "
                           f"{file} ('{row}' is the first, problem '{problem}'; reinforcement learning is compared by "
                           "prompts): a policy trained on them cannot be evaluated on them: leave these problems "
                           "out")  # fmt: skip
