"""Trajectories with all that is known of their steps → one HTML page to read them in.

    python run_stage.py -cn pages/inspect_steps input=trajectories.jsonl output=inspect.html \\
        stage.values=step_values.jsonl stage.states=states.jsonl stage.completions=completions.jsonl \\
        stage.scores=step_scores.jsonl

Everything but the trajectories may be left out. With a task (`task=NAME`) answers that can be read too early are found
by the task's own grader. The page needs no network; its size stands on it, and what was left out.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from espalier.analysis.embedded import Cap, Embedded
from espalier.analysis.flags import KINDS, Suspicion, SuspicionRule, flags
from espalier.analysis.inspected import Inspected, InspectedFiles, Inspection, read_inspection
from espalier.analysis.inspector_page import InspectorData, render_inspector
from espalier.data.records import BadInput
from espalier.pipeline.stage import StageContext


@dataclass(frozen=True)
class InspectSteps:
    """Files as of `analysis.inspected.InspectedFiles`, limits as of `analysis.flags.SuspicionRule`, caps as of
    `analysis.embedded.Cap`. Of more than `max_trajectories` those with the most kinds of suspicion are shown."""

    values: str = ""
    states: str = ""
    completions: str = ""
    scores: str = ""
    verdicts: str = ""
    min_jump: float = 0.5
    max_width: float = 0.75
    min_gap: float = 0.5
    length_share: float = 0.01
    max_trajectories: int = 10000
    max_completions: int = 8
    max_characters: int = 8000
    max_megabytes: float = 64.0

    def __post_init__(self) -> None:
        for name in ("max_trajectories", "max_completions", "max_characters", "max_megabytes"):
            if getattr(self, name) < 0:
                raise BadInput(f"stage.{name} must be 0 (no cap) or more, got {getattr(self, name)}")

    @property
    def files(self) -> InspectedFiles:
        """The files beside the trajectories."""
        return InspectedFiles(self.values, self.states, self.completions, self.scores, self.verdicts)

    def inputs(self) -> list[str]:
        """Read all files that are given. Raises BadInput where they do not go together."""
        self.files.check()
        return self.files.paths()

    def run(self, input_path: str, context: StageContext) -> str:
        """Return the page."""
        self.files.check()
        rule = SuspicionRule(self.min_jump, self.max_width, self.min_gap, self.length_share)
        inspection = read_inspection(input_path, self.files)
        limits = rule.length_limits(inspection.rows)
        flags_of_rows = [flags(row, rule, limits, inspection.completions, context.task) for row in inspection.rows]
        embedded = self._embed(inspection, flags_of_rows)
        kinds = Counter(kind for one in flags_of_rows for kind in {suspicion.kind for suspicion in one})
        shown = len(embedded.index.get("id", ()))
        num_completions = sum(map(len, inspection.completions.values()))
        context.counts.update(trajectories=len(flags_of_rows), shown=shown, completions=num_completions)
        context.counts.update({kind: kinds[kind] for kind in KINDS if kinds[kind]})
        context.counts["megabytes"] = round(embedded.num_bytes / 1e6, 2)
        name = context.output.resolve().parent.name
        return render_inspector(InspectorData(name, inspection.rows, flags_of_rows, embedded, num_completions))

    def _embed(self, inspection: Inspection, found: Sequence[Sequence[Suspicion]]) -> Embedded:
        """Return the trajectories that are shown, problem by problem: the most suspicious first where not all are."""
        embedded = Embedded(Cap(self.max_trajectories, self.max_completions, self.max_characters, self.max_megabytes))
        groups: dict[str, list[int]] = {}
        for place in self._chosen(inspection.rows, found):
            groups.setdefault(inspection.rows[place].trajectory.problem_id, []).append(place)
        for places in groups.values():
            for number, place in enumerate(places):
                embedded.add(inspection.rows[place], found[place], inspection.completions, number == 0)
        embedded.close_block()
        return embedded

    def _chosen(self, rows: Sequence[Inspected], found: Sequence[Any]) -> list[int]:
        """Return places in the order of the file."""
        places = range(len(rows))
        if not 0 < self.max_trajectories < len(rows):
            return list(places)
        worst = sorted(places, key=lambda place: -len({one.kind for one in found[place]}))
        return sorted(worst[: self.max_trajectories])
