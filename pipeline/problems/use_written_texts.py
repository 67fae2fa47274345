"""WrittenText → Problem or Demonstration: requests to sample paragraphs from, and summaries to imitate.

Texts that are missing are left out and counted; of several votes the first with a text is taken.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from espalier.data.answers.short_answers import golds, normalise
from espalier.data.jsonl import read_records
from espalier.data.left_out import leave_out
from espalier.data.reader_answers import WrittenText
from espalier.data.records import BadInput, Demonstration, Problem
from espalier.pipeline.stage import StageContext

_SIGN = "[A-Za-z0-9]"


def first_texts(path: str, noun: str) -> dict[str, WrittenText]:
    """Return problem → its first vote with a text. Raises BadInput where no row has one."""
    rows = read_records(WrittenText, path)
    found: dict[str, WrittenText] = {}
    for row in rows:
        if row.text is not None:
            found.setdefault(row.problem_id, row)
    num_problems = len({row.problem_id for row in rows})
    if not found:
        raise BadInput(f"{path}: no row holds a text: read some of the responses there")
    leave_out(path, num_problems - len(found), num_problems, noun, "have no text")
    return found


def _holds(request: str, answer: str) -> bool:
    """Say whether an answer stands in a request, not in the midst of a word of Latin letters or a number; in scripts
    without blanks a word has no edge to see. One that is an article ("A") is in all requests."""
    text = answer.strip()
    before = f"(?<!{_SIGN})" if re.match(_SIGN, text) else ""
    behind = f"(?!{_SIGN})" if re.match(_SIGN, text[-1:]) else ""
    found = re.search(before + re.escape(text) + behind, request, re.IGNORECASE)
    return found is not None and bool(normalise(answer))


@dataclass(frozen=True)
class UseRequests:
    """Input: requests of the task's `split`. A request that contains the answer is left out, and counted."""

    split: str

    def inputs(self) -> list[str]:
        """None beside the requests."""
        return []

    def run(self, input_path: str, context: StageContext) -> Iterator[Problem]:
        """Yield the problems whose request is known, with it as their question and the own one in `info`."""
        texts = first_texts(input_path, "problems")
        num_revealing = 0
        for problem in context.task.problems(self.split):
            if problem.id not in texts:
                continue
            request = str(texts[problem.id].text)
            if any(_holds(request, name) for name in golds(problem.gold)):
                num_revealing += 1
                continue
            info: dict[str, Any] = {**problem.info, "question": problem.question}
            yield replace(problem, question=request, info=info)
        context.counts["with_the_answer"] = num_revealing


@dataclass(frozen=True)
class UseSummaries:
    """Input: summaries; the prompt of each demonstration is the request that the summarised samples answer."""

    def inputs(self) -> list[str]:
        """None beside the summaries."""
        return []

    def run(self, input_path: str, context: StageContext) -> Iterator[Demonstration]:
        """Yield a demonstration a problem."""
        for problem_id, row in first_texts(input_path, "problems").items():
            yield Demonstration(problem_id, row.prompt, str(row.text))
