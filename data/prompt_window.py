"""Which problems fit a model's window: their prompt and at least one token of a response.

An engine refuses a longer prompt every time it is asked, so such a problem is left out before anything is.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from espalier.data.left_out import leave_out
from espalier.data.prompts import encode_prompt
from espalier.data.records import BadInput, Problem

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WindowFit:
    """Of one split: the problems that fit a window of `window` tokens, in order; of those left out id and prompt
    tokens, the longest first; and of the kept ones `num_short`, which leave a response less room than `max_tokens`."""

    name: str
    window: int
    max_tokens: int
    kept: list[Problem]
    left_out: list[tuple[str, int]]
    num_short: int

    @property
    def total(self) -> int:
        """Kept and left out."""
        return len(self.kept) + len(self.left_out)

    def check(self) -> None:
        """Say how many are left out, and how many are short of room. Raises BadInput where none fits."""
        if self.left_out and not self.kept:
            fault = f"none of {self.total} problems fits the window of {self.window} tokens"
            shortest = self.left_out[-1][1]
            raise BadInput(f"{self.name}: {fault} (the shortest prompt has {shortest}): raise max_model_len, or "
                           "shorten the prompt")  # fmt: skip
        if self.left_out:
            longest, length = self.left_out[0]
            reason = f"have a prompt that leaves no room in the window of {self.window} tokens"
            details = f" (longest: '{longest}', {length} tokens)"
            leave_out(self.name, len(self.left_out), self.total, "problems", reason, details=details)
        if self.num_short:
            log.warning("%s: %d of %d problems leave less room in the window of %d tokens than max_tokens (%d): their "
                        "responses are cut sooner", self.name, self.num_short, len(self.kept), self.window,
                        self.max_tokens)  # fmt: skip


def fit_window(
    task: Any, tokenizer: Any, split: str, problems: Sequence[Problem], window: int, max_tokens: int
) -> WindowFit:
    """Encode the problems' prompts and sort out those that leave no room for a token of a response."""
    kept: list[Problem] = []
    left_out: list[tuple[str, int]] = []
    num_short = 0
    for problem in problems:
        length = len(encode_prompt(task, tokenizer, problem).ids)
        if length >= window:
            left_out.append((problem.id, length))
            continue
        kept.append(problem)
        num_short += window - length < max_tokens
    left_out.sort(key=lambda row: -row[1])
    return WindowFit(f"{task.name}/{split}", window, max_tokens, kept, left_out, num_short)
