"""What a published model's output at a step's place says of the step: logits [R, L] → scores [R] in [0, 1].

Scores are as published where these lie in [0, 1]. A raw score is put through a sigmoid, and one from -1 to 1 moved to
[0, 1]: the order of steps stays, and a published threshold of 0 is 0.5. A published score that is high for a bad step
is taken from 1: here a high score is a good step.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from espalier.models.load import BadModel
from espalier.models.published.layouts import only_id


class Read(Protocol):
    """How scores are read off logits."""

    def scores(self, logits: torch.Tensor, tokenizer: Any) -> torch.Tensor:
        """Return scores [R] from float32 logits [R, L], L tokens of a vocabulary or classes of a head."""


@dataclass(frozen=True)
class TokenShare:
    """Of a causal LM: the share of `good` in the softmax over two tokens; `of_all`: over the whole vocabulary, as some
    evaluators read it."""

    good: str
    bad: str
    of_all: bool = False

    def scores(self, logits: torch.Tensor, tokenizer: Any) -> torch.Tensor:
        """See `Read`."""
        if self.of_all:
            return torch.softmax(logits, dim=-1)[:, only_id(tokenizer, self.good)]
        return torch.sigmoid(logits[:, only_id(tokenizer, self.good)] - logits[:, only_id(tokenizer, self.bad)])


@dataclass(frozen=True)
class MeanLogit:
    """Of a causal LM: the sigmoid of the mean over the whole vocabulary's logits."""

    def scores(self, logits: torch.Tensor, tokenizer: Any) -> torch.Tensor:
        """See `Read`."""
        return torch.sigmoid(logits.mean(-1))


@dataclass(frozen=True)
class ClassShares:
    """Of a head of as many classes: the sum of `weights` times the softmax."""

    weights: tuple[float, ...] = (0.0, 1.0)

    def scores(self, logits: torch.Tensor, tokenizer: Any) -> torch.Tensor:
        """See `Read`."""
        check_width(logits, len(self.weights))
        return torch.softmax(logits, dim=-1) @ logits.new_tensor(self.weights)


@dataclass(frozen=True)
class Scalar:
    """Of a head of one number: its sigmoid."""

    def scores(self, logits: torch.Tensor, tokenizer: Any) -> torch.Tensor:
        """See `Read`."""
        check_width(logits, 1)
        return torch.sigmoid(logits[:, 0])


def check_width(logits: torch.Tensor, num: int) -> None:
    """Raise BadModel unless a head gives so many numbers."""
    if logits.shape[-1] != num:
        raise BadModel(f"this layout reads a head of {num} numbers, and the model's gives {logits.shape[-1]}: name "
                       "another layout")  # fmt: skip
