"""One training example as a person reads it: its text, what of it the loss reads, weights and targets at their tokens.

On a terminal masked text is dim, what the loss reads green (a negative weight red), targets bold; elsewhere the same in
brackets:

    What is 2 + 3? [[2 + 3 = 5</s>]]                     a token example: the response is read
    What is 2 + 3? 2 + 3<step 1: 0.75> = 5<step 2: 1>    a step example: the head is read where a target stands
    [[5</s>]] x0.5                                       these tokens weigh 0.5

Line ends are shown before they are made.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from espalier.data.examples.token_examples import OutcomeExample, PairExample, StepExample, TokenExample
from espalier.data.steps import Decoder

Piece = Callable[[int], str]
_DIM, _GREEN, _RED, _BOLD, _END = "\x1b[2m", "\x1b[32m", "\x1b[31m", "\x1b[1;35m", "\x1b[0m"


@dataclass(frozen=True)
class Mark:
    """A token: its text, its weight in the loss (0: masked), and the target that stands behind it, if any."""

    text: str
    weight: float = 0.0
    target: str = ""


def token_text(tokenizer: Any) -> Piece:
    """Return the text of one token behind others, special ones too; the token's own name where it is no whole
    character."""
    decode = Decoder(tokenizer, skips_special_tokens=False)

    def piece(token: int) -> str:
        text = decode.piece(token)
        return str(tokenizer.convert_ids_to_tokens(token)) if "\ufffd" in text else text

    return piece


def render(marks: Iterable[Mark], is_colour: bool, between: str = "") -> str:
    """Return the tokens as one text, runs of equal weight together; `between` stands between tokens."""
    parts = []
    for (weight, target), run in groupby(marks, key=lambda mark: (mark.weight, mark.target)):
        text = between.join(mark.text for mark in run).replace("\n", "⏎\n")
        factor = f" x{weight:g} " if weight not in (0.0, 1.0) else ""
        if is_colour:
            colour = _DIM if weight == 0 else _RED if weight < 0 else _GREEN
            parts.append(f"{colour}{text}{factor}{_END}" + (f"{_BOLD}{target}{_END}" if target else ""))
        else:
            parts.append((f"[[{text}]]{factor}" if weight else text) + target)
    return "".join(parts)


def _weighted(ids: Sequence[int], start: int, weights: Sequence[float], piece: Piece, target: str = "") -> list[Mark]:
    """Return ids that are read from `start` on, with their weights (empty: 1) and a target behind the last one."""
    factors = [0.0] * start + (list(weights) or [1.0] * (len(ids) - start))
    last = len(ids) - 1
    return [Mark(piece(token), factor, target if place == last else "")
            for place, (token, factor) in enumerate(zip(ids, factors, strict=True))]  # fmt: skip


def _tokens(example: TokenExample, piece: Piece, show: Callable[[Iterable[Mark]], str]) -> list[str]:
    marks = _weighted(example.ids, example.prompt_length, example.weights, piece)
    read = sum(mark.weight != 0 for mark in marks)
    head = f"token example '{example.id}': {len(marks)} tokens, the loss reads {read}"
    return [head, show(marks)]


def _steps(example: StepExample, piece: Piece, show: Callable[[Iterable[Mark]], str]) -> list[str]:
    weights = example.weights or [1.0] * len(example.values)
    targets = {
        position: f"<step {step}: {value:g}{f' x{weight:g}' if weight != 1 else ''}>"
        for step, (position, value, weight) in enumerate(
            zip(example.positions, example.values, weights, strict=True), 1
        )
    }
    marks = [Mark(piece(token), 0.0, targets.get(place, "")) for place, token in enumerate(example.ids)]
    head = f"step example '{example.id}': {len(marks)} tokens, the head is read at {len(targets)}"
    return [head, show(marks)]


def _outcome(example: OutcomeExample, piece: Piece, show: Callable[[Iterable[Mark]], str]) -> list[str]:
    target = f"<outcome: {example.value:g}{f' x{example.weight:g}' if example.weight != 1 else ''}>"
    marks = _weighted(example.ids, example.prompt_length, [], piece, target)
    read = len(example.ids) - example.prompt_length
    lines = [f"outcome example '{example.id}': {len(marks)} tokens, the response has {read}", show(marks)]
    if example.mismatched_ids:
        lent = show([Mark(piece(token)) for token in example.mismatched_ids])
        lines += [f"with a response to another prompt, {len(example.mismatched_ids)} tokens:", lent]
    return lines


def _pair(example: PairExample, piece: Piece, show: Callable[[Iterable[Mark]], str]) -> list[str]:
    head = f"pair example '{example.id}': {len(example.prompt_ids)} tokens of prompt"
    head += f", margin {example.margin:g}" if example.margin else ""
    lines = [head, show([Mark(piece(token)) for token in example.prompt_ids])]
    for name, ids in (("chosen", example.chosen_ids), ("rejected", example.rejected_ids)):
        lines += [f"{name}, the loss reads {len(ids)} tokens:", show(_weighted(ids, 0, [], piece))]
    return lines


def view(example: Any, piece: Piece, is_colour: bool, between: str = "") -> str:
    """Return any example, as the module says; `between` stands between tokens."""

    def show(marks: Iterable[Mark]) -> str:
        return render(marks, is_colour, between)

    if isinstance(example, PairExample):
        return "\n".join(_pair(example, piece, show))
    if isinstance(example, StepExample):
        return "\n".join(_steps(example, piece, show))
    if isinstance(example, OutcomeExample):
        return "\n".join(_outcome(example, piece, show))
    return "\n".join(_tokens(example, piece, show))


def of_each_kind(examples: Iterable[Any]) -> list[Any]:
    """Return the first example of each kind, and the first of each whose tokens or reads weigh other than 1."""
    first_of_kind: dict[tuple[type, bool], Any] = {}
    for example in examples:
        weights = getattr(example, "weights", None) or [getattr(example, "weight", 1.0)]
        first_of_kind.setdefault((type(example), any(weight != 1 for weight in weights)), example)
    return list(first_of_kind.values())
