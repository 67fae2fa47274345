"""AnnotatedSolution → the published layout of a format: of the one they were read from, or one that can hold them."""

import json
from dataclasses import dataclass
from typing import Any

from espalier.data.jsonl import read_records
from espalier.data.process_data.formats import published_rows, step_format
from espalier.data.records import AnnotatedSolution, BadInput
from espalier.pipeline.stage import StageContext


@dataclass(frozen=True)
class ExportSteps:
    """`format`: one of data/process_data/formats.py; `neutral_label` as at the import (PRM800K alone)."""

    format: str
    neutral_label: float = 1.0

    def inputs(self) -> list[str]:
        """Nothing beside the input."""
        return []

    def run(self, input_path: str, context: StageContext) -> list[dict[str, Any]] | str:
        """Return rows, or one JSON array as text where the format is published as one. Counts the steps that the format
        cannot hold. Raises BadInput naming the record."""
        form = step_format(self.format, neutral_label=self.neutral_label)
        records = read_records(AnnotatedSolution, input_path)
        if not records:
            raise BadInput(f"{input_path}: no record to export")
        rows = published_rows(records, form, input_path)
        context.counts["records"] = len(records)
        if self.format in ("trl", "math_shepherd"):
            own = [record for record in records if record.info.get("format") != self.format]
            context.counts["steps_left_out"] = sum(_num_after_judged(record) for record in own)
        if not form.is_array:
            return rows
        context.counts["rows"] = len(rows)
        return json.dumps(rows, indent=1) + "\n"


def _num_after_judged(record: AnnotatedSolution) -> int:
    """Return steps from the first one on that nobody judged."""
    return len(record.labels) - record.labels.index(None) if None in record.labels else 0
