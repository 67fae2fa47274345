"""Steps that are sub-questions, each with its answer.

Two published layouts. GSM8K's socratic solutions (Cobbe et al. 2021) give a line to each: the question, ` ** `,
the step. Least-to-most prompting (Zhou et al. 2023) and reasoning as planning (Hao et al. 2023) label them
`Sub-question 1:`, `Question 1.1:`, with the answer on the lines that follow.
"""

import re

from espalier.data.splitters.lines import line_starts, pieces

# Possessive quantifiers: white space that leads nowhere is not tried again.
_LABEL = (
    r"[-*#>• \t]*+(?i:sub[- ]?question|sub[- ]?problem|question)[ \t]*+"
    r"[0-9]++(?:\.[0-9]++)*+[ \t]*+\**+[ \t]*+[:.)]"
)
# ` ** ` after a question, or between words; not the power of two numbers.
_SOCRATIC = r"[^\n]*?(?:[?!.:][\"')]? \*\* |[^\W\d_] \*\* (?=[^\W\d_]{2}))"
_START = re.compile(f"^(?:{_LABEL}|{_SOCRATIC})", re.MULTILINE)


def split_sub_questions(response: str) -> list[str]:
    """Return one sub-question with its answer a step; newlines belong to the step before them.

    A step begins at a line with the label of a sub-question or with ` ** ` between question and step. Other
    lines (answers, continuations, `#### answer`) belong to the step before them. Text before the first
    sub-question is a step of its own; blank lines there belong to the first step. A response without any
    sub-question is split into lines.
    """
    starts = [match.start() for match in _START.finditer(response)]
    lines = line_starts(response)
    if not starts:
        return pieces(response, lines[1:])
    return pieces(response, [start for start in starts if start > lines[0]])
