"""Which of the processes of a run this one is, read from a launcher's variables: needs no torch, as callers of HTTP
servers start without it.

A launcher (`launch.py`, `torchrun`, `deepspeed`) sets RANK, WORLD_SIZE and LOCAL_RANK.
"""

import os


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
