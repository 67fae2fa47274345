"""What went wrong without a word once, and the tests that failed on it: run together, counted one by one.

They stand in defects.yaml, which is also the table of docs/reliability.md. A defect counts where all its tests pass; a
test that is skipped or that pytest does not find counts as none.
"""

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.processes.forked import ROOT


@dataclass(frozen=True)
class Defect:
    """`was`: what happened, `now`: what happens, `tests` as pytest names them below tests/."""

    area: str
    was: str
    now: str
    tests: tuple[str, ...]


def read_defects() -> list[Defect]:
    """Return those of defects.yaml, in its order."""
    rows = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    return [Defect(row["area"], row["was"], row["now"], tuple(row["tests"])) for row in rows]


def measure(defects: Sequence[Defect]) -> list[bool]:
    """Of each whether all its tests pass."""
    names = list(dict.fromkeys(name for defect in defects for name in defect.tests))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "", f"--junitxml={report}", "-o", "junit_family=xunit1",
                   *(f"tests/{name}" for name in names)]  # fmt: skip
        subprocess.run(command, cwd=ROOT, stdout=sys.stderr, timeout=1800, check=False)
        passed = _passed(report)
    return [all(_is_good(name, passed) for name in defect.tests) for defect in defects]


def _passed(report: Path) -> dict[str, bool]:
    """`folder/file.py::test[case]` → whether it passed, of every test that ran."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('file', '').removeprefix('tests/')}::{case.get('name')}"
        found[name] = not any(case.find(tag) is not None for tag in ("failure", "error", "skipped"))
    return found


def _is_good(name: str, passed: dict[str, bool]) -> bool:
    """Return a test, with all its cases where it has some and none is named."""
    cases = [good for found, good in passed.items() if found == name or found.startswith(f"{name}[")]
    return bool(cases) and all(cases)
