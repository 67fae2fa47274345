"""Final answers that are plain numbers after a `####` marker (the GSM8K convention, Cobbe et al. 2021)."""

import re
from decimal import Decimal, InvalidOperation

from data.tasks.task import Grade

_MARKED = re.compile(r"####[ \t]*([^\n]*)")
_NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def extract_marked_number(response: str) -> str | None:
    """The number after the last `####`, without thousands commas, `$` and `%`; None if there is none.

    Only the marked line is read: a number elsewhere in the text is not an answer.
    """
    marked = _MARKED.findall(response)
    if not marked:
        return None
    text = marked[-1].strip().replace("$", "").rstrip(".% ")
    match = _NUMBER.fullmatch(text)
    return match.group().replace(",", "") if match else None


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
