"""FOLIO (Han et al. 2022; Yale-LILY/FOLIO): is a conclusion true, false or unknown, given the premises.

JSON lines in `folio-{train,validation}.jsonl`: `story_id`, `example_id`, `premises` (a list; on the hub one string,
a premise a line), `premises-FOL`, `conclusion`, `label`, `source`. The third label is spelt `Unknown` in train and
`Uncertain` in validation, whose rows have no ids; here it is always "Unknown". An empty premise (at the end of four
rows of train) is dropped. Rows have more premises than formulas or empty formulas: formulas belong to no premise by
position.

Two more layouts are read as what they are: the tab-separated release (`folio-{train,validation}.txt`, a header, lists
written as Python writes them, no ids), and Logic-LLM's (`data.tasks.logic_llm`), where the premises are one text, the
conclusion stands behind a sentence that asks whether it is true, and the answer is the letter of an option.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from espalier.data.records import Problem
from espalier.data.sources import LETTERS, BadRow, Row
from espalier.data.tables import read_tab_rows
from espalier.data.tasks.logic_llm import is_logic_llm, logic_llm_places, logic_llm_problem
from espalier.data.tasks.published import PublishedTask

_LABELS = {"True": "True", "False": "False", "Unknown": "Unknown", "Uncertain": "Unknown"}
_ASKED = re.compile(r"Based on the above information, is the following statement true, false, or \w+\?\s*")


@dataclass(frozen=True)
class FOLIO(PublishedTask):
    """The context is the premises, one a line; the question is the conclusion; the gold "True", "False" or
    "Unknown". It has no options: answers are words."""

    kind: str = "boolean3"

    name = "folio"
    files: ClassVar[Mapping[str, tuple[str, ...]]] = {
        split: (
            *(
                f"{folder}folio-{title}.{ending}"
                for ending in ("jsonl", "txt")
                for folder in ("", "folio/", "data/v0.0/")
            ),
            *logic_llm_places("FOLIO", split),
        )
        for split, title in (("train", "train"), ("dev", "validation"))
    }
    hub_splits: ClassVar[Mapping[str, str]] = {"train": "train", "dev": "validation"}

    def read_file(self, path: Path) -> list[Row]:
        """Return tab-separated rows, or JSON."""
        return read_tab_rows(path) or super().read_file(path)

    def problem(self, row: Row) -> Problem:
        """Read a row; `info`: "premises", "formulas", "subject" (the source: wiki or hyb), "story_id".

        Raises BadRow where the label or the options are not the published ones.
        """
        if is_logic_llm(row):
            return _from_options(logic_llm_problem(row))
        label = row.text("label")
        if label not in _LABELS:
            raise BadRow(f"label must be True, False, Unknown or Uncertain, got {label!r}")
        premises = _lines(row, "premises")
        info: dict[str, Any] = {"premises": premises}
        if row.has("premises-FOL"):
            info["formulas"] = _lines(row, "premises-FOL")
        if row.has("source"):
            info["subject"] = row.text("source")
        if row.has("story_id"):
            info["story_id"] = row.integer("story_id")
        published = str(row.integer("example_id")) if row.has("example_id") else ""
        return Problem(published, row.text("conclusion"), _LABELS[label], info, "\n".join(premises))


def _from_options(problem: Problem) -> Problem:
    """Make our problem from one of Logic-LLM's layout: the gold is the option's word.

    Raises BadRow where the options are others.
    """
    words = [_LABELS.get(option) for option in problem.options]
    if None in words or (problem.gold and problem.gold not in list(LETTERS[: len(words)])):
        raise BadRow(f"options must be True, False and Uncertain and answer the letter of one, got {problem.options} "
                     f"and {problem.gold!r}")  # fmt: skip
    gold = str(words[LETTERS.index(str(problem.gold))]) if problem.gold else ""
    conclusion = _ASKED.sub("", problem.question)
    return Problem(problem.id, conclusion, gold, {"premises": [problem.context]}, problem.context)


def _literal(text: str) -> list[Any] | None:
    """Return the list that a text writes as Python does, None where it writes none. Raises BadRow on a damaged one."""
    if not text.lstrip().startswith("["):
        return None
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        if text.rstrip().endswith("]"):
            return None  # a text that begins with a bracket, such as "[BG] If it rains, ..."
        raise BadRow("a list without its end: the row is damaged") from None
    return value if isinstance(value, list) else None


def _lines(row: Row, name: str) -> list[str]:
    """Read a list of strings, or the lines of one string, without empty ones.

    Raises BadRow where none is left, or one is no string.
    """
    value = row.fields.get(name)
    if isinstance(value, str):
        value = _literal(value)
    parts = value if isinstance(value, list) else row.text(name).split("\n")
    if not all(isinstance(part, str) for part in parts):
        raise BadRow(f"{name} must be a list of strings")
    lines = [part.strip() for part in parts if part.strip()]
    if not lines:
        raise BadRow(f"{name} is empty")
    return lines
