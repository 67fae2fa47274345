"""Step scores kept as they come: a run that was stopped asks for what is missing.

Until the output is complete its rows stand in `<output>.parts/scores.jsonl`, in the order in which they came, and
`origin.json` beside them says what was scored by what.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from espalier.data.jsonl import cut_torn_tail, file_sha256, read_records, to_line, write_json
from espalier.data.records import BadInput, StepScores
from espalier.runtime.run_dir import model_fingerprint

log = logging.getLogger("stage")


class Scored(Protocol):
    """A solution that is scored."""

    @property
    def id(self) -> str:
        """Its id."""

    @property
    def problem_id(self) -> str:
        """Its problem's."""


class ScoreParts:
    """The rows of an output that are there already, `scores` by solution; `ids` are those of the input, `how` says how
    the models read it. Raises BadInput where the folder holds rows of another input, other models, another way, or ids
    that are not of this input."""

    def __init__(self, output: Path, input_path: str, models: Sequence[str], ids: Sequence[str], how: str = ""):
        self.folder = output.with_name(output.name + ".parts")
        self.path = self.folder / "scores.jsonl"
        self.scores: dict[str, list[float]] = {}
        origin = {"input": file_sha256(input_path), "models": [model_fingerprint(path) for path in models]}
        origin |= {"how": how} if how else {}
        stored = self.folder / "origin.json"
        if stored.is_file() and json.loads(stored.read_text()) != origin:
            raise BadInput(f"{self.folder} holds scores of another input or of other models: remove it")
        self.folder.mkdir(parents=True, exist_ok=True)
        if not stored.is_file():
            self.path.unlink(missing_ok=True)  # of a run that died before it could say what it scored
            write_json(stored, origin)
        if not self.path.is_file():
            return
        cut_torn_tail(self.path)
        known = set(ids)
        for row in read_records(StepScores, self.path):
            if row.id not in known:
                raise BadInput(f"{self.path}: '{row.id}' is no solution of {input_path}: remove {self.folder}")
            self.scores[row.id] = row.scores
        if self.scores:
            log.info("%s: going on after %d of %d solutions", output, len(self.scores), len(known))

    def add(
        self, rows: Sequence[Scored], scores: Sequence[Sequence[float]], is_seen: Mapping[str, bool | None]
    ) -> None:
        """Append the scores of some solutions. Raises OSError where the disk does not take them."""
        lines = []
        for row, found in zip(rows, scores, strict=True):
            lines.append(to_line(StepScores(row.id, row.problem_id, list(found), is_seen[row.problem_id])))
            self.scores[row.id] = list(found)
        with self.path.open("a") as file:
            file.write("".join(lines))
