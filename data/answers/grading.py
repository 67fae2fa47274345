"""One way to grade: `grade_answer(prediction=..., gold=..., kind=...)` gives right, wrong or unparseable.

| kind | the prediction is | gold |
|---|---|---|
| `math` | an answer | LaTeX or text |
| `response_math` | a whole response; its final answer counts | LaTeX or text |
| `number` | an answer, perhaps with its unit | a number |
| `response_number` | a whole response | a number |
| `marked_number` | a whole response with `#### N` | a number |
| `choice` | an answer or a response | a letter |
| `boolean3` | an answer or a response | True, False or Unknown |
| `short_answer` | an answer or a response | texts, any of which is right |
| `think_format` | a whole response | none: is it `<think>...</think>` and then an answer |
| `verifiers` | a whole response | verifiers by name, as JSON (docs/verifiers.md) |

It never raises on what a model wrote, never takes more than about a second (programs: as their tests say), never
evaluates a text as code outside the sandbox. Repeats come from a cache.
"""

from collections.abc import Callable
from functools import lru_cache

from espalier.data.answers.final_answer import after_reasoning
from espalier.data.answers.grade import Gold, Grade
from espalier.data.answers.letters import grade_choice
from espalier.data.answers.math_answers import grade_math, grade_math_response
from espalier.data.answers.numbers import grade_marked_number, grade_number, grade_number_response
from espalier.data.answers.short_answers import grade_short_answer
from espalier.data.answers.truth_values import grade_boolean3
from espalier.data.records import BadInput

_BY_TEXT: dict[str, Callable[[str, str], Grade]] = {
    "math": grade_math,
    "response_math": grade_math_response,
    "number": grade_number,
    "response_number": grade_number_response,
    "marked_number": lambda prediction, gold: grade_marked_number(gold, prediction),
    "boolean3": grade_boolean3,
}
ANSWER_KINDS = (*_BY_TEXT, "choice", "short_answer", "think_format")
KINDS = (*ANSWER_KINDS, "verifiers")
_MAX_CHARS = 20_000
_MAX_GOLD = 10_000
_KEPT_CHARS = 2_000


def grade_answer(*, prediction: str, gold: Gold, kind: str, num_options: int = 0) -> Grade:
    """Return the grade of one prediction. Raises BadInput only for an unknown kind.

    Of a very long prediction the last 20,000 characters behind its reasoning are read, all of it for its layout. A list
    of golds means any of them.
    """
    if kind not in KINDS:
        raise BadInput(f"there is no kind '{kind}' of answer: choose one of {', '.join(KINDS)}")
    if kind == "verifiers":
        from espalier.data.verifiers.verify import grade_by_verifiers  # which asks this module for answers

        return grade_by_verifiers(prediction, gold)
    text = prediction if kind == "think_format" else _what_is_read(prediction, kind)
    golds = tuple([gold] if isinstance(gold, str) else gold)
    longest = max(map(len, golds), default=0)
    if longest > _MAX_GOLD:
        return Grade(None, False, f"a gold answer of more than {_MAX_GOLD:,} characters")
    if kind != "short_answer" and len(golds) > 1:
        grades = [grade_answer(prediction=text, gold=one, kind=kind, num_options=num_options) for one in golds]
        return next((grade for grade in grades if grade.is_correct), grades[0])
    if len(text) > _KEPT_CHARS or longest > _KEPT_CHARS:
        return _grade(text, golds, kind, num_options)
    try:
        return _cached(text, golds, kind, num_options)
    except _NotKept as undecided:
        return undecided.grade


def _what_is_read(prediction: str, kind: str) -> str:
    """Return the end of what a prediction shows behind its reasoning; reasoning that is not closed stays open."""
    if len(prediction) <= _MAX_CHARS or kind == "marked_number":
        return prediction[-_MAX_CHARS:]
    shown = after_reasoning(prediction)
    return shown[-_MAX_CHARS:] if shown is not None else f"<think>{prediction[-_MAX_CHARS:]}"


def _is_thought_then_answer(text: str) -> bool:
    """Return one `<think>...</think>` at the beginning, an answer after it, and no second such tag."""
    opening, closing = "<think>", "</think>"
    end = text.find(closing)
    is_one = text.count(opening) == 1 and text.count(closing) == 1
    return is_one and text.startswith(opening) and bool(text[end + len(closing) :].strip())


@lru_cache(maxsize=50_000)
def _cached(text: str, golds: tuple[str, ...], kind: str, num_options: int) -> Grade:
    grade = _grade(text, golds, kind, num_options)
    if grade.reason.startswith("no verdict"):
        raise _NotKept(grade)
    return grade


class _NotKept(Exception):
    """A grade that a busy machine may have cost: asked again, it may be another."""

    def __init__(self, grade: Grade):
        self.grade = grade


def _grade(text: str, golds: tuple[str, ...], kind: str, num_options: int) -> Grade:
    if kind == "think_format":
        is_valid = _is_thought_then_answer(text.strip())
        return Grade("valid" if is_valid else "invalid", is_valid, "the layout of the response")
    if kind == "short_answer":
        return grade_short_answer(text, list(golds))
    gold = golds[0] if golds else ""
    if not gold.strip():
        return Grade(None, False, "there is no gold answer")
    if kind == "choice":
        return grade_choice(text, gold, num_options)
    return _BY_TEXT[kind](text, gold)
