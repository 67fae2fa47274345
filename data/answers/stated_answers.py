"""Answers that a response states with a probability each, in words that a rule can read.

Three forms: an answer and its verbalised confidence in lines of their own; the same between tags, behind the reasoning,
as published for reinforcement learning with calibration rewards (RLCR, Damani et al. 2025, arXiv 2507.16806); and a
paragraph that names alternatives with a percentage behind each, as with linguistic calibration (Band et al. 2024, arXiv
2404.00474):

    Answer: fish                        It is fish (60%), or else rice (30%) or eggs (10%).
    Confidence: 60%

    <think> It swims. </think> <answer> fish </answer> <analysis> Or not. </analysis> <confidence> 0.6 </confidence>

Between tags the confidence is a number from 0 to 1. The analysis, and the reasoning with its tags, may be left out;
nothing else stands before, between or behind the tags. A response with one of them that is not of this form offers
nothing.

A comma, semicolon or bracket begins another alternative: a paragraph cannot offer "Washington, D.C.", and a gold of
that kind has 0 in it; an answer line can, and so can tags. A paragraph in free words needs models to read it
(`rewards.model_forecasts`).
"""

import re
from dataclasses import dataclass

from espalier.data.answers.final_answer import after_reasoning
from espalier.data.answers.grade import Gold
from espalier.data.answers.short_answers import golds, short_key

_ANSWER = re.compile(r"^[ \t]*Answer:[ \t]*(\S[^\n]*?)[ \t]*$", re.MULTILINE)
_CONFIDENCE = re.compile(r"^[ \t]*Confidence:[ \t]*([0-9]+(?:\.[0-9]+)?)[ \t]*(%?)[ \t]*$", re.MULTILINE)
_LABEL = re.compile(r"^[^\w\n]*Confidence\b(?=[^\w\n]*[:=])[^\n]*$", re.MULTILINE | re.IGNORECASE)
_MENTION = re.compile(r"\bconfiden(?:ce|t)\b", re.IGNORECASE)
_ALTERNATIVE = re.compile(r"([^\s,;.()][^,;()\n]*?)\s*\(\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*\)")
_TAG = re.compile(r"</?(?:answer|analysis|confidence)\b", re.IGNORECASE)
_INSIDE = r"((?:(?!</?(?:think|answer|analysis|confidence)\b).)*)"
_TAGGED = re.compile(
    rf"\s*<answer>{_INSIDE}</answer>\s*(?:<analysis>{_INSIDE}</analysis>\s*)?"
    r"<confidence>\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*</confidence>\s*",
    re.DOTALL,
)
_OPENING = re.compile(r"(?:it is|or else|either|perhaps|maybe|or|and|else)\s+", re.IGNORECASE)


@dataclass(frozen=True)
class Forecast:
    """What a reader of a response believes. `answers` are those the response offers, each once, in its order;
    `probabilities` [A] are theirs in [0, 1]; `gold` is that of the gold answer, offered or not."""

    answers: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    gold: float = 0.0

    @property
    def most_confident(self) -> tuple[str | None, float]:
        """The answer with the highest probability (the first of equals) and that probability; without an answer (None,
        1): nothing said counts as wrong with full confidence."""
        if not self.answers:
            return None, 1.0
        best = max(range(len(self.answers)), key=lambda index: self.probabilities[index])
        return self.answers[best], self.probabilities[best]


def stated_answers(response: str) -> list[tuple[str, float]]:
    """Return (answer, probability) in the response's order, each answer once: what is said first holds.

    Tags are read where there is one behind the reasoning. An answer line has the probability 1 where the response
    speaks of no confidence. Empty where nothing can be read, where a confidence is in a form that cannot be read
    ("confidence: 60%"), where lines contradict each other (two different answers or confidences), and where a number is
    no probability (150%).
    """
    found = _stated(response)
    if not all(0 <= probability <= 1 for _, probability in found):
        return []
    unique: dict[str, tuple[str, float]] = {}
    for answer, probability in found:
        if key := short_key(answer):
            unique.setdefault(key, (answer, probability))
    return list(unique.values())


def _stated(response: str) -> list[tuple[str, float]]:
    shown = after_reasoning(response)
    if _TAG.search(response if shown is None else shown):
        tagged = _TAGGED.fullmatch(shown or "")
        return [(tagged[1].strip(), float(tagged[3]))] if tagged else []
    lines = _ANSWER.findall(response)
    return _lines_stated(response, lines) if lines else _alternatives_stated(response)


def _lines_stated(response: str, answers: list[str]) -> list[tuple[str, float]]:
    confidences = {float(number) / 100 if percent else float(number)
                   for number, percent in _CONFIDENCE.findall(response)}  # fmt: skip
    if len(set(answers)) > 1 or len(confidences) > 1:
        return []
    labels = [match[0] for match in _LABEL.finditer(response)]
    if not all(map(_CONFIDENCE.fullmatch, labels)) or (not confidences and _MENTION.search(response)):
        return []  # one that cannot be read is no certainty
    return [(answers[0], next(iter(confidences), 1.0))]


def _alternatives_stated(response: str) -> list[tuple[str, float]]:
    found = []
    for text, number in _ALTERNATIVE.findall(response):
        answer = text
        while opening := _OPENING.match(answer):
            answer = answer[opening.end() :]
        found.append((answer.strip(), float(number) / 100))
    return found


def stated_forecast(response: str, gold: Gold) -> Forecast:
    """Return what a reader believes who takes stated probabilities at their word; a gold that is not stated has 0."""
    stated = stated_answers(response)
    accepted = {short_key(one) for one in golds(gold)}
    believed = sum(probability for answer, probability in stated if short_key(answer) in accepted)
    answers, probabilities = tuple(answer for answer, _ in stated), tuple(probability for _, probability in stated)
    return Forecast(answers, probabilities, min(believed, 1.0))
