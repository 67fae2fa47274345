"""The road from a user's files and models to results, measured in sections, each of which can be run alone.

    bash scripts/bench.sh road [SECTION [ITS ARGUMENTS ...]]

Figures of the sections that are not run stay as they are in benchmarks/results/road.json, with the date, commit and
machine of their own.
"""

import importlib
import json
import sys
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.result import RESULTS, machine, write_result
from espalier.runtime.run_dir import code_commit

# modules of benchmarks/road with `measure(words)`
SECTIONS = ("processbench", "prm_scoring", "prm_seeds", "streams", "trl")
_STAMP = ("date", "commit", "machine")


def runs_table(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the table of when and where each section was run; a section whose cells were run apart has a row each."""
    rows = []
    for name, part in parts.items():
        made = {f"{name} {cell}": own["made"] for cell, own in part.get("cells", {}).items()} or {name: part["made"]}
        rows += [[title, *(stamp[key] for key in _STAMP)] for title, stamp in made.items()]
    return {"title": "When and where each section was run", "columns": ["section", *_STAMP], "rows": rows}


def main() -> None:
    """Run one section, or all with their defaults."""
    wanted = sys.argv[1:2] or list(SECTIONS)
    if unknown := [name for name in wanted if name not in SECTIONS]:
        sys.exit(f"error: there is no section '{unknown[0]}': choose {', '.join(SECTIONS)}")
    path = RESULTS / "road.json"
    before: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"detail": {}}
    parts = {name: before["detail"][name] for name in SECTIONS if name in before["detail"]}
    for part in parts.values():
        part.setdefault("made", {key: before[key] for key in _STAMP})
    for name in wanted:
        part = importlib.import_module(f"benchmarks.road.{name}").measure(sys.argv[2:])
        parts[name] = {**part, "made": {"date": time.strftime("%Y-%m-%d"), "commit": code_commit(),
                                        "machine": machine()}}  # fmt: skip
    figures = {figure: value for part in parts.values() for figure, value in part["figures"].items()}
    tables = [runs_table(parts), *(table for part in parts.values() for table in part["tables"])]
    write_result("road", figures, parts, tables=tables)


if __name__ == "__main__":
    main()
