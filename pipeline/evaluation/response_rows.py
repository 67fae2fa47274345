"""Responses that are scored in batches, as token ids that memory does not hold: they lie on disk until their turn."""

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

from espalier.data.batches.packing import cut_batches
from espalier.data.records import BadInput
from espalier.data.row_index import NamelessBase
from espalier.data.steps import StepTokens

_TABLES = """
CREATE TABLE rows (number INTEGER PRIMARY KEY, name BLOB, length INTEGER, prompt INTEGER, ids BLOB);
CREATE TABLE digests (digest BLOB PRIMARY KEY, number INTEGER) WITHOUT ROWID;
CREATE TABLE asked (place INTEGER PRIMARY KEY, number INTEGER);
CREATE TABLE scores (number INTEGER PRIMARY KEY, score REAL);
BEGIN;
"""


class ResponseRows(NamelessBase):
    """Takes in rows one by one, has them scored in the batches that `data.batches.packing.in_batches` would make of all
    of them, and gives a score per row back in their order. `is_distinct`: equal rows are scored once."""

    def __init__(self, beside: Path, is_distinct: bool):
        """The rows lie in the folder of `beside`, in a file without a name."""
        super().__init__(beside, _TABLES)
        self._is_distinct, self._num_rows, self._num_asked = is_distinct, 0, 0

    def add(self, row: StepTokens) -> None:
        """Take in a row. Errors call it by its name, or that of the first equal one."""
        ids = array("i", [*row.prompt_ids, *row.response_ids]).tobytes()
        with self._on_disk():
            number = self._known(ids, len(row.prompt_ids)) if self._is_distinct else self._num_rows
            self._base.execute("INSERT INTO asked VALUES (?, ?)", (self._num_asked, number))
            self._num_asked += 1
            if number == self._num_rows:
                name = row.name.encode("utf-8", "surrogatepass")
                length = len(row.prompt_ids) + len(row.response_ids)
                values = number, name, length, len(row.prompt_ids), ids
                self._base.execute("INSERT INTO rows VALUES (?, ?, ?, ?, ?)", values)
                self._num_rows += 1

    def _known(self, ids: bytes, num_prompt: int) -> int:
        """Return the number of an equal row, or the next one."""
        digest = blake2b(ids + num_prompt.to_bytes(8, "big"), digest_size=16).digest()
        self._base.execute("INSERT INTO digests VALUES (?, ?) ON CONFLICT DO NOTHING", (digest, self._num_rows))
        number: int = self._base.execute("SELECT number FROM digests WHERE digest = ?", (digest,)).fetchone()[0]
        return number

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
        self, is_packed: bool, batch_tokens: int, scores: Callable[[Sequence[StepTokens]], Sequence[float]]
    ) -> None:
        """Have every row scored. Raises BadInput where a score is no finite number."""
        order = "number" if is_packed else "length, number"
        with self._on_disk():
            self._base.execute("CREATE INDEX by_length ON rows (length, number)")
            lengths = self._base.execute(f"SELECT number, length FROM rows ORDER BY {order}")
            for batch in cut_batches(lengths, is_packed, batch_tokens):
                rows = [self._row(number) for number in batch]
                found = scores(rows)
                for row, score in zip(rows, found, strict=True):
                    if not math.isfinite(score):
                        raise BadInput(f"{row.name}: the model's score is no finite number: look at its weights")
                self._base.executemany("INSERT INTO scores VALUES (?, ?)", zip(batch, found, strict=True))

    def __iter__(self) -> Iterator[float]:
        """Yield the score of every row that was taken in."""
        both = "SELECT score FROM asked JOIN scores USING (number) ORDER BY place"
        with self._on_disk():
            for (score,) in self._base.execute(both):
                yield score
