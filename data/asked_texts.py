"""What a reward asks of language models elsewhere, and what they write: engines, servers and chat APIs alike.

Between `rewards`, which knows what is asked, and `sampling`, which knows who is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class AskedText:
    """`id`: a hash of all that is asked, so that what is asked again after a resume has the seed that it had; `ids`:
    the tokens of the model that is asked, empty for a chat, which is one message."""

    id: str
    text: str
    ids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class WrittenText:
    """`is_whole`: it ended by itself."""

    text: str
    is_whole: bool


class Asks(Protocol):
    """What asks: `sampling.asking.Asking`."""

    @property
    def num_texts(self) -> int:
        """How many texts are written for each."""

    @property
    def most_asked(self) -> int | None:
        """The most tokens that can be asked, so that what is written still fits behind them; None where no window is
        known here."""

    def open(self, model: str, text: str, ids: list[int]) -> None:
        """Start asking for that model, whose tokens of `text` are `ids` ("": whichever the client names)."""

    def texts(self, asked: Sequence[AskedText]) -> list[list[WrittenText] | None]:
        """Return the texts written for each, in order; None where the model refuses it for good (too long)."""

    def next_logprobs(self, rows: Sequence[list[int]]) -> list[dict[int, float] | None]:
        """Return the log-probs of the likeliest tokens behind each row of ids, by id; None where it is refused."""

    def close(self) -> None:
        """End what it started."""
