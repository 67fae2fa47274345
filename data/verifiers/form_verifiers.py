"""Verifiers of a response's form: instructions to follow, a layout, a length."""

import re
from collections.abc import Sequence
from typing import Any

from espalier.data.answers.final_answer import visible_part
from espalier.data.answers.grading import grade_answer
from espalier.data.answers.pool import POOL
from espalier.data.sources import BadRow
from espalier.data.verifiers.instruction_labels import Instruction, read_instructions
from espalier.data.verifiers.response import Response, Result, Verifier

_THINK_THEN_ANSWER = re.compile(r"</think>\s*<answer>")
_MAX_TEXT = 200_000


def check_instructions(response: Response, instructions: Sequence[Instruction]) -> Result:
    """The share of instructions that the visible part follows."""
    text = (visible_part(response.text) or "").strip()[:_MAX_TEXT]
    broken = [one.id for one in instructions if not one.is_followed(text)]
    return Result(1 - len(broken) / len(instructions), text[:200] or None, ", ".join(broken))


def read_pattern(truth: Any) -> str:
    """Return the pattern; "" of "" or null: thinking and then answering. Raises BadRow on no pattern."""
    if truth is not None and not isinstance(truth, str):
        raise BadRow(f"a format is a regular expression, got {str(truth)[:40]!r}")
    try:
        re.compile(truth or "", re.DOTALL)
    except (re.error, RecursionError, OverflowError) as error:
        raise BadRow(f"the format is no regular expression: {error}") from None
    return truth or ""


def check_format(response: Response, pattern: str) -> Result:
    """The response matches the pattern from its beginning; without one, `</think>` is followed by `<answer>`, and that
    by `</answer>` (the layout of reasoning models whose prompt has opened the reasoning). A match that takes longer
    than a formula may is none."""
    text = response.text[:_MAX_TEXT]
    if pattern:
        matches = POOL.matches(pattern, text)
        if matches is None:
            return Result(0.0, None, "no verdict: the pattern takes too long on this response")
    else:
        found = _THINK_THEN_ANSWER.search(text)
        matches = found is not None and "</answer>" in text[found.end() :]
    return Result(float(matches), text[-200:] or None)


def check_think_format(response: Response, truth: None) -> Result:
    """One `<think>...</think>` and an answer behind it."""
    grade = grade_answer(prediction=response.text, gold="", kind="think_format")
    return Result(float(grade.is_correct), grade.answer)


def read_length(truth: Any) -> int:
    """Return a number of tokens. Raises BadRow where it is none above 0."""
    try:
        number = int(truth)
    except (TypeError, ValueError):
        number = 0
    if number < 1 or isinstance(truth, bool):
        raise BadRow(f"a length is a whole number of tokens from 1 on, got {str(truth)[:40]!r}")
    return number


def _length(response: Response) -> int:
    assert response.num_tokens is not None  # `needs`
    return response.num_tokens


def check_max_length(response: Response, most: int) -> Result:
    """The share of the allowed tokens that is used; 0 beyond."""
    number = _length(response)
    return Result(number / most if number <= most else 0.0, str(number))


def check_up_to_max_length(response: Response, most: int) -> Result:
    """1 within the allowed tokens; beyond, less by the share that is too much, never below 0."""
    number = _length(response)
    return Result(1.0 if number <= most else max(0.0, 1 - (number - most) / most), str(number))


FORM_VERIFIERS = {
    "ifeval": Verifier(read_instructions, check_instructions),
    "format": Verifier(read_pattern, check_format),
    "think_format": Verifier(lambda truth: None, check_think_format),
    "max_length": Verifier(read_length, check_max_length, needs="tokens"),
    "up_to_max_length": Verifier(read_length, check_up_to_max_length, needs="tokens"),
}
