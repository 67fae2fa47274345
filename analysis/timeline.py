"""A run of reinforcement learning → one HTML page: where its tokens ended, who waited for whom, and who did what when.

    python run_stage.py -cn pages/inspect_timeline stage.run_dir=RUN output=RUN/timeline.html

The page needs no network. It can be made while the run goes on: of what was whole by then.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from espalier.analysis.timeline_page import render_timeline
from espalier.analysis.timeline_run import read_timeline_run
from espalier.data.records import BadInput
from espalier.pipeline.stage import StageContext


@dataclass(frozen=True)
class InspectTimeline:
    """`run_dir`: a run of main.py. The picture has the last iterations with at most `max_events` events in all."""

    run_dir: str
    max_events: int = 100_000

    finds_inputs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.max_events < 1:
            raise BadInput(f"stage.max_events must be at least 1, got {self.max_events}")

    def inputs(self) -> list[str]:
        """List the run's metrics and its timeline, where it has one."""
        folder = Path(self.run_dir)
        timeline = folder / "timeline.jsonl"
        return [str(folder / "metrics.jsonl"), *([str(timeline)] if timeline.is_file() else [])]

    def run(self, input_path: str, context: StageContext) -> str:
        """Return the page."""
        run = read_timeline_run(Path(self.run_dir), self.max_events)
        context.counts.update(iterations=len(run.rows), events=len(run.events), left_out=run.num_left_out)
        return render_timeline(Path(self.run_dir).resolve().name, run)
