"""When the evaluations of a run say that it is over: a function of metrics.jsonl, so that a resume counts on."""

import json
from collections.abc import Sequence
from pathlib import Path


def read_accuracies(path: Path) -> list[float]:
    """`eval/accuracy` of every evaluation in a metrics.jsonl, oldest first; none where there is no file."""
    if not path.is_file():
        return []
    rows = (json.loads(line) for line in path.read_text().splitlines())
    return [float(row["eval/accuracy"]) for row in rows if "eval/accuracy" in row]


def evaluations_since_best(accuracies: Sequence[float]) -> int:
    """Evaluations behind the (first) best one."""
    return len(accuracies) - 1 - accuracies.index(max(accuracies)) if accuracies else 0
