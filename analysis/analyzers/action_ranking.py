"""How often an estimator ranks the better of two next steps first (VinePPO's analyzer of critics and estimates).

Next steps are the distinct states one step behind the same state. Pairs whose reference values differ by less than
`min_gap` say nothing and are left out; an estimate that ties two counts one half. `best_first`: how often the step that
the estimator likes best is a best one (ties of the estimator: the share of them that are), beside `chance`, the same of
a blind choice. Take the reference from completions that the estimates do not know.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any, TypeVar

from espalier.analysis.analyzers.estimated_states import (
    EstimatedState,
    estimate_files,
    estimated_states,
    named_estimates,
)
from espalier.analysis.analyzers.figure import Panel, write_figure
from espalier.data.records import BadInput
from espalier.pipeline.evaluation.intervals import resampled_mean
from espalier.pipeline.stage import StageContext
from espalier.values.monte_carlo import StateKey

Name = TypeVar("Name", int, StateKey)


def siblings(states: Iterable[StateKey], parents: Mapping[StateKey, StateKey]) -> list[list[StateKey]]:
    """Return states that one step leads to from the same state, where there are several."""
    families: dict[StateKey, list[StateKey]] = {}
    for key in states:
        if key in parents:
            families.setdefault(parents[key], []).append(key)
    return [keys for keys in families.values() if len(keys) > 1]


def pair_points(
    estimates: Mapping[Name, float], truth: Mapping[Name, float], family: Sequence[Name], min_gap: float
) -> list[float]:
    """Return of every pair whose true values differ by `min_gap` or more: 1 where the better is first, 0.5 on a tie, 0
    where the worse is."""
    points = []
    for one, other in combinations(family, 2):
        gap = truth[one] - truth[other]
        if gap and abs(gap) >= min_gap - 1e-9:
            guess = (estimates[one] - estimates[other]) * (1 if gap > 0 else -1)
            points.append(1.0 if guess > 0 else 0.5 if guess == 0 else 0.0)
    return points


def best_points(
    estimates: Mapping[Name, float], truth: Mapping[Name, float], family: Sequence[Name]
) -> tuple[float, float]:
    """Return (share of the estimator's best that are truly best, share of the family that is)."""
    best = {one for one in family if truth[one] == max(truth[other] for other in family)}
    liked = [one for one in family if estimates[one] == max(estimates[other] for other in family)]
    return sum(one in best for one in liked) / len(liked), len(best) / len(family)


def ranking_figures(families: Sequence[Sequence[EstimatedState]], name: str, min_gap: float) -> dict[str, Any]:
    """Return the figures of one estimator, by the step that is chosen too; intervals over problems, None without a
    pair."""
    pairs: list[tuple[int, str, float]] = []
    best: list[tuple[str, float]] = []
    chances = []
    for family in families:
        numbers = range(len(family))
        values = {number: family[number].value for number in numbers}
        guesses = {number: family[number].estimates[name] for number in numbers}
        points = pair_points(guesses, values, numbers, min_gap)
        pairs += [(family[0].step, family[0].problem_id, point) for point in points]
        if points:
            share, chance = best_points(guesses, values, numbers)
            best.append((family[0].problem_id, share))
            chances.append(chance)
    steps = sorted({step for step, _, _ in pairs})
    by_step = {step: [point for at, _, point in pairs if at == step] for step in steps}
    return {
        "better_first": resampled_mean([(problem, point) for _, problem, point in pairs]),
        "best_first": resampled_mean(best),
        "chance": round(fmean(chances), 6) if chances else None,
        "by_step": {
            str(step): {"pairs": len(rows), "better_first": round(fmean(rows), 6)} for step, rows in by_step.items()
        },
        "pairs": len(pairs),
    }


@dataclass(frozen=True)
class MeasureActionRanking:
    """The input: StepValues, the reference. The figure stands beside the output, as SVG."""

    estimates: Any
    """StepValues or StepScores of the same trajectories, or a critic's folder: one, a list, or a mapping of names"""
    min_gap: float
    """reference values of a pair differ by as much: smaller differences are the reference's noise"""
    min_actions: int
    """a state with fewer distinct next steps is left out (the published system: 3)"""

    def inputs(self) -> list[str]:
        """Return the estimators' files."""
        return estimate_files(named_estimates(self.estimates, ""))

    def run(self, input_path: str, context: StageContext) -> dict[str, Any]:
        """Return the number of states with several next steps and of pairs, and each estimator's figures. Raises
        BadInput where files do not belong together, and where no pair can be ranked."""
        paths = named_estimates(self.estimates, input_path)
        states = estimated_states(input_path, paths, context)
        found = siblings(states, {key: state.parent for key, state in states.items()})
        families = [[states[key] for key in keys] for keys in found if len(keys) >= self.min_actions]
        figures = {name: ranking_figures(families, name, self.min_gap) for name in paths}
        pairs = max(row.pop("pairs") for row in figures.values())
        if not pairs:
            raise BadInput(f"{input_path}: no state with {self.min_actions} next steps whose values differ by "
                           f"{self.min_gap:g}: sample more trajectories per problem")  # fmt: skip
        lines = {name: [(int(step), row["better_first"]) for step, row in figure["by_step"].items()]
                 for name, figure in figures.items()}  # fmt: skip
        panel = Panel("step that is chosen", "better of two next steps first", lines)
        write_figure(context.output, f"Ranking of next steps, {pairs:,} pairs", [panel])
        context.counts["pairs"] = pairs
        context.counts.update({f"better_first_{name}": row["better_first"]["mean"] for name, row in figures.items()})
        return {"states": len(families), "pairs": pairs, "estimators": figures}
