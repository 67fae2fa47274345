"""Math-Shepherd (Wang et al. 2024): JSON lines of `input`, `label`, `task`.

`input` is the question, a space, and steps that begin `Step 1: ` and end ` ки` (two Cyrillic letters, U+043A
U+0438); `label` is the same text with `+` or `-` in the place of each mark: `+` where some completion sampled
after the step reached the right answer, so the last label says whether the final answer is right. Without its
marks the text is question, border and solution: `question + info["border"] + "".join(steps) == text`, and the
newline between two steps belongs to the first of them. A last step without a mark has the label None.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from espalier.data.process_data.annotations import first_zero, judged_part, own_extra, the_only
from espalier.data.process_data.published import JsonRow, problem_key, take_known
from espalier.data.records import AnnotatedSolution, BadInput

MARK = "\u043a\u0438"
_MARKED = re.compile(f" ?{MARK}")
_FIRST = re.compile(r"\s*Step 1:")


@dataclass(frozen=True)
class MathShepherdRow:
    """The columns that are read."""

    input: str
    label: str


@dataclass(frozen=True)
class Named:
    """The set the problem comes from."""

    task: str = ""


def _signs(known: MathShepherdRow, place: str) -> list[str]:
    """Return the sign in the place of every mark. Raises BadInput where `label` is another text than `input`."""
    signs: list[str] = []
    at = 0
    for number, piece in enumerate(known.input.split(MARK)):
        if number:
            signs.append(known.label[at : at + 1])
            at += 1
        if not known.label.startswith(piece, at) or (signs and signs[-1] not in ("+", "-")):
            raise BadInput(f"{place}: label must be input with + or - for each mark '{MARK}', and differs at mark "
                           f"{number}: correct or remove this row")  # fmt: skip
        at += len(piece)
    if at != len(known.label):
        raise BadInput(f"{place}: label is longer than input: correct or remove this row")
    return signs


def _split(text: str) -> tuple[list[str], list[list[Any]]]:
    """Return (steps, [offset in the step, mark as it is written] of each marked step), from a text with its marks."""
    steps: list[str] = []
    marks: list[list[Any]] = []
    start = 0
    for mark in _MARKED.finditer(text):
        end = mark.end()
        while end < len(text) and text[end] == "\n":
            end += 1
        steps.append(text[start : mark.start()] + text[mark.end() : end])
        marks.append([mark.start() - start, mark.group()])
        start = end
    if text[start:].strip():
        steps.append(text[start:])
    elif steps:
        steps[-1] += text[start:]
    return steps, marks


def _plain_marks(steps: Sequence[str]) -> list[list[Any]]:
    """Say where the marks stand in the published way: a space and the mark before the newline that ends a step."""
    return [[len(step.rstrip("\n")), f" {MARK}"] for step in steps]


def _joined(steps: Sequence[str], marks: Sequence[Sequence[Any]], ends: Sequence[str]) -> str:
    """Return the text of the steps with `ends[i]` in the place of the letters of mark i."""
    parts: list[str] = []
    for index, step in enumerate(steps):
        if index < len(marks):
            offset, mark = marks[index]
            step = step[:offset] + mark.replace(MARK, ends[index]) + step[offset:]
        parts.append(step)
    return "".join(parts)


@dataclass(frozen=True)
class MathShepherd:
    """One record a row; the group is the task (`GSM8K`, `MATH`)."""

    name = "math_shepherd"
    is_array = False

    def read(self, row: JsonRow, key: str, place: str) -> list[AnnotatedSolution]:
        """Raises BadInput where the two texts differ, or where no `Step 1: ` ends the question."""
        known, extra = take_known(MathShepherdRow, row, place)
        signs = _signs(known, place)
        starts = list(_FIRST.finditer(known.input.partition(MARK)[0]))
        if not signs or not starts:
            raise BadInput(f"{place}: input has no '{'Step 1:' if signs else MARK}': correct or remove this row")
        question, border = known.input[: starts[-1].start()], re.match(r"\s*", starts[-1].group())
        assert border is not None
        start = starts[-1].start() + border.end()
        steps, marks = _split(known.input[start:])
        labels: list[float | None] = [float(sign == "+") for sign in signs]
        labels += [None] * (len(steps) - len(labels))
        info: dict[str, Any] = {
            "format": self.name,
            "row": key,
            "group": take_known(Named, extra, place)[0].task,
            "border": border.group(),
            "extra": extra,
        }
        if marks != _plain_marks(steps):
            info["marks"] = marks
        record = AnnotatedSolution(
            id=f"math_shepherd-{key}",
            problem_id=problem_key(question),
            question=question,
            steps=steps,
            labels=labels,
            first_error=first_zero(labels),
            is_correct=None if labels[-1] is None else labels[-1] == 1,
            info=info,
        )
        return [record]

    def write(self, records: Sequence[AnnotatedSolution], place: str) -> JsonRow:
        """Make the row of one record, up to the first step that was not judged; a label above 0 is `+`.

        Steps of other formats lose the white space around them and get `Step N: ` where they lack it. Raises BadInput
        where nobody judged the first step, marks and labels differ in number, or there are more records.
        """
        record = the_only(records, place)
        steps, labels = judged_part(record, place)
        is_own = record.info.get("format") == self.name
        if is_own:
            steps = record.steps
        else:
            named = [step.strip() for step in steps]
            named = [s if s.startswith(f"Step {n}: ") else f"Step {n}: {s}" for n, s in enumerate(named, 1)]
            steps = [step + "\n" for step in named[:-1]] + named[-1:]
        marks = record.info.get("marks", _plain_marks(steps)) if is_own else _plain_marks(steps)
        border = record.info.get("border", " ") if is_own else " "
        signs = ["+" if label > 0 else "-" for label in labels]
        if len(signs) != len(marks):
            raise BadInput(f"{place}: {len(marks)} marks and {len(signs)} labels: one label a marked step is wanted")
        start = record.question + border
        known = MathShepherdRow(
            input=start + _joined(steps, marks, [MARK] * len(marks)),
            label=start + _joined(steps, marks, signs),
        )
        others = own_extra(record, self.name) if is_own else {"task": record.info.get("group", "")}
        return {**vars(known), **others}
