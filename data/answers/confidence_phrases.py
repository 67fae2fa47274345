"""Words that say how sure somebody is → a confidence, by the table of Band et al. 2024 (arXiv 2404.00474) for
biographies. What is said plainly has the confidence 1.

The table has no negations. "Not likely" counts as "unlikely" here, "not unlikely" as "likely", and what is "not
possible" or "impossible that" as "almost impossible"."""

import re

PHRASES = {
    "almost impossible": 0.05,
    "doubtful": 0.1,
    "improbable": 0.1,
    "unlikely": 0.15,
    "possible": 0.3,
    "possibly": 0.3,
    "toss-up": 0.5,
    "tossup": 0.5,
    "good chance": 0.65,
    "likely": 0.75,
    "probable": 0.75,
    "probably": 0.75,
    "almost certain": 0.95,
    "almost certainly": 0.95,
}
OPPOSITES = {
    "likely": "unlikely",
    "probable": "improbable",
    "possible": "almost impossible",
    "unlikely": "likely",
    "improbable": "probable",
    "doubtful": "likely",
    "impossible": "possible",
}
_PERCENT = re.compile(r"\b([0-9]+(?:\.[0-9]+)?)\s*(?:%|percent\b|per cent\b)")
_HOW = r"\s+(?:(?:very|at\s+all|all\s+that|so|too|quite|really)\s+)*"
_NEGATED = r"(?:(?<!\bif )\bnot|n't|\bnever)" + _HOW + "(" + "|".join(OPPOSITES) + r")\b"
_STATED = r"\b(" + "|".join(sorted(map(re.escape, PHRASES), key=len, reverse=True)) + r")\b"
_IMPOSSIBLE = r"\b(?:is|was|are|were|be|been|seems|seemed)\s+(impossible)\s+that\b"  # in a title it states nothing
_WORDS = re.compile(f"{_NEGATED}|{_STATED}|{_IMPOSSIBLE}", re.IGNORECASE)


def phrase_confidence(text: str) -> float:
    """Return the confidence that a claim's words state: its one percentage, else the lowest of its phrases, else 1.
    Several different percentages are no confidence: then the phrases count."""
    percentages = {float(number) / 100 for number in _PERCENT.findall(text)}
    if len(percentages) == 1 and (stated := percentages.pop()) <= 1:
        return stated
    return word_confidence(text)


def word_confidence(text: str) -> float:
    """Return the confidence that a claim's words state, percentages aside: the lowest of its phrases, else 1."""
    return min((_of_words(*found) for found in _WORDS.findall(text.replace("’", "'"))), default=1.0)


def _of_words(negated: str, stated: str, impossible: str) -> float:
    if impossible:
        return PHRASES["almost impossible"]
    return PHRASES[OPPOSITES[negated.lower()] if negated else stated.lower()]
