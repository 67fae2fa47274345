"""How far estimators of state values are from a reference of many completions, and how that grows along the reasoning.

VinePPO's figures for its critic and its own estimates (Kazemnejad et al. 2024): mean absolute error, the share within
0.05, both by the place in the solution; and the explained variance, 1 - Var(reference - estimate) / Var(reference).

The reference is a mean of K completions itself: its variance p (1 - p) / (K - 1) is part of every squared error.
`squared_error_without_noise` has it taken off, an unbiased estimate of the squared distance from the true values
(it can be below 0 where that is small); None where a state has other than its own two or more completions.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from espalier.analysis.analyzers.estimated_states import (
    EstimatedState,
    estimate_files,
    estimated_states,
    named_estimates,
)
from espalier.analysis.analyzers.figure import Panel, write_figure
from espalier.pipeline.evaluation.intervals import resampled_mean
from espalier.pipeline.stage import StageContext
from espalier.values.explained_variance import explained_variance

TOLERANCE = 0.05


def reference_noise(states: Sequence[EstimatedState]) -> float | None:
    """Return the mean variance of the reference values; None where they are not shares of two completions or more."""
    is_counted = [state.num_completions > 1 and math.isclose(state.num_correct / state.num_completions, state.value,
                                                             abs_tol=1e-6) for state in states]  # fmt: skip
    if not all(is_counted):
        return None
    return fmean(state.value * (1 - state.value) / (state.num_completions - 1) for state in states)


def slope(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Return the slope of the least-squares line; None where all x are alike."""
    mean_x, mean_y = fmean(xs), fmean(ys)
    spread = math.fsum((x - mean_x) ** 2 for x in xs)
    product = math.fsum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return product / spread if spread > 1e-12 else None


def tenth(state: EstimatedState) -> int:
    """Return in which tenth of its solution a state lies: after step i of S it is the place i / S."""
    return min(9, 10 * state.step // state.num_steps)


def errors_by(
    states: Sequence[EstimatedState], name: str, place: Callable[[EstimatedState], Hashable]
) -> dict[str, dict[str, float]]:
    """Return place → number of states, mean absolute error, bias (mean of estimate - reference), in the order of the
    places."""
    groups: dict[Any, list[float]] = {}
    for state in states:
        groups.setdefault(place(state), []).append(state.estimates[name] - state.value)
    return {str(key): {"count": len(gaps), "error": round(fmean(map(abs, gaps)), 6), "bias": round(fmean(gaps), 6)}
            for key, gaps in sorted(groups.items())}  # fmt: skip


def error_figures(states: Sequence[EstimatedState], name: str) -> dict[str, Any]:
    """Return the figures of one estimator; those that are means have 95 % intervals over problems.

    `growth` is the slope of the absolute error from the first to the last of the way (0 to 1), `growth_per_step` per
    step index.
    """
    gaps = [state.estimates[name] - state.value for state in states]
    errors, problems = [abs(gap) for gap in gaps], [state.problem_id for state in states]
    noise, squared = reference_noise(states), fmean(gap * gap for gap in gaps)
    estimates = torch.tensor([state.estimates[name] for state in states], dtype=torch.float64)
    values = torch.tensor([state.value for state in states], dtype=torch.float64)
    return {
        "error": resampled_mean(list(zip(problems, errors, strict=True))),
        "bias": resampled_mean(list(zip(problems, gaps, strict=True))),
        "within_0.05": _round(fmean(error <= TOLERANCE + 1e-9 for error in errors)),
        "squared_error": _round(squared),
        "squared_error_without_noise": None if noise is None else _round(squared - noise),
        "explained_variance": _round(explained_variance(estimates, values)),
        "growth": _round(slope([state.step / state.num_steps for state in states], errors)),
        "growth_per_step": _round(slope([state.step for state in states], errors)),
        "by_step": errors_by(states, name, lambda state: state.step),
        "by_tenth": errors_by(states, name, tenth),
    }


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


@dataclass(frozen=True)
class MeasureValueError:
    """The input: StepValues, the reference. The figure stands beside the output, as SVG."""

    estimates: Any
    """StepValues or StepScores of the same trajectories, or a critic's folder: one, a list, or a mapping of names"""

    def inputs(self) -> list[str]:
        """Return the estimators' files."""
        return estimate_files(named_estimates(self.estimates, ""))

    def run(self, input_path: str, context: StageContext) -> dict[str, Any]:
        """Return the number of states, the completions per state of the reference and its variance, and each
        estimator's figures. Raises BadInput where files do not belong together."""
        paths = named_estimates(self.estimates, input_path)
        states = list(estimated_states(input_path, paths, context).values())
        figures = {name: error_figures(states, name) for name in paths}
        panels = [
            Panel(label, "mean absolute error",
                  {name: [(int(at) * unit, row["error"]) for at, row in figures[name][key].items()] for name in paths})
            for key, label, unit in (("by_step", "steps behind the state", 1), ("by_tenth", "share of the way", 0.1))
        ]  # fmt: skip
        write_figure(context.output, f"Error of state values on {len(states):,} states", panels)
        context.counts["states"] = len(states)
        context.counts.update({f"error_{name}": row["error"]["mean"] for name, row in figures.items()})
        return {
            "states": len(states),
            "problems": len({state.problem_id for state in states}),
            "completions_per_state": round(fmean(state.num_completions for state in states), 2),
            "reference_variance": _round(reference_noise(states)),
            "estimators": figures,
        }
