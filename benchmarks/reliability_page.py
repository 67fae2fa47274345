"""The table of docs/reliability.md, written from benchmarks/results/faults.json.

python -m benchmarks.reliability_page
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.result import RESULTS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reliability.md"
BEGIN, END = "<!-- table of faults.json: begin -->", "<!-- table of faults.json: end -->"
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
    """Rows in the order of SAYS: what was done, the goal, what was found."""
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


def with_table(page: str, result: dict[str, Any]) -> str:
    """The page with the table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(result)}\n{END}{after}"


def write_page() -> None:
    """Write the table into the page."""
    result = json.loads((RESULTS / "faults.json").read_text())
    PAGE.write_text(with_table(PAGE.read_text(), result))


if __name__ == "__main__":
    write_page()
