"""A published set of right and wrong responses → RankedResponses (`data.ranked_responses`): a file, or a data set of
the hub."""

from dataclasses import dataclass, replace

from espalier.data.ranked_responses import RankedResponses, read_ranked
from espalier.data.records import BadInput
from espalier.data.sources import read_json_rows
from espalier.data.tables import read_hub_rows
from espalier.pipeline.stage import StageContext


@dataclass(frozen=True)
class ImportComparisons:
    """`layout`: one of data/ranked_responses.py. The input is a file of JSON lines or of one JSON array; without an
    input, `hub` is read: a data set of the hub, or a folder (Parquet files too), with its `config`, `split` and
    `revision`. `subset` names that of rows which have none."""

    layout: str
    hub: str = ""
    config: str = ""
    split: str = ""
    revision: str = ""
    subset: str = ""

    def inputs(self) -> list[str]:
        """Nothing beside the input."""
        return []

    def run(self, input_path: str, context: StageContext) -> list[RankedResponses]:
        """Return records in the order of the rows. Raises BadInput naming file and line, and unless one source is
        named."""
        if bool(input_path) == bool(self.hub):
            raise BadInput("name one source: input=FILE, or stage.hub=NAME_OR_FOLDER with stage.split")
        rows = (
            read_json_rows(input_path)
            if input_path
            else read_hub_rows(self.hub, self.config, self.split, self.revision)
        )
        if self.subset:
            named = [row for row in rows if row.has("subset")]
            if named:
                raise BadInput(f"{named[0].place}: the row has a subset of its own: leave out stage.subset")
            rows = [replace(row, fields={**row.fields, "subset": self.subset}) for row in rows]
        records = read_ranked(rows, self.layout)
        context.counts["subsets"] = len({record.subset for record in records})
        context.counts["responses"] = sum(len(record.chosen) + len(record.rejected) for record in records)
        return records
