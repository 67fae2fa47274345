"""The tables of docs/reliability.md, written from benchmarks/results/faults.json and silence.json.

python -m benchmarks.reliability_page
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.result import RESULTS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reliability.md"
SAYS = {
    "kills_clean": "`kill -9` at random moments, then the same command again: final files equal an undisturbed run's",
    "flaky_rows_complete": "30 % of answers 500, 429, cut off or late: rows written and not empty, of those wanted",
    "flaky_requests_per_row": "the same: how often a prompt is asked",
    "refused_listed_and_asked_once": "requests that are answered 400: asked once alone, and listed with the reason",
    "lost_server_exit_3": "a server killed, stopped, or frozen behind a `/health` that says 200: exit code 3, rows "
    "valid, the command to go on printed",
    "seconds_to_exit_killed": "a server killed: from the last row to the end",
    "seconds_to_exit_stopped": "a server stopped (SIGSTOP): from the last row to the end",
    "seconds_to_exit_engine_frozen": "an engine frozen behind a healthy front: from the last row to the end",
    "full_disk_clean": "the disk full after any number of pages: exit code 4, whole rows only, a later run completes",
}


def table(result: dict[str, Any]) -> str:
    """Return rows in the order of SAYS: what was done, the goal, what was found."""
    rows = ["| fault | goal | found | kept |", "|---|---|---|---|"]
    for name, text in SAYS.items():
        figure = result["figures"][name]
        sign = "≥" if figure["better"] == "higher" else "≤"
        unit = "" if figure["unit"] == "share" else f" {figure['unit'].split()[0]}"
        kept = "yes" if figure["met"] else "**no**"
        rows.append(f"| {text} | {sign} {figure['goal']:g}{unit} | {figure['value']:g}{unit} | {kept} |")
    detail = result["detail"]
    killed, disk = detail["kills"], detail["full_disk"]
    rows += [
        "",
        f"{killed['kills']} kills in {killed['runs']} runs, {killed['kills_while_rows_came']} of them while rows were "
        f"being written; {disk['places']} places at which the disk ({disk['by']}) was full. Made on {result['date']} "
        f"with commit {result['commit']} on {result['machine']}.",
    ]
    return "\n".join(rows)


def defects_table(result: dict[str, Any]) -> str:
    """Return what was, what happens now, and the tests, of every defect; then when they were run."""
    rows = ["| area | was | now | tests |", "|---|---|---|---|"]
    for row in result["detail"]["defects"]:
        tests = ", ".join(f"`{name}`" for name in row["tests"])
        rows.append(f"| {row['area']} | {row['was']} | {row['now']} | {tests}{'' if row['passes'] else ' **fails**'} |")
    figure = result["figures"]["defects_with_a_failing_test"]
    counts = f"The tests of {figure['value']:g} of {figure['goal']:g} defects pass"
    return "\n".join([*rows, "", f"{counts}: {result['date']}, commit {result['commit']}."])


def with_table(page: str, name: str, table: str) -> str:
    """Return the page with the table of `name` between its two marks."""
    begin, end = f"<!-- table of {name}: begin -->", f"<!-- table of {name}: end -->"
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{table}\n{end}{after}"


def write_page(*names: str) -> None:
    """Write the tables of these result files into the page, of all that are there without names."""
    tables = {"faults.json": table, "silence.json": defects_table}
    page = PAGE.read_text()
    for name in names or tables:
        if (RESULTS / name).is_file():
            page = with_table(page, name, tables[name](json.loads((RESULTS / name).read_text())))
    PAGE.write_text(page)


if __name__ == "__main__":
    write_page()
