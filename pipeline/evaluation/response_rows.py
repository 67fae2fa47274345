"""Responses that are scored in batches, as token ids that memory does not hold: they lie on disk until their turn.

A batch is scored and kept whole (`pipeline.score_parts`), on whatever rank and after whatever stop: its rows are always
the same ones, and so are its scores, to the last bit.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

from espalier.data.batches.packing import cut_batches
from espalier.data.records import BadInput
from espalier.data.row_index import NamelessBase
from espalier.data.steps import StepTokens
from espalier.pipeline.score_parts import ScoreParts
from espalier.runtime.ranks import rank, world_size

_TABLES = """
CREATE TABLE rows (number INTEGER PRIMARY KEY, name BLOB, length INTEGER, prompt INTEGER, ids BLOB);
CREATE TABLE digests (digest BLOB PRIMARY KEY, number INTEGER) WITHOUT ROWID;
CREATE TABLE asked (place INTEGER PRIMARY KEY, number INTEGER);
CREATE TABLE scores (number INTEGER PRIMARY KEY, score REAL);
BEGIN;
"""


@dataclass(frozen=True)
class KeptBatch:
    """The scores of a batch; `row`: its number, from 0; `numbers`: those of its rows; `masses`: of a verifier's scores
    what both verdicts have together."""

    row: int
    numbers: list[int]
    scores: list[float]
    masses: list[float] = field(default_factory=list)

    @property
    def num_scored(self) -> int:
        """How many rows it has."""
        return len(self.numbers)


class Scorer(Protocol):
    """What scores rows; `masses`: of the rows of the last call, where it is a verifier."""

    @property
    def masses(self) -> Sequence[float]:
        """p(Yes) + p(No) of each, empty of other scorers."""

    def __call__(self, rows: Sequence[StepTokens]) -> list[float]:
        """Return the score of each row."""


class ResponseRows(NamelessBase):
    """Takes in rows one by one, has them scored in the batches that `data.batches.packing.in_batches` would make of all
    of them, and gives a score per row back in their order. `is_distinct`: equal rows are scored once."""

    def __init__(self, beside: Path, is_distinct: bool):
        """The rows lie in the folder of `beside`, in a file without a name."""
        super().__init__(beside, _TABLES)
        self._is_distinct, self.num_rows, self._num_asked = is_distinct, 0, 0
        self._digest = blake2b(digest_size=16)

    def add(self, row: StepTokens) -> None:
        """Take in a row. Errors call it by its name, or that of the first equal one."""
        ids = array("i", [*row.prompt_ids, *row.response_ids]).tobytes()
        self._digest.update(len(row.prompt_ids).to_bytes(8, "big") + len(ids).to_bytes(8, "big") + ids)
        with self._on_disk():
            number = self._known(ids, len(row.prompt_ids)) if self._is_distinct else self.num_rows
            self._base.execute("INSERT INTO asked VALUES (?, ?)", (self._num_asked, number))
            self._num_asked += 1
            if number == self.num_rows:
                name = row.name.encode("utf-8", "surrogatepass")
                length = len(row.prompt_ids) + len(row.response_ids)
                values = number, name, length, len(row.prompt_ids), ids
                self._base.execute("INSERT INTO rows VALUES (?, ?, ?, ?, ?)", values)
                self.num_rows += 1

    def _known(self, ids: bytes, num_prompt: int) -> int:
        """Return the number of an equal row, or the next one."""
        digest = blake2b(ids + num_prompt.to_bytes(8, "big"), digest_size=16).digest()
        self._base.execute("INSERT INTO digests VALUES (?, ?) ON CONFLICT DO NOTHING", (digest, self.num_rows))
        number: int = self._base.execute("SELECT number FROM digests WHERE digest = ?", (digest,)).fetchone()[0]
        return number

    @property
    def digest(self) -> str:
        """A hash of the token ids of all rows that were taken in, in their order."""
        return self._digest.hexdigest()

    @property
    def longest(self) -> StepTokens | None:
        """The first of the rows with the most tokens, None without rows."""
        found = self._base.execute("SELECT number FROM rows ORDER BY length DESC, number LIMIT 1").fetchone()
        return None if found is None else self._row(found[0])

    def _row(self, number: int) -> StepTokens:
        name, prompt, ids = self._base.execute("SELECT name, prompt, ids FROM rows WHERE number = ?",
                                               (number,)).fetchone()  # fmt: skip
        tokens = array("i", ids).tolist()
        response = tokens[prompt:]
        return StepTokens(tokens[:prompt], response, [len(response)], name.decode("utf-8", "surrogatepass"))

    def score(
        self,
        is_packed: bool,
        batch_tokens: int,
        scorer: Scorer,
        parts: ScoreParts[KeptBatch],
        on_batch: Callable[[int], None],
    ) -> None:
        """Have every batch scored that `parts` lack, this rank's share of them, and kept there; `on_batch` gets their
        sizes. Raises BadInput where a score is no finite number."""
        order = "number" if is_packed else "length, number"
        with self._on_disk():
            self._base.execute("CREATE INDEX by_length ON rows (length, number)")
            lengths = self._base.execute(f"SELECT number, length FROM rows ORDER BY {order}")
            for place, batch in parts.missing(enumerate(cut_batches(lengths, is_packed, batch_tokens))):
                if place % world_size() != rank():
                    continue
                rows = [self._row(number) for number in batch]
                found = scorer(rows)
                for row, score in zip(rows, found, strict=True):
                    if not math.isfinite(score):
                        raise BadInput(f"{row.name}: the model's score is no finite number: look at its weights")
                parts.add(0, [KeptBatch(place, batch, found, list(scorer.masses))])
                on_batch(len(batch))

    def take(self, kept: Iterable[KeptBatch]) -> bool:
        """Take in what was scored; say whether that is every row."""
        with self._on_disk():
            for batch in kept:
                pairs = zip(batch.numbers, batch.scores, strict=True)
                self._base.executemany("INSERT OR IGNORE INTO scores VALUES (?, ?)", pairs)
            count: int = self._base.execute("SELECT count(*) FROM scores").fetchone()[0]
        return count == self.num_rows

    def __iter__(self) -> Iterator[float]:
        """Yield the score of every row that was taken in."""
        both = "SELECT score FROM asked JOIN scores USING (number) ORDER BY place"
        with self._on_disk():
            for (score,) in self._base.execute(both):
                yield score
