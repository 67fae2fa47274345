"""What a verifier is given and what it says."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Needs = Literal["text", "tokens", "judge"]


@dataclass(frozen=True)
class Response:
    """A response to check; `num_tokens` counts its tokens with the end token, None where they are not known."""

    text: str
    num_tokens: int | None = None


@dataclass(frozen=True)
class Result:
    """`score` is in [0, 1]; `answer` is what was read of the response, None where nothing could be."""

    score: float
    answer: str | None = None
    reason: str = ""


@dataclass(frozen=True)
class Verifier:
    """`read` makes of a row's ground truth what `check` compares with, or raises BadRow; it runs once, when rows are
    loaded. `needs` says by what it decides: the text, the number of tokens where that is known, or a model that the
    reward asks (no `check`)."""

    read: Callable[[Any], Any]
    check: Callable[[Response, Any], Result] | None
    needs: Needs = "text"
