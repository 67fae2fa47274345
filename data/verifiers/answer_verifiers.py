"""Verifiers of a final answer: which part of a response counts is the published rule of each (Lambert et al. 2024,
"Tulu 3", and the sets that followed); whether it is right is decided by this project's graders (data/answers/), so that
18.0 is 18. Nothing before a closing `</think>` counts, and nothing where reasoning was opened and never closed.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from espalier.data.answers.final_answer import after_reasoning, find_boxes, visible_part
from espalier.data.answers.grading import ANSWER_KINDS, grade_answer
from espalier.data.answers.math_answers import compare_math
from espalier.data.answers.numbers import numbers_in
from espalier.data.answers.plain_numbers import is_equal_within_decimals, read_number
from espalier.data.answers.short_answers import short_key, token_f1
from espalier.data.sources import BadRow
from espalier.data.verifiers.response import Response, Result, Verifier

_FINAL = re.compile(
    r"(?i)final answer\**(?::| is\b:?)[* ]*\n?(?:the final answer is:?[* ]*\n?)? ?(.+?)"
    r"(?:\.? ?I hope it is correct|\.?(?:\n|$))"
)
_HEADING = re.compile(r"(?im)^[#* ]*final answer[:* ]*\n+(.+)$")
_FLAN = "The answer is: "
_ANSWER_TAGS = re.compile(r"</?answer>")
_DOLLARS = re.compile(r"(?<!\\)\$")
_MAX_TEXT = 20_000
_MAX_WHOLE = 300  # a longer text is no answer


def read_texts(truth: Any) -> list[str]:
    """Return the ground truth as a list of texts, any of which is right. Raises BadRow where there is none."""
    values = truth if isinstance(truth, list) else [truth]
    if not values or not all(isinstance(value, str | int | float) and not isinstance(value, bool) for value in values):
        raise BadRow(f"the ground truth must be a text or a list of texts, got {str(truth)[:40]!r}")
    texts = [str(value) for value in values]
    if not all(text.strip() for text in texts):
        raise BadRow("the ground truth is empty")
    return texts


def read_numbers(truth: Any) -> list[str]:
    """Return the ground truth as texts, each a number or a text without digits; of a solution of GSM8K what follows its
    last `####`. Raises BadRow where no response could match: digits that are no number (`18 apples`)."""
    return [_number_text(text) for text in read_texts(truth)]


def _number_text(text: str) -> str:
    bare = text.rpartition("####")[2].strip().replace("−", "-").lstrip("$€£¥ ").rstrip(". ")
    if not bare or (read_number(bare) is None and re.search(r"\d", bare)):
        raise BadRow(f"the ground truth is no number: {text[-40:]!r}")
    return bare


def _is_one_of(text: str, golds: Sequence[str]) -> bool:
    """Say whether a text, which is not empty, is one of the ground truths as short answers are compared."""
    return bool(text.strip()) and short_key(text) in map(short_key, golds)


def _shown(response: Response) -> str:
    """Return the visible part of a response, "" where its reasoning is not closed."""
    return (visible_part(response.text) or "")[-_MAX_TEXT:]


def check_gsm8k(response: Response, golds: Sequence[str]) -> Result:
    """The last number of the text, as a number, with or without its percent sign; a text without one must be the ground
    truth itself."""
    text = _shown(response)
    numbers = numbers_in(re.sub(r"(?<=\d),(?=\d{3})", "", text))
    if not numbers:
        return Result(float(_is_one_of(text, golds)), None, "no number")
    written, number = numbers[-1]
    wanted = [read_number(gold) for gold in golds]
    is_right = any(gold is not None and (is_equal_within_decimals(number, gold) or number.value == gold.value)
                   for gold in wanted)  # fmt: skip
    return Result(float(is_right), written, "the last number")


def _final_statement(text: str) -> str | None:
    """Return X of the last "Final Answer: The final answer is X. I hope it is correct.\""""
    lines = (" ".join(line.split()) for line in text.split("\n"))
    found = _FINAL.findall("\n".join(line for line in lines if line))
    return found[-1].strip().removeprefix("**").removesuffix("**").strip(" $") if found else None


def math_candidates(text: str) -> Iterator[str]:
    """Yield what of a response may be its answer: the last box, and what it calls final; only without both what is
    between the last two dollars; only without that the line under a heading that says so, and the whole text."""
    boxes, final = find_boxes(text), _final_statement(text)
    if boxes:
        yield boxes[-1][2]
    if final:
        yield final
    if boxes or final:
        return
    dollars = [match.start() for match in _DOLLARS.finditer(text)]
    if len(dollars) > 1:
        yield text[dollars[-2] + 1 : dollars[-1]]
        return
    if headed := _HEADING.findall(text):
        yield headed[-1].strip()
    if text.strip() and len(text) <= _MAX_WHOLE:
        yield text.strip()


def check_math(response: Response, golds: Sequence[str]) -> Result:
    """Any of `math_candidates` equals the ground truth."""
    return _first_equal(list(math_candidates(_shown(response))), golds)


def check_strict_math(response: Response, golds: Sequence[str]) -> Result:
    """What the response calls its final answer in the words that were asked for; without them, the whole text."""
    text = _shown(response)
    final = _final_statement(text)
    whole = [text.strip()] if text.strip() and len(text) <= _MAX_WHOLE and not find_boxes(text) else []
    return _first_equal([final] if final else whole, golds)


def _first_equal(candidates: Sequence[str], golds: Sequence[str]) -> Result:
    reason = "no answer"
    for candidate in candidates:
        for gold in golds:
            verdict, reason = compare_math(candidate, gold)
            if verdict == "right":
                return Result(1.0, candidate, reason)
    return Result(0.0, candidates[-1] if candidates else None, reason)


def check_flan(response: Response, golds: Sequence[str]) -> Result:
    """What follows the last "The answer is: ", or the whole text, is the ground truth, normalised."""
    answer = _shown(response).rpartition(_FLAN)[2].strip()
    return Result(float(_is_one_of(answer, golds)), answer or None)


def check_string(response: Response, golds: Sequence[str]) -> Result:
    """What is between the last `<answer>` and `</answer>`, both there, is a ground truth, normalised."""
    text = after_reasoning(response.text) or ""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    if start < 0:
        return Result(0.0, None, "no answer tags")
    answer = text[start + len("<answer>") : end].strip()[:_MAX_TEXT]
    return Result(float(_is_one_of(answer, golds)), answer)


def check_string_f1(response: Response, golds: list[str]) -> Result:
    """The largest F1 of normalised tokens over the ground truths."""
    text = _shown(response).strip()
    return Result(token_f1(text, golds) if text else 0.0, text[:200] or None)


def check_puzzle(response: Response, golds: Sequence[str]) -> Result:
    """What follows `</think>`, answer tags dropped, is the ground truth, normalised."""
    text = _ANSWER_TAGS.sub("", after_reasoning(response.text) or "").strip()
    return Result(float(_is_one_of(text, golds)), text[:200] or None)


def _by_kind(kind: str) -> Callable[[Response, list[str]], Result]:
    """Return the check by one of this project's own kinds of answers."""

    def check(response: Response, golds: list[str]) -> Result:
        grade = grade_answer(prediction=response.text, gold=golds, kind=kind)
        return Result(float(grade.is_correct), grade.answer, grade.reason)

    return check


ANSWER_VERIFIERS = {kind: Verifier(read_texts, _by_kind(kind)) for kind in ANSWER_KINDS if kind != "think_format"} | {
    "gsm8k": Verifier(read_numbers, check_gsm8k),
    "math": Verifier(read_texts, check_math),
    "strict_math": Verifier(read_texts, check_strict_math),
    "flan": Verifier(read_texts, check_flan),
    "string_matcher": Verifier(read_texts, check_string),
    "string_f1": Verifier(read_texts, check_string_f1),
    "puzzle": Verifier(read_texts, check_puzzle),
}
