"""A quiet, readable log: our own lines on stderr and in the run's file, the libraries' start-up noise tamed.

Warnings of any library still show.
"""

import logging
import os
import sys
import warnings
from pathlib import Path

from runtime.distributed import is_main_rank

_OURS = ("train", "rl", "sample", "stage", "evaluate")
_OUR_PACKAGES = ("data", "models", "runtime", "sampling", "rewards", "pipeline", "training", "analysis")


def quiet_libraries() -> None:
    """Silence start-up chatter; called before heavy libraries are imported where possible."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    warnings.filterwarnings("ignore", message=".*pynvml.*")


def set_up_logging(file: Path | None = None) -> None:
    """INFO of this project on rank 0, WARNING of everything else; also into `file`."""
    root = logging.getLogger()
    root.handlers.clear()
    root.setLevel(logging.WARNING)
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if file is not None and is_main_rank():
        handlers.append(logging.FileHandler(file))
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s", "%H:%M:%S"))
        root.addHandler(handler)
    for name in (*_OURS, *_OUR_PACKAGES):
        logging.getLogger(name).setLevel(logging.INFO if is_main_rank() else logging.WARNING)
