"""A problem and the steps of a solution → the token ids that a published model reads, and the place of every step.

A layout is called with (tokenizer, question, steps); white space around a step is not part of it. Every layout refuses
what it cannot read one place per step of: a tag that the text holds already, a token that the tokenizer does not have.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from espalier.data.prompts import write_chat
from espalier.data.records import BadInput
from espalier.data.steps import StepTokens


@dataclass(frozen=True)
class Reading:
    """`ids` of the whole row; `places`: for each step the place in it (from 0) whose output is the step's. `start`: the
    first token of the solution, where a layout has one (what a log-ratio of two policies begins with)."""

    ids: list[int]
    places: list[int]
    start: int = 0

    def tokens(self, name: str) -> StepTokens:
        """Return the same as a prompt and a response whose steps end at the places; errors call it by its name."""
        ends = [place + 1 - self.start for place in self.places]
        return StepTokens(self.ids[: self.start], self.ids[self.start :], ends, name)


class Layout(Protocol):
    """Rows of one kind of model."""

    def __call__(self, tokenizer: Any, question: str, steps: Sequence[str]) -> Reading:
        """Return one row. Raises BadInput."""


def only_id(tokenizer: Any, text: str) -> int:
    """Return the id of a text that is one token by itself. Raises BadInput where it is none, or several."""
    return _one(tokenizer, text, list(tokenizer(text, add_special_tokens=False).input_ids))


def mark_id(tokenizer: Any, text: str) -> int:
    """Return the id of a text that is one token behind others. Raises BadInput where it is none, or several."""
    before, whole = (list(tokenizer(one, add_special_tokens=False).input_ids) for one in (".", f".{text}"))
    if whole[: len(before)] == before:
        return _one(tokenizer, text, whole[len(before) :])
    return only_id(tokenizer, text)


def _one(tokenizer: Any, text: str, ids: list[int]) -> int:
    if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
        raise BadInput(f"{text!r} is {len(ids)} tokens of this tokenizer, or an unknown one: this is another model "
                       "than the layout's")  # fmt: skip
    return int(ids[0])


def places_of(ids: Sequence[int], token: int, steps: Sequence[str], what: str) -> list[int]:
    """Return where `token` stands, which must be once for each step."""
    places = [place for place, one in enumerate(ids) if one == token]
    if len(places) != len(steps):
        raise BadInput(f"{len(places)} tokens {what} mark {len(steps)} steps: the text holds the mark itself, or the "
                       "tokenizer joins it with its neighbours")  # fmt: skip
    return places


def written_with(text: str, question: str) -> str:
    """Return the text with the question where `{question}` stands; other braces stay, as LaTeX has many."""
    return text.replace("{question}", question)


@dataclass(frozen=True)
class Tagged:
    """Plain text with a tag behind every step. `before` is written with the question, `after` each step. Read at the
    one token of `tag` ("": of `after`). Steps that do not say their number get "Step i: " where it `numbers` them."""

    before: str
    after: str
    between: str = ""
    numbers: bool = False
    tag: str = ""

    def __call__(self, tokenizer: Any, question: str, steps: Sequence[str]) -> Reading:
        """See `Layout`."""
        written = [step.strip() for step in steps]
        if self.numbers:
            written = numbered(written)
        text = written_with(self.before, question) + self.between.join(step + self.after for step in written)
        ids = list(tokenizer(text).input_ids)
        return Reading(ids, places_of(ids, mark_id(tokenizer, self.tag or self.after), steps, repr(self.after)))


def numbered(steps: Sequence[str]) -> list[str]:
    """Write "Step i: " before every step that does not begin with it."""
    return [
        step if step.startswith(f"Step {number}") else f"Step {number}: {step}" for number, step in enumerate(steps, 1)
    ]


def _opening(system: str) -> list[dict[str, str]]:
    """Return a system turn, none of an empty text."""
    return [{"role": "system", "content": system}] if system else []


@dataclass(frozen=True)
class ChatTagged:
    """One chat turn of the solution, a special token behind every step. `system`: the first turn, "" for none."""

    tag: str
    system: str = ""

    def __call__(self, tokenizer: Any, question: str, steps: Sequence[str]) -> Reading:
        """See `Layout`."""
        turns = [*_opening(self.system), {"role": "user", "content": question}]
        turns.append({"role": "assistant", "content": "".join(step.strip() + self.tag for step in steps)})
        ids = list(tokenizer(write_chat(tokenizer, turns, asks=False), add_special_tokens=False).input_ids)
        return Reading(ids, places_of(ids, only_id(tokenizer, self.tag), steps, repr(self.tag)))


@dataclass(frozen=True)
class ChatWhole:
    """One chat turn of the solution, an empty line between its steps; every step is read at the last token of the row:
    an outcome reward model, which says one thing of the whole. `system`: the first turn, "" for none."""

    between: str = "\n\n"
    system: str = ""

    def __call__(self, tokenizer: Any, question: str, steps: Sequence[str]) -> Reading:
        """See `Layout`."""
        solution = self.between.join(step.strip() for step in steps)
        turns = [*_opening(self.system), {"role": "user", "content": question}]
        turns.append({"role": "assistant", "content": solution})
        ids = _written(tokenizer, turns, asks=False)
        return Reading(ids, [len(ids) - 1] * len(steps))


@dataclass(frozen=True)
class ChatTurns:
    """A turn of the user for every step (the first behind the question and `after_question`), answered by `answer`; the
    token before each answer is read. All turns in one row: every part of the talk must be written as the beginning of
    the whole. `system`: the first turn, "" for none."""

    answer: str = "+"
    after_question: str = " "
    system: str = ""

    def __call__(self, tokenizer: Any, question: str, steps: Sequence[str]) -> Reading:
        """See `Layout`."""
        turns = _opening(self.system)
        written: list[list[int]] = []
        asked: list[list[int]] = []
        for number, step in enumerate(steps):
            said = step.strip() if number else f"{question}{self.after_question}{step.strip()}"
            turns.append({"role": "user", "content": said})
            asked.append(_written(tokenizer, turns, asks=True))
            turns.append({"role": "assistant", "content": self.answer})
            written.append(_written(tokenizer, turns, asks=False))
        ids, answer = written[-1], only_id(tokenizer, self.answer)
        for before, part in zip(asked, written, strict=True):
            place = len(before)
            is_beginning = ids[: place + 1] == [*before, answer] and ids[: len(part)] == part
            if not is_beginning:
                raise BadInput("the chat template writes a talk otherwise once it goes on, or joins an answer with its "
                               "neighbours: this is another model than the layout's")  # fmt: skip
        return Reading(ids, [len(before) - 1 for before in asked])


def _written(tokenizer: Any, turns: list[dict[str, str]], asks: bool) -> list[int]:
    return list(tokenizer(write_chat(tokenizer, turns, asks=asks), add_special_tokens=False).input_ids)


@dataclass(frozen=True)
class Pieces:
    """Question and steps tokenised each on its own, a separator behind every step, whose last token is read. `begins`:
    whether the row begins with the tokenizer's first token, where it has one; `by_lines`: whether the lines of a step
    are pieces of their own, of which the last one is read."""

    separator: str
    after_question: str = ""
    begins: bool = False
    by_lines: bool = False

    def __call__(self, tokenizer: Any, question: str, steps: Sequence[str]) -> Reading:
        """See `Layout`."""

        def encode(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=False).input_ids)

        separator, places = encode(self.separator), []
        first = [tokenizer.bos_token_id] if self.begins and tokenizer.bos_token_id is not None else []
        ids = first + encode(question + self.after_question)
        for step in steps:
            for piece in step.strip().split("\n") if self.by_lines else [step.strip()]:
                ids += (encode(piece) if piece else []) + (separator[-1:] if self.by_lines else separator)
            places.append(len(ids) - 1)
        return Reading(ids, places)


@dataclass(frozen=True)
class Separated:
    """Text tokenised with a special token behind the question and behind every step, which is then taken out; the last
    token of a step is read."""

    before: str

    def __call__(self, tokenizer: Any, question: str, steps: Sequence[str]) -> Reading:
        """See `Layout`."""
        border = tokenizer.pad_token
        if border is None or border == tokenizer.eos_token:
            border = tokenizer.unk_token or tokenizer.eos_token
        mark = tokenizer.convert_tokens_to_ids(border)
        text = written_with(self.before, question) + border + "".join(step.strip() + border for step in steps)
        ids: list[int] = []
        places: list[int] = []
        for number, token in enumerate(tokenizer(text).input_ids):
            if token == mark and number:  # the first may be the tokenizer's own
                places.append(len(ids) - 1)
            else:
                ids.append(token)
        if len(places) != len(steps) + 1:
            raise BadInput(f"{len(places)} marks {border!r} for {len(steps)} steps and the question: the text holds "
                           "the mark itself")  # fmt: skip
        return Reading(ids, places[1:])


@dataclass(frozen=True)
class Document:
    """A document with a heading for the question and one for the solution, whose steps an empty line parts. Read at the
    first token of the empty line behind each step, and at the end token behind the last one."""

    before: str
    between: str = "\n\n"

    def __call__(self, tokenizer: Any, question: str, steps: Sequence[str]) -> Reading:
        """See `Layout`."""
        text, ends = written_with(self.before, question), []
        for number, step in enumerate(steps):
            text += step.strip()
            ends.append(len(text))
            text += self.between if number + 1 < len(steps) else ""
        found = tokenizer(text, return_offsets_mapping=True)
        ids, places = list(found.input_ids), []
        if ids[-1:] == [tokenizer.eos_token_id]:
            ids.pop()
        for end in ends[:-1]:
            places.append(next(k for k, (_, after) in enumerate(found.offset_mapping) if after > end))
        return Reading([*ids, tokenizer.eos_token_id], [*places, len(ids)] if ends else [])


@dataclass(frozen=True)
class ChatSteps:
    """One chat turn of numbered steps, an empty line between them; a step ends with its last token, the last one with
    the row. For models that score by what all tokens of a step say. `system`: the first turn, "" for none."""

    after: str = "\n\n"
    system: str = ""

    def __call__(self, tokenizer: Any, question: str, steps: Sequence[str]) -> Reading:
        """See `Layout`."""
        asked = write_chat(tokenizer, [*_opening(self.system), {"role": "user", "content": question}])
        start = len(tokenizer(asked, add_special_tokens=False).input_ids)
        text, ends = asked, []
        for number, step in enumerate(numbered([step.strip() for step in steps])):
            text += step + (self.after if number + 1 < len(steps) else "")
            ends.append(len(text))
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts = [first for first, _ in found.offset_mapping]  # several tokens of one character begin at one place
        places = [bisect.bisect_left(starts, end) - 1 for end in ends]
        return Reading(list(found.input_ids), places, start)
