"""FOLIO (Han et al. 2022; Yale-LILY/FOLIO): is a conclusion true, false or unknown, given the premises.

JSON lines in `folio-{train,validation}.jsonl`: `story_id`, `example_id`, `premises` (a list; on the hub one string,
a premise a line), `premises-FOL`, `conclusion`, `label`, `source`. The third label is spelt `Unknown` in train and
`Uncertain` in validation, whose rows have no ids; here it is always "Unknown". An empty premise (at the end of four
rows of train) is dropped. Rows have more premises than formulas or empty formulas: formulas belong to no premise by
position.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from data.records import Problem
from data.sources import BadRow, Row
from data.tasks.published import PublishedTask

_LABELS = {"True": "True", "False": "False", "Unknown": "Unknown", "Uncertain": "Unknown"}


@dataclass(frozen=True)
class FOLIO(PublishedTask):
    """The context is the premises, one a line; the question is the conclusion; the gold "True", "False" or
    "Unknown". It has no options: answers are words."""

    kind: str = "boolean3"

    name = "folio"
    files: ClassVar[Mapping[str, tuple[str, ...]]] = {
        split: (f"folio-{title}.jsonl", f"folio/folio-{title}.jsonl", f"data/v0.0/folio-{title}.jsonl")
        for split, title in (("train", "train"), ("dev", "validation"))
    }
    hub_splits: ClassVar[Mapping[str, str]] = {"train": "train", "dev": "validation"}

    def problem(self, row: Row) -> Problem:
        """`info`: "premises", "formulas", "subject" (the source: wiki or hyb), "story_id"."""
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


def _lines(row: Row, name: str) -> list[str]:
    """A list of strings, or the lines of one string; empty ones are dropped, one must be left. Raises BadRow."""
    value = row.fields.get(name)
    parts = value if isinstance(value, list) else row.text(name).split("\n")
    if not all(isinstance(part, str) for part in parts):
        raise BadRow(f"{name} must be a list of strings")
    lines = [part.strip() for part in parts if part.strip()]
    if not lines:
        raise BadRow(f"{name} is empty")
    return lines
