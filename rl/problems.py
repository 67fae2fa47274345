"""The problems of a run: those whose prompt the engine takes."""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from espalier.data.prompt_window import fit_window
from espalier.data.records import Problem
from espalier.data.tasks.task import Task

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Problems:
    """The problems of a run whose prompt the engine takes."""

    train: list[Problem]
    dev: list[Problem]
    digest: str
    """Of all training problems, stored in checkpoints: a resume on others is refused. Which of them fit the window does
    not make it another data set."""
    left_out: dict[str, float]
    """Metrics: how many do not fit, or leave less room than `max_tokens`."""


def choose_problems(task: Task, tokenizer: Any, window: int | None, max_tokens: int) -> Problems:
    """Choose the problems whose prompt fits `window` tokens (None: any); how many do not is said. Raises BadInput where
    none fits."""
    problems: dict[str, list[Problem]] = {}
    left_out: dict[str, float] = {}
    digest = hashlib.sha256()
    for split in ("train", "dev"):
        problems[split] = list(task.problems(split))
        if split == "train":
            for problem in problems[split]:
                digest.update(f"{problem.id}\t{problem.question}\t{problem.gold}\n".encode())
        if window is not None:
            fit = fit_window(task, tokenizer, split, problems[split], window, max_tokens)
            fit.check()
            left_out |= {f"{split}_left_out": float(len(fit.left_out)), f"{split}_short": float(fit.num_short)}
            problems[split] = fit.kept
    warn_of_seen(problems["train"], problems["dev"])
    return Problems(problems["train"], problems["dev"], digest.hexdigest()[:16], left_out)


def warn_of_seen(train: Sequence[Problem], dev: Sequence[Problem]) -> None:
    """Warn where problems of dev are trained on too, as where one file is named for all splits."""
    known = {(problem.context, problem.question) for problem in train}
    seen = [problem.id for problem in dev if (problem.context, problem.question) in known]
    if seen:
        log.warning("%d of %d dev problems are trained on too, so evaluations say nothing of others: name a folder "
                    "with a file per split as task.path: '%s'", len(seen), len(dev), seen[0])  # fmt: skip
