"""Do two answers say the same, without a gold answer: what votes are joined by.

The grader's own equality (`data.answers.math_answers`), which runs what is symbolic in its pool of processes that are
killed at a deadline, asked in both directions: graded against a gold answer an answer may leave off a percent sign or
name an interval in its own way, and neither makes two answers the same. Words and letters are no mathematics: they are
the same where they are written alike, which the caller knows.
"""

import re
from functools import lru_cache

from espalier.data.answers.math_answers import compare_math

_MATHEMATICS = re.compile(r"[\d\\=+*/^]")
_MAX_CHARS = 400  # an answer to vote on is short; a longer one is a text


def is_mathematical(answer: str) -> bool:
    """Say whether a text holds anything to compute with: a digit, a LaTeX command or an operator."""
    return len(answer) <= _MAX_CHARS and _MATHEMATICS.search(answer) is not None


@lru_cache(maxsize=65536)
def is_same_answer(one: str, other: str) -> bool:
    """Say whether each would be graded right against the other. False where one is no mathematics, cannot be read, or
    has no verdict within the deadline of a comparison."""
    if not (is_mathematical(one) and is_mathematical(other)):
        return False
    return compare_math(one, other)[0] == "right" and compare_math(other, one)[0] == "right"
