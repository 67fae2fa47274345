"""What drawing ahead costs in learning: accuracy at equal updates, with 0, 1 and 4 versions between the policy that
draws and the one that is trained, and with 4 and no correction.

    bash scripts/bench.sh credit --results benchmarks/results/staleness --pictures /tmp/pictures \\
      --cells word_arithmetic rule_logic --methods grpo grpo_ahead_1 ... --seeds 0 1 2 --learning-rate 1e-4   more runs
    bash scripts/bench.sh staleness                                                               the table of them

Runs of a method and its rows ahead are compared seed by seed at the last update that all of them have reached. Writes
benchmarks/results/staleness.json.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.credit.curves import accuracy_at, reach
from benchmarks.credit.intervals import Mean, mean_over_seeds, paired
from benchmarks.credit.plan import read_plan
from benchmarks.credit.runs import Record, read_records
from benchmarks.result import RESULTS, write_result

METHODS = {"GRPO": "grpo", "PPO": "ppo", "VinePPO": "vineppo_k3"}
AHEAD = {"1 ahead": "_ahead_1", "4 ahead": "_ahead_4", "4 ahead, uncorrected": "_ahead_4_uncorrected"}
NONE = "none ahead"
HOW = "bash scripts/bench.sh staleness"


def compared(records: Sequence[Record], cell: str, method: str) -> tuple[float, dict[str, dict[int, float]]]:
    """Return (updates, accuracy by seed of every row): at the last update that all its runs have reached."""
    names = {NONE: method} | {title: method + end for title, end in AHEAD.items()}
    points = {
        title: {row.seed: row.points for row in records if (row.cell, row.method) == (cell, name)}
        for title, name in names.items()
    }
    updates = min(reach(row, "updates") for rows in points.values() for row in rows.values())
    found = {
        title: {seed: accuracy_at(row, "updates", updates) or 0.0 for seed, row in rows.items()}
        for title, rows in points.items()
    }
    return updates, found


def shown(mean: Mean | None, sign: str = "") -> str:
    """Return percent with the 95 % interval, where there are seeds enough for one."""
    if mean is None:
        return ""
    value, *ends = (f"{100 * number:{sign}.1f}" for number in (mean.value, mean.low, mean.high) if number is not None)
    return f"{value} [{', '.join(ends)}]" if ends else value


def main() -> None:
    """Write results/staleness.json."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    plan = read_plan(Path(__file__).with_name("plan.yaml"))
    records, stale = read_records(plan, RESULTS / "staleness")
    rows: list[list[Any]] = []
    for cell in sorted({record.cell for record in records}, reverse=True):
        for title, method in METHODS.items():
            updates, found = compared(records, cell, method)
            differences = [shown(paired(found[name], found[NONE]), "+") for name in AHEAD]
            own = shown(mean_over_seeds([*found[NONE].values()]))
            rows.append([f"{cell}, {title}", f"{updates:g}", len(found[NONE]), own, *differences])
    table = {
        "title": "accuracy at equal updates, percent, with 95 % intervals over seeds: none ahead, and the difference "
        "to it, seed by seed (update.learning_rate=1e-4)",
        "columns": ["cell, method", "updates", "seeds", NONE, *AHEAD],
        "rows": rows,
    }
    detail = {"left_out": stale, "commits": sorted({record.commit for record in records}), "how": HOW}
    print(write_result("staleness", {}, detail, tables=[table]))


if __name__ == "__main__":
    main()
