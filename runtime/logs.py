"""A quiet, readable log: our own lines on stderr and in the run's file, the libraries' start-up noise tamed.

Warnings of any library still show.
"""

import logging
import os
import sys
import warnings
from pathlib import Path

from espalier.runtime.ranks import is_main_rank

_OURS = ("train", "rl", "sample", "stage", "evaluate", "espalier")


def _is_news(record: logging.LogRecord) -> bool:
    """False for DeepSpeed's remark that there is no GPU."""
    return "Setting accelerator to CPU" not in record.getMessage()


def quiet_libraries() -> None:
    """Silence start-up chatter; called before heavy libraries are imported where possible."""
    for name in (
        "HF_HUB_DISABLE_PROGRESS_BARS",
        "HF_HUB_DISABLE_TELEMETRY",
        "VLLM_NO_USAGE_STATS",
        "DO_NOT_TRACK",
    ):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", message=".*pynvml.*")
    warnings.filterwarnings("ignore", message=".*torch.distributed.* is deprecated", category=FutureWarning)
    logging.getLogger("DeepSpeed").addFilter(_is_news)


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
    for name in _OURS:
        logging.getLogger(name).setLevel(logging.INFO if is_main_rank() else logging.WARNING)
