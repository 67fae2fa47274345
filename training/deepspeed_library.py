"""DeepSpeed, imported where it is first needed and nowhere else."""

import os
from typing import Any

import torch


def library() -> Any:
    """Return the package."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    import deepspeed

    # An operator of inference only, which DeepSpeed would compile (a minute, and a compiler) on CPUs.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
