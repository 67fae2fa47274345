"""Our grader and math-verify alone on the published cases of ten answer graders, by source.

    bash scripts/bench.sh grader_cases [FOLDER]

FOLDER (or ESPALIER_DATA, or ../shared/datasets) holds grader_cases_dev.jsonl. Rows with a boolean `expected` and no
convention note count. math-verify reads the gold as it stands, then as one formula; the prediction likewise.
"""

import json
import logging
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.result import write_result
from espalier.data.answers.grading import grade_answer
from espalier.data.answers.pool import POOL

KINDS = {
    "response": "response_math",
    "short_answer": "short_answer",
    "choice_letter": "choice",
    "format": "think_format",
}


def math_verify_alone(prediction: str, gold: Any) -> bool:
    """Return its verdict in process, with its own time limits."""
    from math_verify import parse, verify

    def read(text: str) -> list[Any]:
        return parse(text) or parse(f"${text}$")  # type: ignore[no-any-return]

    golds = gold if isinstance(gold, list) else [gold]
    try:
        return any(verify(read(one), read(prediction)) for one in golds)
    except Exception:  # whatever it raises, it has not said that the answer is right
        return False


def wilson(hits: int, total: int) -> tuple[float, float]:
    """Return the 95 % Wilson interval of a share."""
    z, share = 1.959964, hits / total
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z * ((share * (1 - share) + z * z / (4 * total)) / total) ** 0.5 / (1 + z * z / total)
    return max(0.0, middle - half), min(1.0, middle + half)


def main() -> None:
    """Grade all cases twice and write results/grader_cases.json."""
    logging.disable(logging.CRITICAL)
    beside = Path(__file__).resolve().parents[3] / "shared" / "datasets"
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else os.environ.get("ESPALIER_DATA") or beside)
    path = folder / "grader_cases_dev.jsonl"
    if not path.is_file():
        sys.exit(f"error: no {path}: set ESPALIER_DATA to the folder that holds grader_cases_dev.jsonl")
    POOL.start()
    table: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    disagreements = []
    for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        kind = KINDS.get(row["kind"].split(":")[0], "math")
        if not isinstance(row["expected"], bool):
            continue
        grade = grade_answer(prediction=row["prediction"], gold=row["gold"] or "", kind=kind, num_options=5)
        is_convention = "convention" in (row.get("note") or "")
        if grade.is_correct != row["expected"]:
            entry = {"id": row["id"], "kind": row["kind"], "expected": row["expected"], "reason": grade.reason}
            disagreements.append({**entry, "is_convention": is_convention})
        if is_convention:
            continue
        counts = table[row["source"].split(":")[0]]
        counts[0] += 1
        counts[1] += grade.is_correct == row["expected"]
        counts[2] += math_verify_alone(row["prediction"], row["gold"] or "") == row["expected"]
    total = [sum(counts[index] for counts in table.values()) for index in range(3)]
    for source, counts in sorted(table.items()):
        print(f"| {source} | {counts[0]} | {counts[1]} | {counts[2]} |")
    how = "bash scripts/bench.sh grader_cases"
    figures: dict[str, Any] = {}
    for name, index, goal in (("agreement", 1, 0.97), ("math_verify_alone", 2, 0.0)):
        low, high = wilson(total[index], total[0])
        share = total[index] / total[0]
        figures[name] = {"value": round(share, 4), "low": round(low, 4), "high": round(high, 4), "unit": "share",
                         "goal": goal, "better": "higher", "met": share >= goal, "how": how}  # fmt: skip
    behind = [source for source, counts in table.items() if counts[1] < counts[2]]
    figures["sources_behind_math_verify"] = {"value": len(behind), "low": len(behind), "high": len(behind),
                                             "unit": "count", "goal": 0, "better": "lower", "met": not behind,
                                             "how": how}  # fmt: skip
    detail = {"rows_ours_math_verify": dict(sorted(table.items())), "disagreements": disagreements}
    print(write_result("grader_cases", figures, detail))
    POOL.stop()


if __name__ == "__main__":
    main()
