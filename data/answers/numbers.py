"""Answers that are numbers: one after a `####` marker (the GSM8K convention, Cobbe et al. 2021), one in a short
text with its unit, the final one of a whole response."""

import re
from decimal import Decimal, InvalidOperation

from espalier.data.answers.final_answer import DENIED, final_answer
from espalier.data.answers.grade import Grade
from espalier.data.answers.math_answers import grade_math, grade_math_response
from espalier.data.answers.monomials import has_glued_unit, read_monomial
from espalier.data.answers.plain_numbers import PlainNumber, is_equal_within_decimals, read_number

_MARKED = re.compile(r"####[ \t]*([^\n]*)")
_NUMBER = re.compile(r"\$?(-?)\$?((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+) ?[$%]?\.?")


def extract_marked_number(response: str) -> str | None:
    """Return the number after the last `####`, without thousands commas, `$` and `%`; None if there is none.

    Only the marked line is read, and it must hold one number alone: `12 or 13`, `1,2` and `12 apples` are
    no answers, nor is a number elsewhere in the text.
    """
    marked = _MARKED.findall(response)
    if not marked:
        return None
    match = _NUMBER.fullmatch(marked[-1].strip())
    return (match[1] + match[2]).replace(",", "") if match else None


def is_equal_number(one: str, other: str) -> bool:
    """Equal as decimal numbers: `7` = `7.0` = `007`."""
    try:
        return Decimal(one.replace(",", "")) == Decimal(other.replace(",", ""))
    except InvalidOperation:
        return False


def grade_marked_number(gold: str, response: str) -> Grade:
    """Return right if the number after the last `####` of the response equals `gold`."""
    answer = extract_marked_number(response)
    return Grade(answer, answer is not None and is_equal_number(answer, gold))


_IN_TEXT = re.compile(
    r"(?<![\w.\d])[-+−]?(?:[$€£¥]\s?)?[-−]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:\s?/\s?\d+)?(?:[eE][+-]?\d{1,3}(?!\w))?\s?(?:\\?%|percent\b)?"
    r"|(?<![\w.\d])[-+−]?\.\d+\s?(?:\\?%|percent\b)?"
)
_FRACTION = re.compile(r"[-+]?\\[dt]?frac\s*\{-?\d{1,15}\}\s*\{-?\d{1,15}\}")
_CHANGES = re.compile(r"\\(?:text|textbf|mathrm|mbox|mathbf)\s*\{([^{}]*)\}")
_DASH = re.compile(r"(?<![\w.,)\]}%])(?<![\w)\]}%]\$)[–—](?=[$€£¥]?\.?\d)")
# "7 minus 5" and "eggs − 5" are differences: behind a number or a noun neither is a sign.
_SIGN = re.compile(
    r"(?i)(^|[\n=(:*]|\b(?:is|are|was|be|equals?|equal to|gets?|gives|yields)\b)([ \t]{0,2})(?:minus[ \t]|−)[ \t]?"
    r"(?=[$€£¥]?\.?\d)"
)
_NEGATIVE = re.compile(r"(?i)(?<![\w-])negative[ \t](?=[$€£¥]?\.?\d)")
_MAX_TEXT = 4000
_CENTS_DAYS_WEEKS = "cdw"  # units too where every answer is a number
_CHAIN = re.compile(r"=(?!=)")


def numbers_in(text: str) -> list[tuple[str, PlainNumber]]:
    """Return (as written, value) of every number in a text, in order. A range `1-2` or a list `1,2` is two numbers; a
    sign may be a dash or a word (`–5`, `negative 5`, "is minus 5")."""
    text = _CHANGES.sub(r" \1 ", text[-_MAX_TEXT:]).replace("\\!", "").replace("{,}", ",").replace("\\,", "")
    text = _NEGATIVE.sub("-", _SIGN.sub(r"\1\2-", _DASH.sub("-", text.replace("**", " ")))).replace("−", "-")
    numbers: list[tuple[int, str, PlainNumber]] = []
    for match in _FRACTION.finditer(text):
        number = read_number(re.sub(r"\s", "", match.group()))
        if number is not None:
            numbers.append((match.start(), match.group(), number))
    for match in _IN_TEXT.finditer(_FRACTION.sub(lambda match: " " * len(match.group()), text)):
        written = re.sub(r"[€£¥]\s?", "", match.group()).replace(" ", "").replace("percent", "%").replace("\\%", "%")
        number = read_number(re.sub(r"^([-+]?)\$", r"\1", written))
        if number is not None:
            numbers.append((match.start(), match.group().strip(), number))
    return [(written, number) for _, written, number in sorted(numbers, key=lambda item: item[0])]


def _one_number(text: str) -> tuple[str, PlainNumber] | str:
    """Return the one number of an answer text, or why there is none. Of a chain `2+3 = 5` the last side counts."""
    whole = read_number(text.strip().strip("$* ").rstrip("."))
    if whole is not None:
        return text.strip().strip("$* ").rstrip("."), whole
    if _is_term(text):
        return "a multiple of a variable"
    sides = _CHAIN.split(text)
    values = [read_number(side.strip().strip("$* ").rstrip(".")) for side in sides]
    if len(sides) > 1 and all(value is not None for value in values) and len({v.value for v in values if v}) > 1:
        return "a chain of unequal numbers"
    numbers = numbers_in(sides[-1])
    if not numbers:
        return "no number"
    if len({(number.value, number.is_percent) for _, number in numbers}) > 1:
        return f"{len(numbers)} different numbers"
    return numbers[-1]


def _is_term(text: str) -> bool:
    """Say whether a text is a number times variables, and nothing else."""
    text = text.strip("$* .\n")
    return read_monomial(text) is not None and not has_glued_unit(text, _CENTS_DAYS_WEEKS)


def _judge(answer: tuple[str, PlainNumber] | str, gold: str, how: str) -> Grade:
    if isinstance(answer, str):
        return Grade(None, False, f"{answer} ({how})")
    wanted = _one_number(gold)
    if isinstance(wanted, str):
        return Grade(None, False, f"the gold '{gold[:40]}' is not one number: {wanted}")
    is_same = is_equal_within_decimals(answer[1], wanted[1])
    if is_same is None:
        is_same = _is_close(answer[1], wanted[1])
    return Grade(answer[0], is_same, how if is_same else f"different numbers ({how})")


def _is_close(one: PlainNumber, other: PlainNumber) -> bool:
    """Return a percent against a number: equal as a share (`50%` = `0.5`) or, where the gold's own sign is left off, as
    written. A decimal against a fraction: equal to the decimals written."""
    if one.is_percent != other.is_percent:
        percent, plain = (one, other) if one.is_percent else (other, one)
        return percent.value / 100 == plain.value or (other.is_percent and percent.value == plain.value)
    decimals = max(one.num_decimals, other.num_decimals)
    return abs(one.value - other.value) * 2 * 10**decimals <= 1


def grade_number(prediction: str, gold: str) -> Grade:
    """Return kind `number`: the prediction is an answer, perhaps with its unit or in its sentence."""
    marked = final_answer(prediction)
    if marked.how == DENIED:
        return Grade(None, False, DENIED)
    text = marked.text if marked.text is not None else prediction[-_MAX_TEXT:]
    grade = _judge(_one_number(text), gold, marked.how if marked.text is not None else "the answer")
    return _or_as_formula(grade, grade_math(prediction, gold) if _is_formula(grade, text) else None)


def _is_formula(grade: Grade, text: str) -> bool:
    """Say whether an answer that is not the number as written may be it as a formula (`\\sqrt{16}`, `10^3`)."""
    return not grade.is_correct and re.search(r"\\[a-zA-Z]|\^", text) is not None


def _or_as_formula(grade: Grade, formula: Grade | None) -> Grade:
    return formula if formula is not None and formula.is_correct else grade


def grade_number_response(response: str, gold: str) -> Grade:
    """Return kind `response_number`: after `####`, in the box, after the answer phrase; else the last number.

    A final answer that is a formula is worked out.
    """
    grade = _grade_number_response(response, gold)
    text = final_answer(response).text or response[-1000:]
    return _or_as_formula(grade, grade_math_response(response, gold) if _is_formula(grade, text) else None)


def _grade_number_response(response: str, gold: str) -> Grade:
    marked = final_answer(response)
    if marked.how == DENIED:
        return Grade(None, False, DENIED)
    if marked.text is not None:
        answer = _one_number(marked.text)
        if isinstance(answer, str) and marked.how == "answer phrase" and "different" in answer:
            sentence = re.split(
                r",(?!\s*[-+]?[$\d.])|[;(]|\b(?:because|since|as|which|after|for|out of|per)\b", marked.text
            )[0]
            answer = _one_number(sentence)
        return _judge(answer, gold, marked.how)
    numbers = [] if _is_term(marked.unmarked) else numbers_in(marked.unmarked)
    return _judge(numbers[-1] if numbers else "no number", gold, f"the last number; {marked.how}")
