"""Final answers that are plain numbers after a `####` marker (the GSM8K convention, Cobbe et al. 2021)."""

import re
from decimal import Decimal, InvalidOperation

from data.answers.grade import Grade

_MARKED = re.compile(r"####[ \t]*([^\n]*)")
_NUMBER = re.compile(r"\$?(-?)\$?((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+) ?[$%]?\.?")


def extract_marked_number(response: str) -> str | None:
    """The number after the last `####`, without thousands commas, `$` and `%`; None if there is none.

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
    """Right if the number after the last `####` of the response equals `gold`."""
    answer = extract_marked_number(response)
    return Grade(answer, answer is not None and is_equal_number(answer, gold))
