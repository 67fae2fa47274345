"""Rows that others publish → records with token ids, by the tokenizer of the model that will learn from them.

A row is read on its own: one that cannot be is written to `X.rejected.jsonl` with its place and the reason, counted,
and ends the program with 1; so is one that becomes another kind of record than the first one. Ids are the rows' own
(`id` or `prompt_id`), or made of the line; one that stands again gets `~2`, `~3`, … behind it. Rows are read one by
one, and their ids are counted on disk: memory does not grow with those that can be read.
"""

import logging
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from espalier.data.jsonl import write_records
from espalier.data.row_index import SeenIds
from espalier.data.sources import BadRow, RejectedRow, Row
from espalier.data.tables import open_rows
from espalier.pipeline.stage import StageContext

log = logging.getLogger("stage")


@dataclass(frozen=True)
class PublishedRows:
    """`tokenizer`: the folder or hub name of the model that is trained; `hub` with `config`, `split`, `revision`: in
    place of an input file."""

    tokenizer: str
    hub: str = ""
    config: str = ""
    split: str = "train"
    revision: str = ""

    @abstractmethod
    def read(self, row: Row, tokenizer: Any) -> Any:
        """Return the record of a row. Raises BadRow."""

    def inputs(self) -> list[str]:
        """None beside the input."""
        return []

    def run(self, input_path: str, context: StageContext) -> Iterator[Any]:
        """Return one record per row that can be read, in order."""
        from espalier.models.tokenizer import load_tokenizer

        total, rows = open_rows(input_path, self.hub, self.config, self.split, self.revision)
        tokenizer = load_tokenizer(self.tokenizer)
        rejected: list[RejectedRow] = []
        kind: Any = None
        with context.progress("import", total, "row") as progress, SeenIds(context.output) as ids:
            for number, row in enumerate(rows, 1):
                try:
                    if row.error:
                        raise BadRow(row.error)
                    record = self.read(row, tokenizer)
                    kind = type(record) if kind is None else kind
                    if not isinstance(record, kind):
                        raise BadRow(f"its columns are those of a {type(record).__name__}, and the rows above are "
                                     f"{kind.__name__}: put it into a file of its own")  # fmt: skip
                except BadRow as error:
                    rejected.append(row.rejected(str(error)))
                    continue
                times, _ = ids.add(record.id)
                yield record if times == 1 else replace(record, id=f"{record.id}~{times}")
                progress.update(number)
        context.counts["rejected"] = len(rejected)
        if rejected:
            write_records(context.output.with_name(f"{context.output.stem}.rejected.jsonl"), rejected)
            first = rejected[0]
            log.warning("%d of %d rows cannot be read: %s:%d: %s", len(rejected), total, first.file, first.line,
                        first.reason)  # fmt: skip


def row_name(row: Row) -> str:
    """Return a row's own id, or one of its line."""
    identity = row.fields.get("id", row.fields.get("prompt_id"))
    is_name = isinstance(identity, str | int) and not isinstance(identity, bool)
    return str(identity) if is_name else f"row-{row.line}"
