r"""One rationale with a verdict per step, as generative process reward models write it (ThinkPRM, Khalifa et al. 2025,
arXiv 2504.16828; GenPRM, Zhao et al. 2025, arXiv 2504.00891): how it is asked for, and which verdict is of which step.

The verifier reads the problem and the numbered steps; it writes a section for each, which begins a line with its
heading, and in the section a verdict (`Step 2: ... The step is \boxed{incorrect}`). It may stop behind the first wrong
step: nothing is known of the steps behind it.

A verdict that is put down to another step than it was meant for is the worst error here: it looks like any other. So
the sections must count 1, 2, 3, ... with one verdict each, none beyond our last step, and none missing before a wrong
step; with `quotes_steps` each begins with the very text of its step. Steps that number themselves otherwise are not
aligned at all. What does not fit is a `Mismatch`, by its reason, and never a verdict.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean

from espalier.data.records import BadInput

EACH_STEP = "each_step"
_NUMBER = "{number}"
_MARKS = r"[ \t*_#>-]*"  # Markdown's, around a heading
_WHOLE = r"(?:(?<!\w)|(?!\w|[.,]\d))"  # no word or number goes on


@dataclass(frozen=True)
class StepVerdict:
    """Of one step: `is_yes`, and `before`: the rationale up to the verdict's word."""

    is_yes: bool
    before: str


@dataclass(frozen=True)
class Mismatch:
    """Why a rationale cannot be aligned."""

    reason: str


CUT = Mismatch("cut")
NO_SECTION = Mismatch("no step is spoken of")
OTHER_NUMBERS = Mismatch("steps are not counted 1, 2, 3, ...")
TOO_MANY = Mismatch("more steps than the solution has")
TOO_FEW = Mismatch("it stops though no step is wrong")
NO_VERDICT = Mismatch("a step without a verdict")
CONTRADICTION = Mismatch("two verdicts about one step")
NO_QUOTE = Mismatch("a step is not quoted as it is")
OWN_NUMBERS = Mismatch("the solution numbers its steps otherwise")


@dataclass(frozen=True)
class StepVerdictFormat:
    """`heading` opens what is said of a step, with {number} in it; a verdict is one of the words `yes` or `no` between
    `opening` and `closing`; `request` asks for all that. `quotes_steps`: a section repeats its step before it judges.

    Raises BadInput on a heading without {number}, an empty opening, and words that cannot be distinguished.
    """

    request: str
    heading: str = "Step {number}:"
    opening: str = "\\boxed{"
    closing: str = "}"
    yes: list[str] = field(default_factory=lambda: ["correct"])
    no: list[str] = field(default_factory=lambda: ["incorrect"])
    quotes_steps: bool = True
    unit: str = field(default=EACH_STEP, init=False)

    def __post_init__(self) -> None:
        if self.heading.count(_NUMBER) != 1 or not self.opening.strip():
            raise BadInput(f"verifier.heading must hold {_NUMBER} once and verifier.opening a text, got "
                           f"'{self.heading}' and '{self.opening}'")  # fmt: skip
        if not self.yes or not self.no or set(self.yes) & set(self.no):
            raise BadInput(f"verifier.yes={self.yes} and verifier.no={self.no} must hold words, and none the same")

    @cached_property
    def _heading(self) -> re.Pattern[str]:
        before, after = (re.escape(part.strip()) for part in self.heading.split(_NUMBER))
        return re.compile(rf"^{_MARKS}{before}[ \t]*(\d+)[ \t]*{after}", re.MULTILINE)

    @cached_property
    def _verdict(self) -> re.Pattern[str]:
        words = "|".join(re.escape(word) for word in sorted([*self.yes, *self.no], key=len, reverse=True))
        return re.compile(rf"{re.escape(self.opening)}({words}){re.escape(self.closing) or _WHOLE}")

    def ask(self, prompt: str, steps: Sequence[str], has_rationale: bool = True) -> str:
        """Return what the verifier continues with its rationale."""
        return f"{prompt}{self.numbered(steps)}{self.request}\n"

    def numbered(self, steps: Sequence[str]) -> str:
        """Return the steps as lines, each behind its heading."""
        return "".join(f"{self.head(n)} {step.strip()}\n" for n, step in enumerate(steps, 1))

    def head(self, number: int) -> str:
        """Return the heading of a step, counted from 1."""
        return self.heading.replace(_NUMBER, str(number))

    def verdict(self, is_yes: bool) -> str:
        """Return the verdict as demonstrations write it."""
        return f"{self.opening}{(self.yes if is_yes else self.no)[0]}{self.closing}"

    def answer(self, steps: Sequence[str], verdicts: Sequence[bool]) -> str:
        """Return what it is to write about the first steps, one verdict each."""
        return "\n".join(f"{self.head(n)} {step.strip()} {self.verdict(is_yes)}"
                         for n, (step, is_yes) in enumerate(zip(steps, verdicts, strict=False), 1))  # fmt: skip

    def speaks_in(self, text: str) -> bool:
        """Say whether a text holds a verdict in the words of this format."""
        return self._verdict.search(text) is not None

    def read(self, text: str, steps: Sequence[str], is_whole: bool = True) -> list[StepVerdict] | Mismatch:
        """Return the verdicts of the first steps, in order: of all of them, or up to the first wrong one. `is_whole`:
        the text ended by itself."""
        if not is_whole:
            return CUT
        if any(int(match[1]) != n for n, step in enumerate(steps, 1) for match in self._heading.finditer(step)):
            return OWN_NUMBERS
        heads = list(self._heading.finditer(text))
        numbers = [int(match[1]) for match in heads]
        if not heads:
            return NO_SECTION
        if numbers != list(range(1, len(heads) + 1)):
            return OTHER_NUMBERS
        if len(heads) > len(steps):
            return TOO_MANY
        ends = [match.start() for match in heads[1:]] + [len(text)]
        verdicts: list[StepVerdict] = []
        for match, end, step in zip(heads, ends, steps, strict=False):
            found = self._read_section(text, match.end(), end, step)
            if isinstance(found, Mismatch):
                return found
            verdicts.append(found)
        return verdicts if len(verdicts) == len(steps) or not verdicts[-1].is_yes else TOO_FEW

    def _read_section(self, text: str, start: int, end: int, step: str) -> StepVerdict | Mismatch:
        if self.quotes_steps:
            quote = re.compile(r"[ \t*_]*" + r"\s+".join(map(re.escape, step.split())) + _WHOLE).match(text, start, end)
            if quote is None:
                return NO_QUOTE
            start = quote.end()
        matches = list(self._verdict.finditer(text, start, end))
        if not matches:
            return NO_VERDICT
        said = {match[1] in self.yes for match in matches}
        return CONTRADICTION if len(said) == 2 else StepVerdict(said.pop(), text[: matches[-1].start(1)])


def state_scores(verdicts: Sequence[float], num_steps: int) -> list[float]:
    """Return the score in [0, 1] after each step: the lowest verdict up to it, as one wrong step spoils all behind it;
    steps that the verifier has not come to have that of the last one."""
    scores: list[float] = []
    for n in range(num_steps):
        own = verdicts[n] if n < len(verdicts) else 1.0
        scores.append(min(own, scores[-1]) if scores else own)
    return scores


def mean_state_scores(rationales: Sequence[Sequence[float]], num_steps: int) -> list[float]:
    """Average `state_scores` over the rationales of a solution; [] where none can be read."""
    return [fmean(column) for column in zip(*(state_scores(own, num_steps) for own in rationales), strict=True)]
