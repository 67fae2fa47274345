"""What is asked of all examples at once, as one row of numbers an example: its sizes, the range of its ids, its last
tokens, a hash of its content. So neither batches nor guards need every example's tokens in memory.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from espalier.data.examples.token_examples import (
    OutcomeExample,
    PairExample,
    StepExample,
    computed_tokens,
    example_length,
)

FACTS = np.dtype(
    [
        ("length", np.int32),  # `example_length`
        ("computed_tokens", np.int32),  # `computed_tokens`
        ("row_tokens", np.int32),  # of all its `token_rows`
        ("loss_tokens", np.int32),  # `num_loss_tokens`
        ("least_id", np.int64),
        ("greatest_id", np.int64),
        ("last_id", np.int64),  # of a pair: of the chosen side
        ("other_last_id", np.int64),  # of a pair: of the rejected side; else as `last_id`
        ("content", np.int64),  # a hash of its `token_rows`
    ]
)
Facts = npt.NDArray[np.void]


def token_rows(example: Any) -> list[list[int]]:
    """Return the token rows a model reads of an example: one, or for a pair chosen and rejected, each with its
    prompt."""
    if isinstance(example, PairExample):
        return [[*example.prompt_ids, *side] for side in (example.chosen_ids, example.rejected_ids)]
    return [example.ids]


def num_loss_tokens(example: Any) -> int:
    """Return how many tokens of an example its loss reads: response tokens of a weight that is not 0, of both sides of
    a pair; for process and outcome rewards the places where the head is read."""
    if isinstance(example, PairExample):
        return len(example.chosen_ids) + len(example.rejected_ids)
    if isinstance(example, StepExample):
        return sum(weight != 0 for weight in example.weights or [1.0] * len(example.positions))
    if isinstance(example, OutcomeExample):
        return len(example.ids) - example.prompt_length if example.weight else 0
    first = max(1, example.prompt_length)  # nothing predicts the first token
    weights = example.weights or [1.0] * (len(example.ids) - example.prompt_length)
    return sum(weight != 0 for weight in weights[first - example.prompt_length :])


def _content(rows: Sequence[Sequence[int]]) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for row in rows:
        digest.update(len(row).to_bytes(8, "little") + np.array(row, dtype=np.int64).tobytes())
    return int.from_bytes(digest.digest(), "little", signed=True)


def _row(example: Any) -> tuple[int, ...]:
    rows = token_rows(example)
    filled = [row for row in rows if row]
    ends = [row[-1] if row else -1 for row in rows]
    return (
        example_length(example),
        computed_tokens(example),
        sum(map(len, rows)),
        num_loss_tokens(example),
        min(map(min, filled), default=0),
        max(map(max, filled), default=0),
        ends[0],
        ends[-1],
        _content(rows),
    )


def facts(examples: Iterable[Any]) -> Facts:
    """Return one row of `FACTS` an example, in order."""
    return np.array([_row(example) for example in examples], dtype=FACTS)
