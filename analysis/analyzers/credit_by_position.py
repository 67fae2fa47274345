"""Where in a solution values and advantages lie, along a run's iterations: from its sampled rollouts.

Step i of S (from 0) starts from the state at i / S of the way and lies in that tenth. Solutions of one or two steps
have no middle and are left out, as in the published system. Advantages are those that were trained on, after whitening.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, ClassVar

from espalier.analysis.analyzers.figure import Panel, write_figure
from espalier.analysis.analyzers.run_history import RunHistory
from espalier.data.left_out import leave_out
from espalier.data.records import BadInput, SampledRollout
from espalier.pipeline.stage import StageContext

MIN_STEPS = 3


def spread_evenly(iterations: Sequence[int], number: int) -> list[int]:
    """Return at most `number` of them at even distances, the first and the last among them."""
    if len(iterations) <= number:
        return list(iterations)
    last = len(iterations) - 1
    return [iterations[round(place * last / (number - 1))] for place in range(number)]


def credit_by_tenth(rollouts: Sequence[SampledRollout]) -> dict[str, dict[str, float | None]]:
    """Return tenth of the way → number of steps; of their advantages the mean, the mean size, the standard deviation
    and the share that is 0; the mean value of their states in right and in wrong solutions (None without values)."""
    advantages: dict[int, list[float]] = {}
    values: dict[tuple[int, bool], list[float]] = {}
    for row in rollouts:
        for step, advantage in enumerate(row.step_advantages):
            advantages.setdefault(10 * step // len(row.steps), []).append(advantage)
        for step, value in enumerate(row.step_values):
            values.setdefault((10 * step // len(row.steps), row.is_correct), []).append(value)
    return {
        str(place): {
            "steps": len(rows),
            "advantage": round(fmean(rows), 6),
            "advantage_size": round(fmean(map(abs, rows)), 6),
            "advantage_std": round(pstdev(rows), 6),
            "advantage_zero": round(rows.count(0.0) / len(rows), 6),
            **{f"value_{name}": round(fmean(found), 6) if (found := values.get((place, is_right))) else None
               for name, is_right in (("right", True), ("wrong", False))},
        }
        for place, rows in sorted(advantages.items())
    }  # fmt: skip


@dataclass(frozen=True)
class MeasureStepCredit:
    """The figure stands beside the output, as SVG."""

    run_dir: str
    """the run directory of main.py"""
    max_iterations: int
    """two or more: as many are described, at even distances"""

    finds_inputs: ClassVar[bool] = True

    def inputs(self) -> list[str]:
        """Return the sampled rollouts."""
        return [str(path) for path in RunHistory(Path(self.run_dir)).samples()]

    def run(self, input_path: str, context: StageContext) -> dict[str, Any]:
        """Return iteration → `credit_by_tenth`. Raises BadInput where no rollout has three steps."""
        if self.max_iterations < 2:
            raise BadInput(f"stage.max_iterations must be at least 2, got {self.max_iterations}")
        samples = RunHistory(Path(self.run_dir)).read_samples()
        long = {at: [row for row in rows if len(row.steps) >= MIN_STEPS] for at, rows in samples.items()}
        num_rows, num_long = (sum(map(len, table.values())) for table in (samples, long))
        leave_out(self.run_dir, num_rows - num_long, num_rows, "rollouts", f"have fewer than {MIN_STEPS} steps",
                  is_asked_for=True)  # fmt: skip
        if not num_long:
            raise BadInput(f"{self.run_dir}/samples: none of {num_rows} rollouts has {MIN_STEPS} steps: set task.steps")
        chosen = spread_evenly(sorted(at for at, rows in long.items() if rows), self.max_iterations)
        figures = {str(at): credit_by_tenth(long[at]) for at in chosen}
        panels = [
            Panel("share of the way", label,
                  {f"iteration {at}": [(int(place) / 10, value) for place, row in rows.items()
                                       if (value := row[name]) is not None] for at, rows in figures.items()})
            for name, label in (("advantage_size", "mean size of the advantage"), ("value_right", "mean value, right"),
                                ("value_wrong", "mean value, wrong"))
        ]  # fmt: skip
        write_figure(context.output, f"Values and advantages of {num_long:,} rollouts", panels)
        context.counts.update(iterations=len(figures), rollouts=sum(len(long[at]) for at in chosen))
        return {"iterations": figures}
