"""Which of the processes of a run this one is, read from a launcher's variables: needs no torch, as callers of HTTP
servers start without it.

A launcher (`torchrun`, `deepspeed`) sets RANK, WORLD_SIZE and LOCAL_RANK.
"""

import os


def rank() -> int:
    """This process's rank, 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """The number of processes, 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_rank() -> bool:
    """Whether this process is the one that writes and speaks."""
    return rank() == 0
