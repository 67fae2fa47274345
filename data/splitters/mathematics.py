"""Steps of a mathematical solution: sentences and lines, never cut inside a formula.

The rules are those VinePPO (Kazemnejad et al. 2024) publishes for MATH, with two differences. A formula or a
LaTeX environment is never cut, however long: there, a line or an equals sign inside one could end a step. And
every text is split: there, a text under 20 characters or a formula nested in another was an error.
"""

import re
from bisect import bisect_left, bisect_right

from espalier.data.splitters.latex import find_blocks, outside
from espalier.data.splitters.lines import first_text, pieces

SHORTEST, LONGEST, SHORTEST_HALF = 20, 100, 40  # characters

_PERIOD = re.compile(r"\.\s+")
_BREAK = re.compile(r"\r?\n\s*")
# Where a long step may be halved, best first.
_SEPARATORS = (
    re.compile(r",(?=\s|\\[(\[]|\$)"),
    re.compile(r"(?=\sand\s)"),
    re.compile(r":(?=\s|\\[(\[]|\$)"),
    re.compile(r"(?=\sto\s)"),
)


def _ends_sentence(text: str, period: re.Match[str]) -> bool:
    """Say whether a capital follows, and more than two letters (or none) stand before the period."""
    if not text[period.end() : period.end() + 1].isupper():
        return False
    letters = 0
    while letters < 3 and text[period.start() - letters - 1 : period.start() - letters].isalpha():
        letters += 1
    return letters in (0, 3)


def _merge_short(text: str, cuts: list[int], formula_ends: set[int]) -> list[int]:
    """Return the cuts that stay when a short or blank piece joins the next one, and the last one the one before it.

    A piece that ends with a formula that ends with a period is long enough.
    """
    kept: list[int] = []
    start, begin = 0, first_text(text)
    for cut in cuts:
        if start < cut < len(text) and begin < cut and (cut - start >= SHORTEST or cut in formula_ends):
            kept.append(cut)
            start, begin = cut, first_text(text, cut)
    is_short = len(text) - start < SHORTEST and len(text) not in formula_ends
    if kept and (is_short or begin == len(text)):
        kept.pop()
    return kept


def _most_central(places: list[int], start: int, end: int) -> int | None:
    """Return the place nearest to the middle of a piece, the first of two; None where no place leaves two halves."""
    low = bisect_left(places, start + SHORTEST_HALF)
    high = bisect_right(places, end - SHORTEST_HALF)
    if low >= high:
        return None
    middle = bisect_left(places, (start + end) / 2, low, high)
    return min(places[max(middle - 1, low) : min(middle + 1, high)], key=lambda place: abs(2 * place - start - end))


def _halve(start: int, end: int, separators: list[list[int]]) -> list[int]:
    """Cuts of a long piece: at the most central place of the first kind of separator that leaves two long
    enough halves, then each half again."""
    cuts: list[int] = []
    todo = [(start, end)]
    while todo:
        start, end = todo.pop()
        if end - start <= LONGEST:
            continue
        for places in separators:
            cut = _most_central(places, start, end)
            if cut is not None:
                cuts.append(cut)
                todo += [(start, cut), (cut, end)]
                break
    return cuts


def split_math(response: str) -> list[str]:
    """Return steps of a solution with LaTeX in it.

    A step ends after a period that a capital follows (not after one or two letters: `Dr.`, `A.B.`), before a
    newline, and after a formula that ends with a period (`.$`, `.$$`, `.\\)`, `.\\]`). Pieces under 20
    characters join the next one, the last one the one before it; formulas that end with a period stand alone.
    Steps over 100 characters are halved at a comma, an "and", a colon or a "to" outside formulas while both
    halves have 40 characters. A newline belongs to the step after it.
    """
    blocks = find_blocks(response)
    formula_ends = {end for _, end in blocks if response.endswith((".$", ".$$", ".\\)", ".\\]"), max(end - 3, 0), end)}
    sentences = [match.start() + 1 for match in _PERIOD.finditer(response) if _ends_sentence(response, match)]
    breaks = [match.start() for match in _BREAK.finditer(response)]
    cuts = outside(sorted({*sentences, *breaks, *formula_ends}), blocks)
    cuts = _merge_short(response, cuts, formula_ends)
    separators = [outside((match.end() for match in kind.finditer(response)), blocks) for kind in _SEPARATORS]
    halves = [
        cut
        for start, end in zip([0, *cuts], [*cuts, len(response)], strict=True)
        for cut in _halve(start, end, separators)
    ]
    return pieces(response, sorted(cuts + halves))
