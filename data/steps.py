"""Response ↔ steps ↔ token spans.

A step splitter is a function `str -> list[str]` whose pieces join to the response exactly. Token ends are
found on the sampler's own ids: nothing is re-tokenised.
"""

from collections.abc import Callable, Sequence
from typing import Any

from data.records import BadInput

StepSplitter = Callable[[str], list[str]]
Decode = Callable[[Sequence[int]], str]


class Decoder:
    """`ids -> text` by a Hugging Face tokenizer, without special tokens and without any clean-up."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.pieces: dict[int, str] = {}

    def __call__(self, ids: Sequence[int]) -> str:
        """The text of a sequence."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def piece(self, token: int) -> str:
        """The text of one token by itself, remembered."""
        if token not in self.pieces:
            self.pieces[token] = self([token])
        return self.pieces[token]


def token_step_ends(
    steps: Sequence[str], prompt_ids: Sequence[int], response_ids: Sequence[int], decode: Decode
) -> list[int]:
    """For every step, the number of response tokens up to and including its last character.

    Where the tokens' own texts join to the response, as with byte-level tokenizers, ends are counted off.
    Else the length of the decoded text grows with the number of tokens, and each end is found by bisection.
    Decoding then starts in the last tokens of the prompt, because some tokenizers drop a leading space. A
    token that covers a border belongs to the step it begins in. The last step takes all that is left
    (the end-of-sequence token decodes to nothing). Steps and ends have equal lengths.
    """
    if not steps:
        return []
    if isinstance(decode, Decoder):
        pieces = [decode.piece(token) for token in response_ids]
        if "".join(pieces) == "".join(steps):
            return _count_off(steps, pieces)
    context = list(prompt_ids[-8:])
    offset = len(decode(context))
    ends: list[int] = []
    chars = 0
    low = 0
    for step in steps[:-1]:
        chars += len(step)
        below, above = low, len(response_ids)
        while below < above:
            middle = (below + above) // 2
            if len(decode([*context, *response_ids[:middle]])) - offset >= chars:
                above = middle
            else:
                below = middle + 1
        if not step[-1:].isascii():
            above = _end_of_character(above, offset + chars - 1, context, response_ids, decode)
        low = above
        ends.append(above)
    return [*ends, len(response_ids)]


def _count_off(steps: Sequence[str], pieces: Sequence[str]) -> list[int]:
    """Step ends from the tokens' own texts: the first token that brings a step's last character."""
    ends: list[int] = []
    token = tokens_chars = chars = 0
    for step in steps[:-1]:
        chars += len(step)
        while tokens_chars < chars:
            tokens_chars += len(pieces[token])
            token += 1
        ends.append(token)
    return [*ends, len(pieces)]


def _end_of_character(end: int, place: int, context: Sequence[int], response_ids: Sequence[int], decode: Decode) -> int:
    """`end`, or up to 3 tokens more: the bytes of one character can be tokens of their own, and the first
    of them already decodes to one (replacement) character."""
    for more in range(end, min(end + 4, len(response_ids) + 1)):
        if decode([*context, *response_ids[:more]])[place : place + 1] not in ("", "\ufffd"):
            return more
    return end


def check_join(steps: Sequence[str], response: str, place: str) -> None:
    """Raise BadInput unless the steps join to the response exactly."""
    if "".join(steps) != response:
        raise BadInput(f"{place}: the steps do not join to the response: the step splitter loses text")


def check_ends(steps: Sequence[str], step_ends: Sequence[int], place: str) -> None:
    """Raise BadInput unless every step has its token end (chat APIs return no token ids)."""
    if len(step_ends) != len(steps):
        numbers = f"{len(steps)} steps and {len(step_ends)} token ends"
        raise BadInput(f"trajectory '{place}' has {numbers}: sample it with token ids")
