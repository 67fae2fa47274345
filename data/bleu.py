"""BLEU (Papineni et al. 2002): how much of one text stands in others.

It is the geometric mean of the clipped n-gram precisions, n = 1 to 4 (to the text's number of words where that is
less), times exp(1 - r / c) where it has fewer words (c) than the nearest reference (r); 0 where one precision is 0:
nothing is smoothed. Words are runs of letters and digits, and single other signs.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from statistics import fmean

ORDER = 4
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Grams:
    """The n-grams of a text, n = 1 to 4, and its number of words."""

    length: int
    counts: tuple[Counter[tuple[str, ...]], ...]


def grams(text: str) -> Grams:
    """Count the n-grams of a text."""
    words = _WORD.findall(text)
    counts = (Counter(zip(*(words[start:] for start in range(n)), strict=False)) for n in range(1, ORDER + 1))
    return Grams(len(words), tuple(counts))


def bleu(text: Grams, references: Sequence[Grams]) -> float:
    """Return the BLEU of a text in [0, 1]; 0 for one without words."""
    if not text.length:
        return 0.0
    logs = []
    for n in range(min(ORDER, text.length)):
        most = reduce(or_, (reference.counts[n] for reference in references))
        matches = sum((text.counts[n] & most).values())
        if not matches:
            return 0.0
        logs.append(math.log(matches / text.counts[n].total()))
    nearest = min((abs(reference.length - text.length), reference.length) for reference in references)[1]
    return math.exp(fmean(logs) + min(0.0, 1 - nearest / text.length))
