"""`X.failed.jsonl` beside an output X: what was asked and got no answer, each with its reason.

A stage that reads X reads there which of its rows are missing for good. What is neither in X nor there is not sampled
yet.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from espalier.data.jsonl import iter_rows, open_atomic
from espalier.data.records import BadInput


def failed_path(path: str | Path) -> Path:
    """Say where the failed rows of X are listed."""
    return Path(path).with_suffix(".failed.jsonl")


def write_failed(path: Path, failed: Sequence[tuple[str, str]]) -> Path:
    """List id and reason of every request that failed; the list is removed where there is none."""
    beside = failed_path(path)
    if not failed:
        beside.unlink(missing_ok=True)
        return beside
    with open_atomic(beside) as file:
        file.writelines(json.dumps({"id": key, "reason": reason}) + "\n" for key, reason in failed)
    return beside


def read_failed(path: str | Path) -> dict[str, str]:
    """Id → reason, {} where nothing failed. Raises BadInput on a line that has no id."""
    beside = failed_path(path)
    if not beside.is_file():
        return {}
    reasons = {}
    for place, row in iter_rows(beside):
        if not isinstance(row.get("id"), str):
            raise BadInput(f"{place}: no id: sample again, which writes this list anew")
        reasons[row["id"]] = str(row.get("reason", ""))
    return reasons
