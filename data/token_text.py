"""Token ids → text, token by token: the one map that steps, states, cut points and stop strings are read from.

The text of tokens is always that of the whole: decoded behind the prompt they follow, never joined from texts that
were decoded apart. Some tokenizers drop a leading space of what they decode (SentencePiece), and the bytes of one
character can be tokens of their own, which read as U+FFFD until the last of them is there.

Rules that every reader of this map keeps:

- a token belongs to one step: the one its first character is in;
- a state ends between two tokens and after a whole character, so that its text is exactly what its ids read as;
- a response does not hold the first bytes of a character that was cut off.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from espalier.data.records import BadInput
from espalier.data.steps import Decode, Decoder, StepTokens

# What two tokenizers are compared on: words, digits, code, mathematics, other scripts and white space, of which they
# seldom cut all alike.
PROBE_TEXT = (
    "Mia has 12 apples; she buys 3.75 more and gives away 1,048. How many now?\n\n"
    "Step 1: \\frac{x^2 - 4}{x + 2} = \\boxed{x - 2}\t#### -17\r\n"
    "def f(a_b): return [a_b ** 2 for _ in range(10)]  // naïve Übung, 数学, Привет, مرحبا 🙂"
)
PROBE_TEXTS = (PROBE_TEXT, " 5.\n\n6", "  two spaces", "\n\n\nThought 2:\n", "####\u2028e\u0301 ﬁ", "a b  c\t\td")

_LOST = "\ufffd"  # what bytes read as that make no character, or not yet
_CONTEXT = 8  # tokens of the prompt that a text is decoded behind, at least
_LONGEST = 8  # tokens that one character is cut into, at most


@dataclass(frozen=True)
class TokenText:
    """What T tokens add to the text of their prompt.

    `ends[k]`, k from 0 to T, is the number of characters that the first k tokens hold; it never falls, and `ends[T]` is
    the length of `text`. `is_border[k]` says whether a state can end after k tokens: what they read as is then
    `text[:ends[k]]`, whatever follows.
    """

    text: str
    ends: list[int]
    is_border: list[bool]

    def end_after(self, num_chars: int, start: int = 0) -> int:
        """Return the fewest tokens, at least `start`, that hold the first `num_chars` characters and end at a border;
        all T where there is none before."""
        return self.border_from(bisect.bisect_left(self.ends, num_chars, lo=start, hi=len(self.ends) - 1))

    def border_from(self, num_tokens: int) -> int:
        """Return the first border at or after a number of tokens; T is one."""
        last = len(self.ends) - 1
        return next((k for k in range(num_tokens, last) if self.is_border[k]), last)


def added_text(prompt_ids: Sequence[int], ids: Sequence[int], decode: Decode) -> str:
    """Return what `ids` add to the text of the prompt: a character that the prompt began is theirs, and the first bytes
    of one that they do not end are left out."""
    return _added(_context(prompt_ids, decode), ids, decode)


def read_tokens(prompt_ids: Sequence[int], ids: Sequence[int], decode: Decode) -> TokenText:
    """Return the text of `ids` behind their prompt, and where in it each of them ends."""
    context = _context(prompt_ids, decode)
    text = _added(context, ids, decode)
    if isinstance(decode, Decoder):
        pieces = [decode.piece(token) for token in ids]
        if "".join(pieces) == text and _LOST not in text:
            return TokenText(text, [0, *accumulate(map(len, pieces))], [True] * (len(ids) + 1))
    return _read_units(context, ids, decode, text)


def read_response(
    prompt_ids: Sequence[int], response_ids: Sequence[int], decode: Decode, response: str, place: str
) -> TokenText:
    """Return `read_tokens` of a response whose text is known: tokens behind its end (of a stop string, an end token
    that is written out) hold no character of it. Raises BadInput, with `place`, where the tokens read otherwise."""
    tokens = read_tokens(prompt_ids, response_ids, decode)
    if not tokens.text.startswith(response):
        first = next((k for k, (a, b) in enumerate(zip(tokens.text, response, strict=False)) if a != b), 0)
        raise BadInput(
            f"{place}: its tokens do not read as its text: from character {first} on they read "
            f"{tokens.text[first : first + 20]!r}, the text is {response[first : first + 20]!r}: the tokenizer must be "
            "that of the policy which sampled it"
        )
    return TokenText(response, [min(end, len(response)) for end in tokens.ends], tokens.is_border)


def token_step_ends(steps: Sequence[str], tokens: TokenText) -> list[int]:
    """For every step the number of tokens up to and including the one that holds its last character.

    A token that covers a border belongs to the step it begins in, and one that begins a character with the tokens that
    end it; so two steps can have one end. The last step takes all that is left (the end token reads as nothing).
    """
    ends: list[int] = []
    chars = end = 0
    for step in steps[:-1]:
        chars += len(step)
        end = tokens.end_after(chars, end)
        ends.append(end)
    return [*ends, len(tokens.ends) - 1] if steps else []


def steps_at_token_ends(token_ends: Sequence[int], tokens: TokenText) -> tuple[list[str], list[int]]:
    """Return (steps, step ends) of a response that is cut after the given tokens; the steps join to its text.

    `token_ends` rise and the last is the number of tokens. Text and tokens keep together: an end that is no border
    moves to the next one, and a segment without text (an end token, tokens behind the text's end) joins the one before
    it, so steps and ends can be fewer. No text gives no steps. Raises BadInput on ends that do not rise to the number
    of tokens.
    """
    num, ends = len(tokens.ends) - 1, list(token_ends)
    if ends != sorted(set(ends)) or (ends[-1:] or [0]) != [num] or ends[:1] == [0]:
        raise BadInput(f"token ends must rise to the number of tokens, {num}; got {ends[:8]}")
    steps: list[str] = []
    kept: list[int] = []
    start = 0
    for end in map(tokens.border_from, ends):
        if tokens.ends[end] > start:
            steps.append(tokens.text[start : tokens.ends[end]])
            kept.append(end)
            start = tokens.ends[end]
        elif kept:
            kept[-1] = end
    return steps, kept


def steps_on_tokens(steps: Sequence[str], tokens: TokenText) -> tuple[list[str], list[int]]:
    """Return (steps, step ends): the steps of a splitter, their borders moved to the ends of tokens.

    Text and tokens of every step agree: with the tokens `5`, `.\\n\\n` and `6` the steps `5.`, `\\n\\n6` become
    `5.\\n\\n` and `6`. A step that lies within a token joins the one that the token begins in.
    """
    ends = {*token_step_ends(steps, tokens), len(tokens.ends) - 1} - {0}
    return steps_at_token_ends(sorted(ends), tokens)


def encode_response(tokenizer: Any, prompt_ids: Sequence[int], text: str) -> tuple[list[int], bool]:
    """Return (ids, whether behind the prompt they read as `text` exactly); special tokens written in the text count as
    text.

    Some tokenizers write a space before what they tokenise: the text is then tokenised behind another one whose
    tokens are taken off. Where nothing reads as the text (a tokenizer that normalises), the plain ids.
    """
    decode = Decoder(tokenizer, skips_special_tokens=False)
    plain = list(tokenizer(text, add_special_tokens=False).input_ids)
    for before in ("", "\n", "a"):
        first = list(tokenizer(before, add_special_tokens=False).input_ids) if before else []
        ids = list(tokenizer(before + text, add_special_tokens=False).input_ids) if before else plain
        if ids[: len(first)] == first and added_text(prompt_ids, ids[len(first) :], decode) == text:
            return ids[len(first) :], True
    return plain, False


def tokenise_steps(
    tokenizer: Any, prompt_ids: Sequence[int], steps: Sequence[str], is_finished: bool
) -> StepTokens | None:
    """Tokenise the steps of a response in one piece, as a policy writes it, and find the step ends on its tokens; None
    where the text does not come back from its ids, so that no step end could be trusted.

    A step ends with the token that holds its last character (`token_step_ends`). With `is_finished` the end token
    follows, and the last step takes it in.
    """
    response = "".join(steps)
    response_ids, _ = encode_response(tokenizer, prompt_ids, response)
    tokens = read_tokens(prompt_ids, response_ids, Decoder(tokenizer))
    if tokens.text != response:
        return None
    ends = token_step_ends(steps, tokens)
    if is_finished:
        response_ids.append(tokenizer.eos_token_id)
        ends = [*ends[:-1], len(response_ids)] if ends else []
    return StepTokens(list(prompt_ids), response_ids, ends)


def _context(prompt_ids: Sequence[int], decode: Decode) -> list[int]:
    """Return the last tokens of a prompt, with a text that is whole: a context of special tokens alone would not keep a
    leading space, one that begins inside a character would spoil the next."""
    size = _CONTEXT
    while size < len(prompt_ids):
        text = decode(prompt_ids[-size:])
        if text and _LOST not in text:
            return list(prompt_ids[-size:])
        size *= 4
    return list(prompt_ids)


def _whole(ids: Sequence[int], decode: Decode, at_least: int = 0) -> str:
    """Return the text of `ids` without the first bytes of a character that they do not end."""
    text = decode(ids)
    if not text.endswith(_LOST):
        return text
    cut = text.rstrip(_LOST)
    for length in range(len(ids) - 1, max(at_least, len(ids) - _LONGEST) - 1, -1):
        shorter = decode(ids[:length])
        if not shorter.endswith(_LOST):
            return cut if cut.startswith(shorter) else shorter  # bytes that make no character can spoil those before
    return cut


def _added(context: Sequence[int], ids: Sequence[int], decode: Decode) -> str:
    before = _whole(context, decode)
    text = _whole([*context, *ids], decode, at_least=len(context))
    if text.startswith(before):
        return text[len(before) :]
    return text[len(decode(context).rstrip(_LOST)) :]  # bytes that make no character spoilt those before them


def _read_units(context: Sequence[int], ids: Sequence[int], decode: Decode, text: str) -> TokenText:
    """Read tokens in units: as few as read as whole characters, and as the text that stands there."""
    ends, is_border = [0], [True]
    start = chars = 0
    for k in range(1, len(ids) + 1):
        piece = _unit(context, ids, start, k, decode)
        is_whole = not piece.endswith(_LOST) and text.startswith(piece, chars)
        if is_whole:
            chars, start = chars + len(piece), k
        begun = len(piece.rstrip(_LOST)) if text.startswith(piece.rstrip(_LOST), chars) else 0
        ends.append(chars if is_whole else max(ends[-1], chars + begun))
        is_border.append(is_whole)
    ends[-1], is_border[-1] = len(text), True
    return TokenText(text, ends, is_border)


def _unit(context: Sequence[int], ids: Sequence[int], start: int, end: int, decode: Decode) -> str:
    """Return what tokens `start` to `end` add to those before them."""
    if start and isinstance(decode, Decoder):
        return decode.piece(ids[start]) if end == start + 1 else decode.behind_text(ids[start:end])
    before = [*context, *ids[:start]]
    return decode([*before, *ids[start:end]])[len(_whole(before, decode)) :]
