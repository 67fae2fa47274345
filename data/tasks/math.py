r"""MATH (Hendrycks et al. 2021) in its three published layouts, recognized by the files and columns:

- the archive: `MATH/{train,test}/<subject>/<n>.json`, one object a file; ids `math-test-algebra-17`;
- a table: `{train,test}.jsonl` with `problem`, `level`, `type`, `solution`; ids by row number;
- MATH-500 (Lightman et al. 2023): `problem`, `solution`, `answer`, `subject`, `level`, `unique_id`.

The gold answer is the published `answer`, else what the last `\boxed` (or `\fbox`) of the solution holds, braces
matched. Two rows of train have an empty box: they are published without an answer, so their gold is "" and they are
no demonstrations. `Level ?` is no level. The set has no dev split: see data/splits.py.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from espalier.data.records import BadInput, Problem
from espalier.data.sources import BadRow, Row, read_json_folder, read_json_rows
from espalier.data.splits import SplitPlan
from espalier.data.tables import read_hub_rows
from espalier.data.tasks.published import PublishedTask, Rows

log = logging.getLogger(__name__)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BARE = re.compile(r"[^\s$]+")


def last_boxed(text: str) -> str | None:
    r"""Return what the last `\boxed` or `\fbox` holds, "" where it is empty; None where there is none, or its braces do
    not close.

    An escaped brace (`\{`) is no brace. Without braces (`\boxed 2`) it is the text up to a blank or `$`.
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    start = boxes[-1].end()
    if text[start : start + 1] != "{":
        bare = _BARE.match(text, start)
        return bare[0].rstrip(".,;") if bare else ""
    depth, place = 0, start
    while place < len(text):
        if text[place] == "\\":
            place += 1
        elif text[place] in "{}":
            depth += 1 if text[place] == "{" else -1
            if depth == 0:
                return text[start + 1 : place].strip()
        place += 1
    return None


@dataclass(frozen=True)
class MATH(PublishedTask):
    """`held_out`: a file (or hub name) of problems that are the test split of a plan and are never in its other
    splits, as MATH-500 is; they are found in the pool by their text."""

    kind: str = "response_math"
    held_out: str = ""

    name = "math"
    has_solutions: ClassVar[bool] = True
    files: ClassVar[Mapping[str, tuple[str, ...]]] = {
        split: (f"{split}.jsonl", f"math/{split}.jsonl", split, f"MATH/{split}", f"math/MATH/{split}")
        for split in ("train", "test")
    }
    hub_splits: ClassVar[Mapping[str, str]] = {"train": "train", "test": "test"}

    def read_file(self, path: Path) -> list[Row]:
        """Return the archive's folder of one split, or a table."""
        return read_json_folder(path) if path.is_dir() else read_json_rows(path)

    def problem(self, row: Row) -> Problem:
        """Read a row; `info`: "subject", "level" (1 to 5, or None), "solution".

        Raises BadRow where it has neither an answer nor a closed box.
        """
        solution = row.text("solution", default="")
        gold = row.text("answer", default="") or last_boxed(solution)
        if gold is None:
            raise BadRow("there is no answer, and the solution has no closed \\boxed{...}")
        subject = row.text("subject", default="") or row.text("type", default="")
        info = {"subject": subject, "level": _level(row), "solution": solution}
        published = row.key or row.text("unique_id", default="").removesuffix(".json").partition("/")[2]
        return Problem(published, row.text("problem"), gold, info)

    def plan(self) -> SplitPlan | None:
        """Without "test", which is the held-out list where there is one."""
        plan = self.splits
        if plan is None or not self.held_out:
            return plan
        return replace(plan, sizes={name: size for name, size in plan.sizes.items() if name != "test"})

    def read_split(self, split: str) -> Rows:
        """Test is the held-out list where there is one."""
        if self.splits is not None and self.held_out and split == "test":
            return self._read_held_out()
        return super().read_split(split)

    def files_of(self, split: str) -> list[str]:
        """Return the held-out list too, where a plan divides the rest."""
        is_listed = self.splits is not None and Path(self.held_out).is_file()
        if is_listed and split == "test":
            return [self.held_out]
        return [*super().files_of(split), *([self.held_out] if is_listed else [])]

    def read_pool(self, plan: SplitPlan) -> Rows:
        """Return the pool less the held-out list."""
        problems, rejected = super().read_pool(plan)
        if not self.held_out:
            return problems, rejected
        listed = {_words(problem.question) for problem in self._read_held_out()[0]}
        kept = [problem for problem in problems if _words(problem.question) not in listed]
        num_found = len({_words(problem.question) for problem in problems} & listed)
        if num_found < len(listed):
            log.warning("math: %d of the %d held-out problems are in the pool", num_found, len(listed))
        return kept, rejected

    def _read_held_out(self) -> Rows:
        if Path(self.held_out).exists() or not self.hub:
            rows = self.read_file(Path(self.held_out))
        else:
            rows = read_hub_rows(self.held_out, "", "test", "")
        problems, rejected = self.read_problems(rows, "test")
        if not problems:
            raise BadInput(f"{self.held_out}: no problem to hold out")
        return problems, rejected


def _words(text: str) -> str:
    return " ".join(text.split())


def _level(row: Row) -> int | None:
    """`Level 3` or 3 → 3, `Level ?` or none → None. Raises BadRow on anything else."""
    value = row.fields.get("level")
    match = re.fullmatch(r"(?:Level )?([1-9]|\?)", str(value).strip())
    if value is None:
        return None
    if match is None or isinstance(value, bool | float):
        raise BadRow(f"level must be 'Level 1' to 'Level 5' or 'Level ?', got {value!r}")
    return None if match[1] == "?" else int(match[1])
