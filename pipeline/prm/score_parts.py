"""Step scores kept as they come: a run that was stopped asks for what is missing, on as many ranks as it likes.

Until the output is complete its rows stand in `<output>.parts/`: a file for every start, model and rank, each in the
order of the input, and `origin.json`, which says what is scored by what. Nothing but a row of each file is in memory.
"""

import dataclasses
import heapq
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.data.jsonl import cut_torn_tail, iter_rows, to_line, write_json
from espalier.data.records import BadInput, StepScores, parse_record
from espalier.runtime.distributed import from_main_rank, rank


@dataclass(frozen=True)
class KeptScores:
    """The scores of a solution; `row`: its place in the input, from 0."""

    row: int
    id: str
    problem_id: str
    scores: list[float]
    is_seen: bool | None = None

    @property
    def record(self) -> StepScores:
        """Return the row of the output."""
        return StepScores(self.id, self.problem_id, self.scores, self.is_seen)


class ScoreParts:
    """The rows of an output that are there already. `origin` says what they are made of. Raises BadInput where the
    folder holds rows of another one, with the first thing that differs. Every rank makes one."""

    def __init__(self, output: Path, origin: Mapping[str, Any]):
        self.folder = output.with_name(output.name + ".parts")
        self.start: int = from_main_rank(lambda: self._begin(dict(origin)))

    def _begin(self, origin: dict[str, Any]) -> int:
        """Compare what is there, cut torn lines; the number of this start."""
        stored = self.folder / "origin.json"
        if self._files() and stored.is_file():
            _check_same(self.folder, json.loads(stored.read_text()), origin)
        else:
            for path in self._files():  # of nobody knows what
                path.unlink()
            write_json(stored, origin)
        for path in self._files():
            cut_torn_tail(path)
        return 1 + max(map(_start_of, self._files()), default=-1)

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("scores-*.jsonl"))

    def rows(self, of_starts_before: bool = False) -> Iterator[KeptScores]:
        """Return all rows, or those of the starts before this one, in the order of the input. Raises BadInput on one
        that stands twice."""
        last = -1
        files = [path for path in self._files() if not of_starts_before or _start_of(path) < self.start]
        for kept in heapq.merge(*map(_read, files), key=lambda kept: kept.row):
            if kept.row == last:
                raise BadInput(f"{self.folder} holds the scores of '{kept.id}' twice: remove it")
            last = kept.row
            yield kept

    def add(self, model: int, rows: Sequence[KeptScores]) -> None:
        """Append rows that follow those added before, by the model of that number. Raises OSError where the disk does
        not take them."""
        path = self.folder / f"scores-{self.start}-{model}-{rank()}.jsonl"
        with path.open("a") as file:
            file.write("".join(to_line(dataclasses.asdict(row)) for row in rows))


def _read(path: Path) -> Iterator[KeptScores]:
    return (parse_record(KeptScores, row, place) for place, row in iter_rows(path, leaves_torn=True))


def _start_of(path: Path) -> int:
    return int(path.stem.split("-")[1])


def _check_same(folder: Path, stored: dict[str, Any], origin: dict[str, Any]) -> None:
    for name in dict.fromkeys([*stored, *origin]):
        if (before := stored.get(name)) == (now := origin.get(name)):
            continue
        if name == "commits" and any(before or ()) and any(now or ()):
            raise BadInput(f"{folder} holds scores by commit {before} of the model, which is at {now} now: set "
                           "stage.revision to the first to go on, or remove the folder")  # fmt: skip
        if name == "precision":
            raise BadInput(f"{folder} holds scores in {before or 'a precision nobody wrote down'}, and this machine "
                           f"scores in {now}: go on where it began, or remove the folder")  # fmt: skip
        raise BadInput(f"{folder} holds scores of another input or of other models ({name} differs): remove it")
