"""A published file of process supervision, or a data set of the hub → AnnotatedSolution.

    python run_stage.py -cn prm/import_steps input=gsm8k.json output=solutions.jsonl stage.format=processbench
    python run_stage.py -cn prm/import_steps output=solutions.jsonl stage.format=processbench \\
        stage.hub=Qwen/ProcessBench stage.split=gsm8k
"""

from collections.abc import Iterator
from dataclasses import dataclass

from espalier.data.process_data.formats import read_labelled, step_format
from espalier.data.records import AnnotatedSolution
from espalier.pipeline.stage import StageContext


@dataclass(frozen=True)
class ImportSteps:
    """`format`: one of data/process_data/formats.py. PRM800K alone: `alternatives` makes a record of every
    completion beside the chosen path, `neutral_label` is the label of the rating 0. The input is a file of JSON lines,
    JSON or Parquet; without one `hub` is read: a data set of the hub, or a folder (Parquet files too), with its
    `config`, `split` and `revision`."""

    format: str
    alternatives: bool = False
    neutral_label: float = 1.0
    hub: str = ""
    config: str = ""
    split: str = "train"
    revision: str = ""

    def inputs(self) -> list[str]:
        """Nothing beside the input."""
        return []

    def run(self, input_path: str, context: StageContext) -> Iterator[AnnotatedSolution]:
        """Return records in file order. Counts solutions with a known first error, with an error, and rows whose
        published judgement contradicts itself. Raises BadInput naming file and line."""
        form = step_format(self.format, alternatives=self.alternatives, neutral_label=self.neutral_label)
        counts = context.counts
        for name in ("published_rows", "steps", "unjudged_steps", "with_error", "first_error_unknown", "defects"):
            counts[name] = 0
        seen: set[str] = set()
        source = {"hub": self.hub, "config": self.config, "split": self.split, "revision": self.revision}
        for record in read_labelled(input_path, form, **source):
            seen.add(record.info["row"])
            counts["published_rows"] = len(seen)
            counts["steps"] += len(record.steps)
            counts["unjudged_steps"] += record.labels.count(None)
            counts["with_error"] += record.first_error is not None and record.first_error >= 0
            counts["first_error_unknown"] += record.first_error is None
            counts["defects"] += "defect" in record.info
            yield record
