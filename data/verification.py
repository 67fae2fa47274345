"""How a generative verifier is asked about a solution, and how its verdict is read: text alone, no tokens.

A generative verifier (GenRM, Zhang et al. 2024, arXiv 2408.15240) is a language model that says "Yes" or "No" to a
question about a solution, at once or behind a rationale. With x the prompt, y a solution (or its first steps), q the
question and v a rationale:

| form | it reads | it writes |
|---|---|---|
| direct | x y, q | ` Yes` or ` No` |
| chain of thought | x y, the request for a check | v, q and ` Yes` or ` No` |

Its score is p(Yes) where the verdict stands, over p(Yes) + p(No) (`models.verdict_probs`).

**The verdict of a text** is the word behind the last time that it asks q, so that an earlier verdict that it takes back
does not count, and "(Yes/No)" in q is none. Markdown's marks may stand around it. A text without such a word has no
verdict: that is missing (None), never a No.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from espalier.data.records import BadInput

UNITS = ("solution", "step")
_OPEN_MARKS = re.compile(r"(?:^|(?<=\s))[*_]+\s*$")  # Markdown's, which the question closes
YES, NO = "yes", "no"


def verdict_name(is_yes: bool) -> str:
    """Return the name of a verdict in files."""
    return YES if is_yes else NO


@dataclass(frozen=True)
class Verdict:
    """`is_yes`; `before`: the text up to the verdict, without the blanks that belong to its first token; `rationale`:
    the text up to the question that it answers."""

    is_yes: bool
    before: str
    rationale: str


@dataclass(frozen=True)
class VerifierFormat:
    """`unit`: what a verdict is about, a whole "solution" or every "step" (the solution up to it).

    `request` opens a rationale, `question` is answered by the verdict; each of both begins a line. `yes` and `no` are
    all the spellings of a verdict that count; demonstrations write the first of each. Raises BadInput on another
    unit, a text that is empty, or spellings that cannot be distinguished.
    """

    unit: str
    question: str
    request: str
    yes: list[str] = field(default_factory=lambda: [" Yes", "Yes"])
    no: list[str] = field(default_factory=lambda: [" No", "No"])

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise BadInput(f"verifier.unit must be {' or '.join(UNITS)}, got '{self.unit}'")
        for name in ("question", "request"):
            if not getattr(self, name).strip():
                raise BadInput(f"verifier.{name} is empty: write what the verifier is asked with")
        words = self._words(self.yes), self._words(self.no)
        if not all(words) or "" in words[0] | words[1] or words[0] & words[1]:
            raise BadInput(f"verifier.yes={self.yes} and verifier.no={self.no} must hold words, and none the same")
        if self.question.strip() != self.question:
            raise BadInput("verifier.question begins or ends with white space: the verdict brings its own")

    @staticmethod
    def _words(spellings: Sequence[str]) -> set[str]:
        return {spelling.strip() for spelling in spellings}

    @cached_property
    def _verdict(self) -> re.Pattern[str]:
        either = "|".join(re.escape(word) for word in sorted(self._words(self.yes) | self._words(self.no)))
        return re.compile(rf"[\s*_]*({either})(?=[*_.!]*[ \t]*(?:\n|$))")

    def ask(self, prompt: str, steps: Sequence[str], has_rationale: bool) -> str:
        """Return what the verifier continues: with a verdict, or where it `has_rationale` with that."""
        asked = prompt + "".join(steps).rstrip() + "\n"
        return asked + (self.request + "\n" if has_rationale else self.question)

    def answer(self, is_yes: bool, rationale: str | None = None) -> str:
        """Return what it is to write then."""
        verdict = (self.yes if is_yes else self.no)[0]
        return verdict if rationale is None else f"{rationale.strip()}\n{self.question}{verdict}"

    def read(self, text: str) -> Verdict | None:
        """Return the last verdict of a text; None where there is no question, or what stands behind the last one is no
        verdict alone in its line ("No doubt: it is right" is none)."""
        place = text.rfind(self.question)
        match = self._verdict.match(text, place + len(self.question)) if place >= 0 else None
        if match is None:
            return None
        rationale = _OPEN_MARKS.sub("", text[:place]).strip()
        return Verdict(match[1] in self._words(self.yes), text[: match.start(1)].rstrip(" "), rationale)

    def asks_twice(self, verdict: Verdict) -> bool:
        """Say whether the rationale holds a verdict of its own before the one that counts."""
        return self.question in verdict.rationale
