"""The road from a user's files and models to results, measured in sections, each of which can be run alone.

    bash scripts/bench.sh road [SECTION [ITS ARGUMENTS ...]]

Figures of the sections that are not run stay as they are in benchmarks/results/road.json.
"""

import importlib
import json
import sys
from typing import Any

from benchmarks.result import RESULTS, write_result

SECTIONS = ("prm_scoring", "prm_seeds", "streams")  # modules of benchmarks/road with `measure(words)`


def main() -> None:
    """Run one section, or all with their defaults."""
    wanted = sys.argv[1:2] or list(SECTIONS)
    if unknown := [name for name in wanted if name not in SECTIONS]:
        sys.exit(f"error: there is no section '{unknown[0]}': choose {', '.join(SECTIONS)}")
    path = RESULTS / "road.json"
    before: dict[str, Any] = json.loads(path.read_text())["detail"] if path.is_file() else {}
    parts = {name: before[name] for name in SECTIONS if name in before}
    for name in wanted:
        parts[name] = importlib.import_module(f"benchmarks.road.{name}").measure(sys.argv[2:])
    figures = {figure: value for part in parts.values() for figure, value in part["figures"].items()}
    tables = [table for part in parts.values() for table in part["tables"]]
    write_result("road", figures, parts, tables=tables)


if __name__ == "__main__":
    main()
