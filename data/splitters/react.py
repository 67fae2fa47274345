"""Steps of a response in the ReAct layout (Yao et al. 2023): Thought, Action, Observation, and State.

    Thought 1: …            a prompt that ends in `Thought 1:` leaves this first label out of the response
    Action 1: …
    Observation 1: …
    Action 4: Finish[The answer is B.]

The grammar and the cleaning are those of planning-based trajectory collection (Jiao et al. 2024).
"""

import re
from dataclasses import dataclass

from espalier.data.splitters.lines import first_text, pieces

SHORTEST_CONTENT = 5  # characters; a labelled step with fewer says nothing
FINISH = "Finish["  # the published runs write `Finish[The answer is B.]`, others `Finish[B]`

_LABEL = re.compile(
    r"^[ \t]*(?P<type>Thought|Action|Observation|State)(?:[ \t]+(?P<number>[0-9]{1,9}))?[ \t]*"
    r"(?::|(?=Finish\[))",
    re.MULTILINE,
)
_OTHER_QUESTION = re.compile(r"^[ \t]*Context:", re.MULTILINE)


@dataclass(frozen=True)
class ReactStep:
    """One step: its line, the unlabelled lines and the blank lines after it; newlines included.

    `type` is Thought, Action, Observation or State. `index` is the number its label bears, 1 for a first line
    without a label (it is the content of Thought 1), None for a label without a number. `is_finish`: an Action
    whose line gives the final answer, `Finish[…`. `is_duplicate`: an earlier step has its type
    and content, white space aside. `is_short`: fewer than 5 characters of content, except for Thought 1. `is_labelled`:
    its line has a label; only a first step may have none.
    """

    text: str
    type: str
    index: int | None
    is_finish: bool = False
    is_duplicate: bool = False
    is_short: bool = False
    is_labelled: bool = True


@dataclass(frozen=True)
class CleanedReact:
    """A cleaned response, or None and why it was rejected; `reason` is "" where it was not."""

    text: str | None
    reason: str = ""


def react_steps(response: str) -> list[ReactStep]:
    """Return the steps of a response; their texts join to it exactly, nothing is left out, only flagged.

    A step begins at a line with a label. Text before the first label is Thought 1; blank lines there belong to
    the first step.
    """
    labels = list(_LABEL.finditer(response))
    has_bare_start = bool(response) and not (labels and labels[0].start() <= first_text(response))
    starts = [label.start() for label in labels]
    texts = pieces(response, starts if has_bare_start else starts[1:])
    marks = [None, *labels] if has_bare_start else labels
    seen: set[tuple[str, str]] = set()
    steps: list[ReactStep] = []
    end = 0
    for text, label in zip(texts, marks, strict=True):
        kind, number = ("Thought", "1") if label is None else label.group("type", "number")
        index = None if number is None else int(number)
        end += len(text)
        content = text if label is None else response[label.end() : end]
        key = (kind, " ".join(content.split()))
        steps.append(
            ReactStep(
                text=text,
                type=kind,
                index=index,
                is_finish=kind == "Action" and FINISH in text.strip().partition("\n")[0],
                is_duplicate=key in seen,
                is_short=len(key[1]) < SHORTEST_CONTENT and (kind, index) != ("Thought", 1),
                is_labelled=label is not None,
            )
        )
        seen.add(key)
    return steps


def split_react(response: str) -> list[str]:
    """Return the texts of `react_steps`."""
    return [step.text for step in react_steps(response)]


def cleaned_react(response: str, *, min_steps: int = 0, joins_lines: bool = True) -> CleanedReact:
    """Return the response up to its one Finish line, or why it is not to be trained on.

    What follows a line that begins with `Context:` (the model goes on to another question) is cut off. Exactly
    one step may be the Finish step. With `joins_lines` blank lines go, unlabelled lines join the line before
    them by a space (which must not make a second Finish step), and labelled steps with fewer than 5 characters
    of content go; without it (the strict form) lines stay as they are. What follows the Finish line goes too,
    and white space at both ends. A response of fewer than `min_steps` lines is rejected.
    """
    other = _OTHER_QUESTION.search(response)
    steps = react_steps(response[: other.start()] if other else response)
    if not any(step.text.strip() for step in steps):
        return CleanedReact(None, "the response is empty")
    num_finish = sum(step.is_finish for step in steps)
    if num_finish != 1:
        return CleanedReact(None, f"{num_finish or 'no'} Finish step{'s' if num_finish else ''}, one is wanted")
    lines: list[str] = []
    for step in steps:
        own = [line.strip() if joins_lines else line for line in step.text.split("\n")]
        if step.is_finish:
            own = _finish_lines(own)
        if not joins_lines:
            lines += own if own[-1] else own[:-1]
        elif not step.is_short:
            lines.append(" ".join(line for line in own if line))
        if step.is_finish:
            break
    num_lines = sum(bool(line.strip()) for line in lines)
    if num_lines < min_steps:
        return CleanedReact(None, f"{num_lines} lines, at least {min_steps} are wanted")
    text = "\n".join(lines).strip()
    num_finish = sum(step.is_finish for step in react_steps(text))
    if num_finish != 1:  # joined lines can make a second one: "Action 2: Read[x]", "Finish[…"
        return CleanedReact(None, f"{num_finish} Finish steps once lines are joined, one is wanted")
    return CleanedReact(text)


def _finish_lines(lines: list[str]) -> list[str]:
    """Return the lines of a Finish step up to the one that closes its bracket; the first alone where none does."""
    first = next(number for number, line in enumerate(lines) if line.strip())
    for number in range(first, len(lines)):
        if "]" in lines[number].partition(FINISH)[2 if number == first else 0]:
            return lines[: number + 1]
    return lines[: first + 1]


def clean_react_response(response: str, *, min_steps: int = 0, joins_lines: bool = True) -> str | None:
    """Return the text of `cleaned_react`, None where it rejects the response."""
    return cleaned_react(response, min_steps=min_steps, joins_lines=joins_lines).text
