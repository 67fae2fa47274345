"""Are two mathematical answers the same? One spelling and one layout (notation.py, solutions.py), then fast exact
paths (fast_paths.py), symbolic work in the pool for the rest.

The fast paths decide only what they can decide exactly: the same text after harmless rewriting, two plain
numbers (with their units), two different words. Everything else goes to math-verify in a worker process, whose
leniency is bounded here: every side of a chain (`13 = 12`) and every alternative (`12 \\text{ or } 13`) must be
the gold answer, a set is no tuple, a multiple of a variable is no number.
"""

import re

from espalier.data.answers.answer_parts import (
    alternatives,
    as_union,
    bracket_kind,
    has_many_values,
    has_plus_minus,
    members,
    num_equals,
    set_condition,
    sides,
    unwrap,
    with_both_signs,
    with_commas,
    without_name,
    without_set_of_one,
    without_text,
)
from espalier.data.answers.fast_paths import compare_terms, quick_verdict
from espalier.data.answers.final_answer import AFTER_BOX, DENIED, FinalAnswer, final_answer, find_boxes, visible_part
from espalier.data.answers.grade import Grade
from espalier.data.answers.monomials import read_monomial
from espalier.data.answers.notation import (
    ascii_digits,
    in_one_half_of_day,
    is_other_half_of_day,
    one_spelling,
    single_backslashes,
    without_connective,
)
from espalier.data.answers.option_parts import option_apart
from espalier.data.answers.pool import NOT_EQUAL, POOL, Budget
from espalier.data.answers.solutions import in_one_layout

_MAX_CHARS = 4000
_MAX_PARTS = 12
_WORTH_ASKING = 0.2  # seconds
_DELIMITERS = re.compile(r"\$|\\\(|\\\[|\\boxed|\\fbox|\\begin\{(?:align|equation|gather)")
_WORD = re.compile(r"(?<![\\A-Za-z])[^\W\d_]{2,}")
_PROSE = re.compile(
    r"\b(?:the|is|are|so|we|of|therefore|thus|answer|which|that|donc|then|get|it|les|une|reste|der|die|das|ist|sind|also"
    r"|somit|daher|por|tanto|hay|entonces|quindi|sono|dunque|portanto|logo|restam|dus|więc|portanto)\b",
    re.IGNORECASE,
)
# Cyrillic, Hebrew, Arabic, the scripts of India, Thai, Chinese, Japanese, Korean
_NON_LATIN = re.compile(r"[\u0400-\u06ff\u0900-\u0e7f\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]")
_GLUED = re.compile(
    r"(?<=[\u0e00-\u0e7f\u3001-\u30ff\u4e00-\u9fff\uac00-\ud7af\uff00-\uffef])(?=[-+]?[\d$\\])"
    r"|(?<=\d)(?=[\u0e00-\u0e7f\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af])"
)
_NUMBER_AND_MORE = re.compile(r"[$€£¥]?\s*-?[\d,. ]*\d\s*(?:[^\W\d_]{1,12}[.²³]?|%|[$€£¥])(?:\s.{0,12})?")
_EUROPEAN = re.compile(r"-?\d+,\d{2,}|-?\d{1,3}(?: \d{3})+(?:[.,]\d+)?")
# sides that math-verify cannot compare with a number: remainders, Euler's formula
_NOT_COMPARED = re.compile(r"\\[bp]?mod|\bmod\b|e\^\{?i")


def _is_prose(text: str) -> bool:
    if _NON_LATIN.search(text):
        return True
    plain = without_text(text)
    words = _WORD.findall(re.sub(r"\\(?:begin|end)\{[a-z]+\*?\}|\\[a-zA-Z]+", " ", plain))
    return (bool(_PROSE.search(plain)) and len(words) >= 2) or len(words) >= 4


def _ways(text: str) -> list[bool]:
    """Say whether to read a text as one formula (True), as it stands (False), or both in turn."""
    if _DELIMITERS.search(text) or _is_prose(text):
        return [False]
    if read_monomial(text) is not None:
        return [True]
    if _NUMBER_AND_MORE.fullmatch(text.strip()) or _EUROPEAN.fullmatch(text.strip()):
        return [True, False]
    return [True]


def _parts(answer: str, gold: str) -> list[str]:
    """Return the parts of an answer each of which must be the gold answer: sides of a chain, alternatives; else []."""
    if _is_prose(gold):
        return []
    if len(named := alternatives(answer)) > 1 and not alternatives(gold):
        return named
    if has_many_values(gold) or _EUROPEAN.fullmatch(unwrap(answer)):
        return []
    listed = members(answer)
    if len(listed) > 1:
        return listed
    extra = num_equals(answer) - num_equals(gold)
    chain = sides(answer)
    if extra > 0 and len(chain) > 1 and len(sides(gold)) <= 1 and not _NOT_COMPARED.search(answer):
        return chain
    return []


def compare_math(answer: str, gold: str, budget: Budget | None = None) -> tuple[str, str]:
    """Return (verdict, reason) for two answers; never raises, never takes long."""
    if not answer.strip():
        return "unparseable", "an empty answer"
    if len(answer) > _MAX_CHARS or len(gold) > _MAX_CHARS:
        return "unparseable", f"longer than {_MAX_CHARS} characters"
    answer, gold = re.sub(r"\s{2,}", " ", answer), re.sub(r"\s{2,}", " ", gold)
    budget = budget or Budget(POOL.seconds)
    answer, gold = without_connective(single_backslashes(answer)), single_backslashes(gold)
    if is_other_half_of_day(answer, gold):
        return "wrong", "different halves of the day"
    answer, gold = in_one_half_of_day(answer, gold)
    layouts = in_one_layout(answer, gold)
    if isinstance(layouts, str):
        return "wrong", layouts
    verdict = reason = ""
    for one, other in layouts:
        verdict, reason = _compare_in_layout(one, other, budget)
        if verdict == "right":
            break
    return verdict, reason


def _compare_in_layout(answer: str, gold: str, budget: Budget) -> tuple[str, str]:
    """Return (verdict, reason) for an answer and a gold answer whose unknowns come in one order."""
    gold = gold if _is_prose(gold) else without_set_of_one(one_spelling(gold))
    answer, gold = option_apart(answer, gold)
    if _is_prose(answer):
        answer = _GLUED.sub(" ", ascii_digits(answer))
    else:
        answer = without_set_of_one(one_spelling(answer))
        if not answer:
            return "unparseable", "an empty answer"
        decided = quick_verdict(answer, gold)
        if decided is not None:
            return ("right" if decided[0] else "wrong"), decided[1]
        parts = _parts(answer, gold)
        if parts:
            return _compare_parts(parts[:_MAX_PARTS], gold, budget)
    return _compare_whole(answer, gold, budget)


def _compare_parts(parts: list[str], gold: str, budget: Budget) -> tuple[str, str]:
    for part in parts:
        decided = quick_verdict(part, gold)
        if decided is None:
            verdict, reason = _compare_whole(part, gold, budget)
        else:
            verdict, reason = "right" if decided[0] else "wrong", decided[1]
        if verdict != "right":
            return ("wrong" if verdict == "wrong" else "unparseable"), f"one of {len(parts)} answers: {reason}"
    return "right", "every part is the gold answer"


def _compare_whole(answer: str, gold: str, budget: Budget) -> tuple[str, str]:
    """Compare by math-verify; what wraps a whole formula is taken off, a formula inside a sentence is left to it."""
    bare_answer = with_commas(unwrap(answer)) if not _is_prose(answer) else answer
    bare_gold = with_commas(unwrap(gold)) if not _is_prose(gold) else gold
    if "\\cup" in bare_gold and "\\cup" not in bare_answer:
        bare_answer = as_union(answer) or bare_answer
    if has_plus_minus(bare_answer) != has_plus_minus(bare_gold):
        bare_answer, bare_gold = with_both_signs(bare_answer), with_both_signs(bare_gold)
    condition, gold_condition = set_condition(bare_answer), set_condition(bare_gold)
    bare_gold = gold_condition or bare_gold
    if condition is not None:  # math-verify reads a condition as a set on the gold's side alone
        bare_answer, bare_gold = (condition, bare_gold) if gold_condition else (bare_gold, condition)
    forms = [(one, other) for one in _ways(bare_gold) for other in _ways(bare_answer)]
    verdict, reason = POOL.compare(bare_gold, bare_answer, forms, budget)
    if verdict == "unparseable" and _DELIMITERS.search(answer) and budget.seconds > _WORTH_ASKING:
        verdict, reason = POOL.compare(
            gold if _DELIMITERS.search(gold) else f"${bare_gold}$", answer, [(False, False)], budget
        )
    sentences = [(one, other) for one, other in ((answer, gold), (gold, answer)) if _is_prose(one)]
    if verdict == "right" and any(_contradicts(sentence, other) for sentence, other in sentences):
        return "wrong", "the sentence's formula is of another kind"
    return verdict, reason


_TOKEN = r"(\$[^$]{1,80}\$|[-+]?\d+(?:[.,/]\d+)*)"
_EITHER = re.compile(
    _TOKEN + r"(?:\s[^\s\d$]{1,12})?\s*,?\s*(?:\bor\b|\boder\b|\bou\b|或者|或|または|또는)\s*" + _TOKEN
)
_FORMULA = re.compile(r"(?<!\\)\$([^$]{1,200})(?<!\\)\$|\\\((.{1,200}?)\\\)")


def _contradicts(sentence: str, gold: str) -> bool:
    """Say whether the last formula of a sentence is a set where the gold is a tuple, or a term where it is a number."""
    formulas = list(_FORMULA.finditer(sentence))
    either = _EITHER.search(sentence)
    if either and not has_many_values(gold) and not _is_prose(gold):
        return any((quick_verdict(token, gold) or (True, ""))[0] is False for token in either.groups())
    if not formulas or _is_prose(gold) or re.search(r"\d", sentence[formulas[-1].end() :]):
        return False
    last = formulas[-1][1] or formulas[-1][2]
    kinds = {bracket_kind(last), bracket_kind(gold)}
    if len(kinds) == 2 and "" not in kinds:
        return True
    letters = compare_terms(without_name(last), without_name(gold))
    return letters is not None and not letters[0]


def grade_math(prediction: str, gold: str) -> Grade:
    """Return kind `math`: the prediction is an answer, perhaps in its sentence or its box."""
    text = single_backslashes(prediction[-_MAX_CHARS:])
    if "</think>" in text or "<answer>" in text:
        text = visible_part(text) or ""
    gold = single_backslashes(gold)
    marked_answer = final_answer(text)
    if marked_answer.how == AFTER_BOX and marked_answer.text is not None:
        return _grade(marked_answer.text, *compare_math(marked_answer.text, _gold_of(gold)))
    if marked_answer.how == DENIED:
        return Grade(None, False, DENIED)
    boxes = find_boxes(text)
    shown = unwrap(boxes[-1][2]) if len(boxes) == 1 else unwrap(text)
    if len(boxes) == 1 and _is_prose(shown) and (said := final_answer(shown)).how.startswith("corrected"):
        text = shown = said.unmarked
    budget = Budget(POOL.seconds)
    marked_answer = final_answer(text)
    marked = shown if len(boxes) == 1 else marked_answer.text
    if marked is not None:
        verdict, reason = compare_math(marked, _gold_of(gold), budget)
        if verdict == "right" or (verdict == "wrong" and reason != NOT_EQUAL):
            return _grade(marked, verdict, reason)
        if budget.seconds < _WORTH_ASKING:
            return _grade(marked, verdict, reason)
    if marked_answer.how.startswith("corrected"):
        text = marked_answer.unmarked
    verdict, reason = compare_math(text, gold, budget)
    return _grade(shown, verdict, reason)


def grade_math_response(response: str, gold: str) -> Grade:
    """Return kind `response_math`: the prediction is a whole response; only its final answer counts."""
    marked_answer: FinalAnswer = final_answer(response)
    gold_answer = _gold_of(single_backslashes(gold))
    if marked_answer.text is not None:
        said = final_answer(marked_answer.text) if _is_prose(marked_answer.text) else marked_answer
        answer = said.unmarked if said.how.startswith("corrected") else marked_answer.text
        verdict, reason = compare_math(answer, gold_answer)
        return _grade(answer, verdict, reason)
    if not marked_answer.unmarked.strip():
        return Grade(None, False, marked_answer.how)
    statement = _last_statement(marked_answer.unmarked)
    verdict, reason = compare_math(statement, gold_answer)
    return _grade(statement[-200:], verdict, f"{reason} ({marked_answer.how})")


def _gold_of(gold: str) -> str:
    """Return the gold's own box where the gold is published with its text around it."""
    boxes = find_boxes(gold)
    if len(boxes) != 1:
        return gold
    is_percent = re.match(r"\s*\$?\s*(?:percent\b|\\?%)", gold[boxes[0][1] :]) and not boxes[0][2].endswith("%")
    return boxes[0][2] + "\\%" * bool(is_percent)


def _last_statement(text: str) -> str:
    """Return the last non-blank paragraph of an unmarked text, at most 1,000 characters of it."""
    paragraphs = [part for part in text.split("\n\n") if part.strip()]
    return (paragraphs[-1] if paragraphs else text)[-1000:]


def _grade(answer: str, verdict: str, reason: str) -> Grade:
    return Grade(None if verdict == "unparseable" else answer, verdict == "right", reason)
