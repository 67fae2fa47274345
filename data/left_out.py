"""What is left out of a data set, and why: said once in the log, and counted for whoever asks.

with count_left_out() as counted:
    examples = source.load(tokenizer)
counted  # [LeftOut("train.jsonl", "are longer than 512 tokens", 3, 400), ...]
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeftOut:
    """`number` of `total` rows of `path` are not used, because they `reason` ("are longer than 512 tokens")."""

    path: str
    reason: str
    number: int
    total: int


_counted: ContextVar[list[LeftOut] | None] = ContextVar("left_out", default=None)


@contextmanager
def count_left_out() -> Iterator[list[LeftOut]]:
    """Give the list that fills up while the block runs."""
    counted: list[LeftOut] = []
    token = _counted.set(counted)
    try:
        yield counted
    finally:
        _counted.reset(token)


def leave_out(
    path: str, number: int, total: int, noun: str, reason: str, *, details: str = "", is_asked_for: bool = False
) -> None:
    """Count `number` of `total` rows (`noun`: "examples") that `reason`; 0 is no news.

    A warning, or a plain remark of the log where a setting asks for it (`is_asked_for`).
    """
    if not number:
        return
    counted = _counted.get()
    if counted is not None:
        counted.append(LeftOut(path, reason, number, total))
    level = logging.INFO if is_asked_for else logging.WARNING
    log.log(level, "%s: %d of %d %s %s and are left out%s", path, number, total, noun, reason, details)


def count_again(rows: Iterable[LeftOut]) -> None:
    """Count what was left out when the data were made that are read now, for whoever asks."""
    counted = _counted.get()
    if counted is not None:
        counted.extend(rows)
