"""DeepSpeed, imported where it is first needed and nowhere else."""

import contextlib
import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


def library() -> Any:
    """Return the package."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    import deepspeed

    # An operator of inference only, which DeepSpeed would compile (a minute, and a compiler) on CPUs.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Have what DeepSpeed's tools print go nowhere."""
    with open(os.devnull, "w") as no, contextlib.redirect_stdout(no), contextlib.redirect_stderr(no):
        yield


def make_universal(checkpoint: Path, output: Path) -> None:
    """Write a checkpoint of any ZeRO stage as a universal one, in this process alone."""
    library()
    from deepspeed.checkpoint.ds_to_universal import main

    one_by_one = {"num_extract_workers": 1, "num_merge_workers": 1}
    how = {"keep_temp_folder": False, "strict": True, "inject_missing_state": True}
    with quiet():
        main(Namespace(input_folder=str(checkpoint), output_folder=str(output), **one_by_one, **how))
