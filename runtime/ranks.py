"""Which of the processes of a run this one is, read from a launcher's variables: needs no torch, as callers of HTTP
servers start without it.

A launcher (`launch.py`, `torchrun`, `deepspeed`, `launcher=ray`) sets RANK, WORLD_SIZE and LOCAL_RANK.
"""

import os
from collections.abc import Iterable

STARTED_BY = "ESPALIER_LAUNCHER"  # set in ranks that a launcher of ours has started
STARTED_AGAIN = "ESPALIER_STARTED_AGAIN"
"""The variable that says to a rank that its run was started again: a node that is away is waited for, and so is a rank
of before that still saves."""
AGAIN_WITH_LESS = "less"
"""Its value where nodes stayed away: nobody waits for them any more."""


def rank() -> int:
    """Return this process's rank, 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Return this process's place among those of its machine, 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """Return the number of processes, 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_rank() -> bool:
    """Say whether this process is the one that writes and speaks."""
    return rank() == 0


def says_errors(lost: int | None = None) -> bool:
    """Say whether this process prints why the run ends: the first of each machine that is not the `lost` rank."""
    first = rank() - local_rank()
    return rank() == (first + 1 if first == lost else first)


def exit_code_of_ranks(codes: Iterable[int]) -> int:
    """Return one exit code for ranks that ended with `codes` (a negative one: by that signal), in whatever order.

    A rank's own word comes before a signal, and one that killed a rank before those by which the others were stopped.
    """
    own = [128 - code if code < 0 else code for code in codes if code != 0]
    for is_wanted in (lambda code: code < 128, lambda code: code not in (130, 143), lambda code: True):
        for code in own:
            if is_wanted(code):
                return code
    return 0


def may_start_again(code: int) -> bool:
    """Say whether a run that ended with this exit code may end otherwise when it is started again: a machine, a server
    or a process was lost. Not after an error in a config or in data, a full disk, a cap, or a signal to stop."""
    return code == 3 or (code > 128 and code not in (130, 143))
