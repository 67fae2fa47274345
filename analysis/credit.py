"""The samples of a reinforcement-learning run → one HTML page: which step got which credit, by every estimator.

    python run_stage.py -cn pages/inspect_credit stage.run_dir=RUN output=RUN/credit.html

The page needs no network; its size stands on it, and what was left out.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from espalier.analysis.credit_page import CreditData, render_credit
from espalier.analysis.credit_run import count_opposite_signs, find_disagreements, read_credit_run, sample_files
from espalier.analysis.embedded import Cap
from espalier.data.records import BadInput
from espalier.pipeline.stage import StageContext


@dataclass(frozen=True)
class InspectCredit:
    """`run_dir`: a run of main.py. Estimators disagree over a step where their advantages have opposite signs and both
    are at least `min_advantage` from 0; the `max_disagreements` largest are listed. Texts are cut after
    `max_characters` (0: never)."""

    run_dir: str
    min_advantage: float = 0.1
    max_disagreements: int = 2000
    max_characters: int = 8000

    finds_inputs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.min_advantage <= 0:
            raise BadInput(f"stage.min_advantage must be above 0, got {self.min_advantage:g}")
        for name in ("max_disagreements", "max_characters"):
            if getattr(self, name) < 0:
                raise BadInput(f"stage.{name} must be 0 or more, got {getattr(self, name)}")

    def inputs(self) -> list[str]:
        """List the run's samples, its config and its metrics. Raises BadInput where it has no samples."""
        folder = Path(self.run_dir)
        optional = [folder / "config.yaml", folder / "metrics.jsonl"]
        return [str(path) for path in [*sample_files(folder), *(path for path in optional if path.is_file())]]

    def run(self, input_path: str, context: StageContext) -> str:
        """Return the page."""
        run = read_credit_run(Path(self.run_dir))
        found = find_disagreements(run, self.min_advantage)
        data = CreditData(
            name=Path(self.run_dir).resolve().name,
            run=run,
            limit=self.min_advantage,
            pairs=count_opposite_signs(run, self.min_advantage),
            disagreements=found,
            num_listed=min(len(found), self.max_disagreements),
            cap=Cap(0, 0, self.max_characters, 0.0),
        )
        context.counts.update(rollouts=len(run.rollouts), estimators=len(run.estimators), disagreements=len(found))
        return render_credit(data)
