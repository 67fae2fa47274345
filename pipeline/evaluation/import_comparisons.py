"""A published set of right and wrong responses → RankedResponses (`data.ranked_responses`): a file, or a data set of
the hub. Rows are read one by one, and their ids lie on disk: memory does not grow with them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from espalier.data.left_out import leave_out
from espalier.data.ranked_responses import PRIOR_SETS, RankedResponses, SameResponses, read_ranked
from espalier.data.records import BadInput
from espalier.data.row_index import SeenIds
from espalier.data.sources import Row
from espalier.data.tables import open_rows
from espalier.pipeline.evaluation.reward_benchmarks import REWARD_BENCH_COUNTS
from espalier.pipeline.stage import StageContext


@dataclass(frozen=True)
class ImportComparisons:
    """`layout`: one of data/ranked_responses.py. The input is a file of JSON lines, of one JSON array, or Parquet;
    without an input, `hub` is read: a data set of the hub, or a folder (Parquet files too), with its `config`, `split`
    and `revision`. `subset` names that of rows which have none; one of RewardBench's prior sets is named so although
    its rows say which part of it they are of, unless they are of another subset of RewardBench."""

    layout: str
    hub: str = ""
    config: str = ""
    split: str = ""
    revision: str = ""
    subset: str = ""

    def inputs(self) -> list[str]:
        """Nothing beside the input."""
        return []

    def run(self, input_path: str, context: StageContext) -> Iterator[RankedResponses]:
        """Return records in the order of the rows; counts, and leaves out, those with a response on both sides. Raises
        BadInput naming file and line, where two rows have one id, where no row is left, and unless one source is
        named."""
        if bool(input_path) == bool(self.hub):
            raise BadInput("name one source: input=FILE, or stage.hub=NAME_OR_FOLDER with stage.split")
        _, rows = open_rows(input_path, self.hub, self.config, self.split, self.revision)
        subsets: set[str] = set()
        num_rows, num_responses, first_same = 0, 0, ""
        context.counts.update(subsets=0, responses=0, same_responses=0)
        with SeenIds(context.output) as ids:
            for row in rows:
                num_rows += 1
                try:
                    record = read_ranked(self._of_subset(row), self.layout)
                except SameResponses:
                    context.counts["same_responses"] += 1
                    first_same = first_same or row.place
                    continue
                times, place = ids.add(record.id, row.place)
                if times > 1:
                    raise BadInput(f"{row.place}: the id '{record.id}' is that of {place} too: give every row its own")
                subsets.add(record.subset)
                num_responses += len(record.chosen) + len(record.rejected)
                yield record
        num_same = context.counts["same_responses"]
        context.counts.update(subsets=len(subsets), responses=num_responses)
        source, reason = input_path or self.hub, "have a response that is both chosen and rejected"
        if num_same == num_rows:
            raise BadInput(f"{source}: all {num_rows} rows {reason}: there is nothing to compare")
        leave_out(source, num_same, num_rows, "rows", reason, details=f" ({first_same} is the first)")

    def _of_subset(self, row: Row) -> Row:
        """Return a row with the subset that the stage names, if it does. Raises BadInput on one that has its own."""
        if not self.subset:
            return row
        if row.has("subset") and self.subset not in PRIOR_SETS:
            raise BadInput(f"{row.place}: the row has a subset of its own: leave out stage.subset")
        own = str(row.fields.get("subset") or "").strip()
        if own in REWARD_BENCH_COUNTS or own in set(PRIOR_SETS) - {self.subset}:
            raise BadInput(f"{row.place}: the row is of the subset '{own}' of RewardBench: leave out stage.subset")
        return replace(row, fields={**row.fields, "subset": self.subset})
