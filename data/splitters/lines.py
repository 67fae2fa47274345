"""Steps that are lines, in two conventions of where the newline goes and what a blank line is; or paragraphs."""

import re
from bisect import bisect_left
from collections.abc import Iterable
from itertools import pairwise

# The first character of every line that is not blank (`.` stops at a newline alone, as `^` does).
_LINE_WITH_TEXT = re.compile(r"^[^\S\n]*\S", re.MULTILINE)
_AFTER_BLANK = re.compile(r"\n[^\S\n]*\n")
_TEXT = re.compile(r"\S")
_NEWLINE = re.compile(r"\r?\n")
_ANSWER = re.compile(r"\s*####(?!#)")


def pieces(text: str, cuts: Iterable[int]) -> list[str]:
    """Return the text cut at character offsets; `cuts` never fall, and those that would leave an empty piece do
    nothing."""
    lines: list[str] = []
    start = 0
    for cut in cuts:
        if start < cut < len(text):
            lines.append(text[start:cut])
            start = cut
    return [*lines, text[start:]] if text else []


def first_text(text: str, start: int = 0) -> int:
    """Return the place of the first character from `start` on that is no white space; the text's length if none."""
    match = _TEXT.search(text, start)
    return match.start() if match else len(text)


def line_starts(text: str) -> list[int]:
    """Say where the lines that are not blank start."""
    return [line.start() for line in _LINE_WITH_TEXT.finditer(text)]


def split_lines(response: str) -> list[str]:
    """Return one step a line, newline included; blank lines belong to the step before them, leading ones to the first.

    `"".join(split_lines(r)) == r`, and a response that is not empty has at least one step.
    """
    return pieces(response, line_starts(response)[1:])


def split_paragraphs(response: str) -> list[str]:
    """Return one step a paragraph, the blank lines behind it included; leading ones belong to the first.

    `"".join(split_paragraphs(r)) == r`, and a response that is not empty has at least one step.
    """
    starts = line_starts(response)
    behind = (blank.end() for blank in _AFTER_BLANK.finditer(response))
    places = (bisect_left(starts, end) for end in behind)
    return pieces(response, (starts[place] for place in places if 0 < place < len(starts)))


def split_gsm8k(response: str) -> list[str]:
    """Return one step a line, as VinePPO (Kazemnejad et al. 2024) cuts GSM8K: a newline opens the step after it.

    Leading blank lines belong to the first step with text, later ones are steps of their own. A line that
    begins with `####` (the answer) belongs to the last step with text before it, and blank lines around it
    do so too. Any number of `####` lines is split; what follows one of them is a step again.
    """
    starts = [0, *(newline.start() for newline in _NEWLINE.finditer(response)), len(response)]
    cuts: list[int] = []
    num_blank = 0  # blank steps at the end of `cuts`
    has_text = is_after_answer = False
    for start, end in pairwise(starts):
        line = response[start:end]
        is_blank = not line or line.isspace()
        if _ANSWER.match(line):
            if has_text and num_blank:
                del cuts[-num_blank:]
            has_text = is_after_answer = True
            num_blank = 0
        elif is_blank:
            if has_text and not is_after_answer:
                cuts.append(start)
                num_blank += 1
        else:
            if has_text:
                cuts.append(start)
            has_text, is_after_answer, num_blank = True, False, 0
    return pieces(response, cuts)
