"""Steps of a response and the decoder of its tokens; `data.token_text` maps one to the other.

A step splitter is a function `str -> list[str]` whose pieces join to the response exactly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from espalier.data.records import BadInput, StepValues, Trajectory

StepSplitter = Callable[[str], list[str]]
Decode = Callable[[Sequence[int]], str]

_RECENT = 100_000  # tokens of the sequences whose text a decoder remembers


class Decoder:
    """`ids -> text` by a Hugging Face tokenizer, without any clean-up, and without special tokens unless they are kept
    by `skips_special_tokens=False`.

    The last sequences are remembered: one answer is read several times, and the samples of a state share its tokens.
    Where the tokenizer's way to the text is transformers' own, its Rust part is asked directly, in a third of the time.
    """

    def __init__(self, tokenizer: Any, skips_special_tokens: bool = True):
        self.tokenizer = tokenizer
        self.skips_special_tokens = skips_special_tokens
        self.pieces: dict[int, str] = {}
        self._recent: dict[tuple[int, ...], str] = {}
        self._num_recent = 0
        ways = [getattr(getattr(type(tokenizer), name, None), "__qualname__", "") for name in ("decode", "_decode")]
        self._is_plain = ways == ["PreTrainedTokenizerBase.decode", "TokenizersBackend._decode"]

    def __call__(self, ids: Sequence[int]) -> str:
        """Return the text of a sequence."""
        key = tuple(ids)
        text = self._recent.get(key)
        if text is None:
            if self._num_recent > _RECENT:
                self._recent, self._num_recent = {}, 0
            text = self._recent[key] = self._decode(list(key))
            self._num_recent += len(key) + 1
        return text

    def _decode(self, ids: list[int]) -> str:
        skips = self.skips_special_tokens
        text: str
        if self._is_plain:
            text = self.tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=skips)
        else:
            text = self.tokenizer.decode(ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
        return text

    def behind_text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens that follow other text: a tokenizer that drops a leading space keeps it there."""
        before, length = self._before
        return self([*before, *ids])[length:]

    def piece(self, token: int) -> str:
        """Return the text of one token that follows other text, remembered."""
        if token not in self.pieces:
            self.pieces[token] = self.behind_text([token])
        return self.pieces[token]

    @cached_property
    def _before(self) -> tuple[list[int], int]:
        """A word that tokens are decoded behind, as ids, and the length of its text."""
        ids = list(self.tokenizer("a", add_special_tokens=False).input_ids)
        return ids, len(self(ids))


@dataclass(frozen=True)
class StepTokens:
    """A solution as token ids: prompt, response, and for every step the number of response tokens up to and including
    it, so that `response_ids[:step_ends[i]]` are the first i + 1 steps. Errors call it by its `name`."""

    prompt_ids: list[int]
    response_ids: list[int]
    step_ends: list[int]
    name: str = "solution"


@dataclass(frozen=True)
class TokenRow:
    """Token ids, and the places in them (counted from 0, rising, one at least) that a score is asked of. Errors call it
    by its `name`."""

    name: str
    ids: list[int]
    places: list[int]


def step_tokens(row: Trajectory | StepValues) -> StepTokens:
    """Return the token ids of a trajectory, called by its id."""
    return StepTokens(row.prompt_ids, row.response_ids, row.step_ends, f"trajectory '{row.id}'")


def check_join(steps: Sequence[str], response: str, place: str) -> None:
    """Raise BadInput unless the steps join to the response exactly."""
    if "".join(steps) != response:
        raise BadInput(f"{place}: the steps do not join to the response: the step splitter loses text")


def check_ends(steps: Sequence[str], step_ends: Sequence[int], place: str) -> None:
    """Raise BadInput unless every step has its token end (chat APIs return no token ids)."""
    if len(step_ends) != len(steps):
        numbers = f"{len(steps)} steps and {len(step_ends)} token ends"
        raise BadInput(f"trajectory '{place}' has {numbers}: sample it with token ids")
