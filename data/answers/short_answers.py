"""Short free-text answers with aliases: exact match and token F1 after SQuAD's normalisation (Rajpurkar et al.
2016): lower case, no punctuation, no articles, single spaces."""

import re
import string
from collections import Counter
from collections.abc import Sequence

from espalier.data.answers.final_answer import final_answer, visible_part
from espalier.data.answers.grade import Gold, Grade
from espalier.data.answers.plain_numbers import read_number

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_AROUND = "*_`\"'()[]{} "  # what may stand around a number
_LEADING_ZERO = re.compile(r"0[0-9]")
_MAX_CHARS = 2000


def normalise(text: str) -> str:
    """Return the text as it is compared."""
    plain = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", plain).split())


def short_key(text: str) -> str:
    """Return what two short answers are compared by: the normalised text, in which numbers keep their sign, decimal
    point and fraction (-5 is not 5, 1.5 is not 15; 1,000 and 18.0 are 1000 and 18); of a text that normalising leaves
    nothing of (`A`, `the`, `-`) the casefolded text. "" of blanks alone."""
    bare = text.strip().casefold()
    return _number_key(bare) or " ".join(_tokens(bare)) or bare.strip(string.punctuation + " ") or bare


def _number_key(text: str) -> str | None:
    """Return the value of a text that is a number; None of others, and of codes such as 007."""
    text = text.replace("−", "-").strip(_AROUND).rstrip(".,;:!?").strip(_AROUND)
    number = None if _LEADING_ZERO.match(text) else read_number(text)
    return None if number is None else str(number.value)


def _tokens(text: str) -> list[str]:
    """Return the normalised words; those that are numbers as their values."""
    return [token for word in text.split() for token in (_number_key(word) or normalise(word)).split()]


def token_f1(prediction: str, gold: Gold) -> float:
    """Return the largest F1 of normalised tokens over the gold answers, numbers and words that normalising
    leaves nothing of as in `short_key`; 1 where both are empty."""
    return max((_f1(short_key(prediction), short_key(one)) for one in golds(gold)), default=0.0)


def _f1(prediction: str, gold: str) -> float:
    ours, theirs = prediction.split(), gold.split()
    if not ours or not theirs:
        return float(ours == theirs)
    shared = sum((Counter(ours) & Counter(theirs)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(ours), shared / len(theirs)
    return 2 * precision * recall / (precision + recall)


def golds(gold: Gold) -> Sequence[str]:
    """Return the gold answers as a list, empty ones left out."""
    return [one for one in ([gold] if isinstance(gold, str) else gold) if one.strip()]


def grade_short_answer(prediction: str, gold: Gold) -> Grade:
    """Return kind `short_answer`: right where the answer, or what follows "the answer is" in its sentence or its line,
    equals a gold answer."""
    accepted = {short_key(one) for one in golds(gold)}
    visible = visible_part(prediction)
    if visible is None:
        return Grade(None, False, "the reasoning is not closed")
    if not accepted:
        return Grade(None, False, "there is no gold answer")
    text = visible.strip()[-_MAX_CHARS:]
    marked = final_answer(text)
    candidates = [text, *(one for one in (marked.text, marked.line) if one)]
    for candidate in candidates:
        if short_key(candidate) in accepted:
            return Grade(candidate.strip(), True, "exact match")
    if not any(char.isalnum() for char in text):
        return Grade(None, False, "an empty answer")
    answer = (marked.text or text).strip()
    return Grade(answer[:200], False, f"no exact match; token F1 {token_f1(answer, gold):.3f}")
