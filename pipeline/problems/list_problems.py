"""Task → Problem: every problem of a split, and what could not be read.

    python run_stage.py -cn problems/list_problems task=gsm8k output=problems.jsonl
    python run_stage.py -cn problems/list_problems task=logiqa stage.split=dev task.option_order=BCDA \\
        output=shifted.jsonl

Rows that could not be read go to `<output stem>.rejected.jsonl` (file, line, reason); without any there is no such
file. Problems that stand twice are kept and counted.
"""

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass

from espalier.data.jsonl import write_records
from espalier.data.records import BadInput, Problem
from espalier.pipeline.stage import StageContext

log = logging.getLogger("stage")


@dataclass(frozen=True)
class ListProblems:
    """The problems of one split of the task, as the task gives them (split plan, shard, limit, order of options)."""

    split: str = "train"

    def inputs(self) -> list[str]:
        """None: the task makes or reads them."""
        return []

    def run(self, input_path: str, context: StageContext) -> Iterable[Problem]:
        """Return problems in order. Raises BadInput without a task, or where no row could be read."""
        if context.task is None:
            raise BadInput("problems/list_problems needs a task: add task=NAME")
        if hasattr(context.task, "read_rows"):
            problems, rejected = context.task.read_rows(self.split)
        else:
            problems, rejected = context.task.problems(self.split), []
        rejects = context.output.with_name(f"{context.output.stem}.rejected.jsonl")
        rejects.unlink(missing_ok=True)
        if rejected:
            write_records(rejects, rejected)
            for row in rejected[:5]:
                log.warning("%s:%d: %s", row.file, row.line, row.reason)
            log.warning("%d rows rejected: %s", len(rejected), rejects)
        if not problems:
            reason = f": {context.task.who_takes(rejected)}" if rejected else ""
            raise BadInput(f"{context.task.name}/{self.split}: no problem could be read ({len(rejected)} rows rejected)"
                           f"{reason}")  # fmt: skip
        context.counts |= describe_problems(problems) | {"rejected": len(rejected)}
        return problems


def describe_problems(problems: list[Problem]) -> dict[str, int]:
    """Counts: loaded; unlabelled; repeated (as another in context, question, options and gold); those whose
    published id another has; those that repeat an option."""
    texts = {repr((p.context, p.question, p.options, p.gold)) for p in problems}
    ids = {p.id for p in problems}
    return {
        "loaded": len(problems),
        "unlabelled": sum(not p.gold for p in problems),
        "repeated": len(problems) - len(texts),
        "repeated_ids": sum(bool(re.search(r"\.\d+$", p.id)) and p.id.rpartition(".")[0] in ids for p in problems),
        "repeated_options": sum(len(set(p.options)) < len(p.options) for p in problems),
    }
