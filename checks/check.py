"""A check and what came of it: one line each, green or the remedy.

A check is a name and a call. The call returns one line about what is right, raises `Skipped` where there is nothing to
check, and raises whatever the guard behind it raises where something is wrong: guards say in one line what it is and
what to do.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

GOOD, BAD, SKIPPED = "ok", "BAD", "--"
_COLOURS = {GOOD: "\x1b[32m", BAD: "\x1b[31m", SKIPPED: "\x1b[2m"}


class Skipped(Exception):
    """This config has nothing of the kind; the message says why in a few words."""


class CheckFailed(RuntimeError):
    """Something is wrong; the message says what it is and, after a colon, the remedy."""

    exit_code = 2


@dataclass(frozen=True)
class Check:
    """`name` in the field's words; `run` returns the line of a check that passed. `loads`: a network or an engine.
    `is_rehearsal`: the run itself in small, which is not tried where a check before it failed."""

    name: str
    run: Callable[[], str]
    loads: bool = False
    is_rehearsal: bool = False


@dataclass(frozen=True)
class Finding:
    """What came of a check: `status` is ok, BAD or -- (skipped), `text` one line."""

    name: str
    status: str
    text: str

    def line(self, is_colour: bool = False) -> str:
        """For a terminal; `is_colour` makes the status green, red or dim."""
        status = f"{self.status:<4}"
        if is_colour:
            status = f"{_COLOURS[self.status]}{status}\x1b[0m"
        return f"{status} {self.name:<16} {self.text}"


def examine(checks: Iterable[Check]) -> Iterator[Finding]:
    """Run each check in turn; a check stops no other one but a rehearsal."""
    has_failed = False
    for check in checks:
        if check.is_rehearsal and has_failed:
            yield Finding(check.name, SKIPPED, "not tried: a check above failed")
            continue
        finding = _examine(check)
        has_failed |= finding.status == BAD
        yield finding


def _examine(check: Check) -> Finding:
    with _warnings() as warnings:
        try:
            text, status = check.run(), GOOD
        except Skipped as reason:
            text, status = str(reason), SKIPPED
        except Exception as error:
            # a guard's own line; what nobody foresaw is as bad, and its kind is named
            is_known = isinstance(getattr(error, "exit_code", None), int)
            text, status = str(error) if is_known else f"{type(error).__name__}: {error}", BAD
    said = "".join(f" (warning: {line})" for line in warnings)
    return Finding(check.name, status, " ".join((text + said).split()))


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Give the warnings that guards log in the meantime: they belong to the check's line."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                messages.append(record.getMessage())

    root, keep = logging.getLogger(), Keep()
    others, level = root.handlers, root.level
    root.handlers = [keep]
    try:
        yield messages
    finally:
        root.handlers = others
        root.setLevel(level)


def show(findings: Iterable[Finding]) -> int:
    """Print each as it comes, then a count; the exit code: 0, or 1 where one is BAD."""
    is_colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    number = bad = 0
    for finding in findings:
        print(finding.line(is_colour), flush=True)
        number, bad = number + (finding.status != SKIPPED), bad + (finding.status == BAD)
    print(f"{number} checks, {bad} bad" if bad else f"{number} checks, all ok", flush=True)
    return 1 if bad else 0
