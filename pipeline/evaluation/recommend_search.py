"""Which search to run for a budget, by what several searches of one development set gave and cost.

The trees of every search are read (`X.trees.jsonl`), and samples of the policy itself, whose share of right ones says
how hard a problem is. Per difficulty and budget the search of the highest accuracy among those that fit is recommended
only where it is better than every other one that fits: where the 95 % interval of the paired difference, over problems
drawn anew (`pipeline.evaluation.intervals`), lies above 0. Else the stage recommends nothing and names those that
cannot be told apart.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from espalier.data.jsonl import read_records
from espalier.data.records import BadInput, Trajectory
from espalier.data.search_tree import reads_gold
from espalier.pipeline.evaluation.evaluation_table import to_markdown, to_plain
from espalier.pipeline.evaluation.intervals import intervals
from espalier.pipeline.stage import StageContext
from espalier.values.step_values import problem_accuracies
from espalier.values.tree_values import read_trees

log = logging.getLogger("stage")

COSTS = {"tokens": "num_tokens", "scores": "num_scores", "seconds": "seconds"}
FEW_SAMPLES = 8  # of a problem: fewer put many problems into a bin of another difficulty


@dataclass(frozen=True)
class SearchFigures:
    """What a search gave and cost: problem → a mean over its runs; `costs` by their names in `COSTS`."""

    accuracy: dict[str, float]
    costs: dict[str, dict[str, float]]


@dataclass(frozen=True)
class Recommendation:
    """`recommended` None: no search is; `alike`: the best one and those that it cannot be told from; `why` says so."""

    difficulty: str
    budget: float
    recommended: str | None
    alike: list[str]
    why: str


def read_search(name: str, paths: Sequence[str]) -> SearchFigures:
    """Read the runs of one search. Raises BadInput where they are of different problems, or one has no gold answer."""
    runs = [{tree.problem_id: tree for tree in read_trees(path)} for path in paths]
    if any(map(reads_gold, {tree.scorer for run in runs for tree in run.values()})):
        log.warning("search '%s' was scored by the gold answer, which nobody has at test time: it is a ceiling", name)
    for path, run in zip(paths, runs, strict=True):
        if run.keys() != runs[0].keys():
            raise BadInput(f"{path} and {paths[0]} do not hold the same problems: search the same ones for '{name}'")
        if without := [problem for problem, tree in run.items() if not tree.gold]:
            raise BadInput(f"{path}: problem '{without[0]}' has no gold answer ({len(without)} such): there is no "
                           "accuracy of it")  # fmt: skip
    num = len(runs)
    accuracy = {problem: sum(run[problem].is_correct[run[problem].chosen] is True for run in runs) / num
                for problem in runs[0]}  # fmt: skip
    costs = {cost: {problem: sum(getattr(run[problem], column) for run in runs) / num for problem in runs[0]}
             for cost, column in COSTS.items()}  # fmt: skip
    return SearchFigures(accuracy, costs)


def bins_of(shares: Mapping[str, float], edges: Sequence[float]) -> dict[str, list[str]]:
    """Return difficulty → its problems, by the policy's own share of right samples; the last one holds its end."""
    bounds = [0.0, *edges, 1.0]
    found = {"all": sorted(shares)}
    for low, high in pairwise(bounds):
        held = [problem for problem, share in shares.items() if low <= share < high or share == high == 1.0]
        found[f"{low:g} to {high:g}"] = sorted(held)
    return found


def mean_over(values: Mapping[str, float], problems: Sequence[str]) -> float:
    """Return the mean over problems."""
    return sum(values[problem] for problem in problems) / len(problems)


def recommend(
    searches: Mapping[str, SearchFigures],
    difficulty: str,
    problems: Sequence[str],
    cost: str,
    budget: float,
    least: int,
) -> Recommendation:
    """Return what is to be run on problems of one difficulty, at a mean `cost` of at most `budget` per problem. Fewer
    than `least` problems recommend nothing."""

    def refused(why: str, alike: Sequence[str] = ()) -> Recommendation:
        return Recommendation(difficulty, budget, None, list(alike), why)

    if len(problems) < least:
        return refused(f"{len(problems)} problems are too few (stage.min_problems={least})")
    fitting = {name: mean_over(one.costs[cost], problems) for name, one in searches.items()}
    fitting = {name: spent for name, spent in fitting.items() if spent <= budget}
    if not fitting:
        return refused("no search fits the budget")
    means = {name: mean_over(searches[name].accuracy, problems) for name in fitting}
    best = min(fitting, key=lambda name: (-means[name], fitting[name]))
    others = [name for name in fitting if name != best]
    ours = searches[best].accuracy
    gaps = {name: [ours[problem] - searches[name].accuracy[problem] for problem in problems] for name in others}
    close = [name for name, gap in intervals(gaps).items() if gap["low"] <= 0]
    if close:
        alike = sorted([best, *close], key=lambda name: fitting[name])
        return refused(f"the intervals of {best} over {', '.join(close)} hold 0: they cannot be told apart by "
                       f"{len(problems)} problems; the cheapest of them is {alike[0]}", alike)  # fmt: skip
    why = f"better than {', '.join(others)}" if others else "the only one that fits: compared with nothing"
    return Recommendation(difficulty, budget, best, [best], why)


@dataclass(frozen=True)
class RecommendSearch:
    """The input is samples of the policy (trajectories) of the problems that were searched: others than those that a
    search chose among, or easy problems look easier for it than they are."""

    searches: Mapping[str, str | Sequence[str]]
    """name of a method and its width → the trees of its search; of several runs (seeds) a list"""
    budgets: Sequence[float]
    """per problem, in what `cost` counts"""
    cost: str = "tokens"
    """tokens (generated), scores or seconds (which depend on what else is in flight)"""
    edges: Sequence[float] = field(default_factory=lambda: (0.25, 0.5, 0.75))
    """shares of right samples at which one difficulty ends and the next begins"""
    min_problems: int = 30
    """fewer problems of a difficulty recommend nothing"""

    def __post_init__(self) -> None:
        if self.cost not in COSTS:
            raise BadInput(f"stage.cost must be one of {', '.join(COSTS)}, got '{self.cost}'")
        if list(self.edges) != sorted(set(self.edges)) or any(not 0 < edge < 1 for edge in self.edges):
            raise BadInput(f"stage.edges must rise from above 0 to below 1, got {list(self.edges)}")
        if not self.searches or not self.budgets:
            raise BadInput("name stage.searches={NAME: X.trees.jsonl, ...} and stage.budgets=[...]")
        if self.min_problems < 2:
            raise BadInput(f"stage.min_problems must be at least 2, got {self.min_problems}")

    def paths(self) -> dict[str, list[str]]:
        """Return the files of every search."""
        return {name: [one] if isinstance(one, str) else list(one) for name, one in self.searches.items()}

    def inputs(self) -> list[str]:
        """Return all trees."""
        return [path for paths in self.paths().values() for path in paths]

    def run(self, input_path: str, context: StageContext) -> dict[str, Any]:
        """Return `{"cost", "difficulties", "searches": [row], "recommendations": [...], "table"}`. Raises BadInput
        where searches are of different problems, or the samples lack one."""
        searches = {name: read_search(name, paths) for name, paths in self.paths().items()}
        shares = self._shares(input_path, searches)
        bins = bins_of(shares, self.edges)
        found = [recommend(searches, difficulty, problems, self.cost, budget, self.min_problems)
                 for difficulty, problems in bins.items() for budget in self.budgets]  # fmt: skip
        rows = [row for difficulty, problems in bins.items() if problems for row in search_rows(searches, difficulty,
                                                                                                 problems)]  # fmt: skip
        result: dict[str, Any] = {
            "cost": self.cost,
            "difficulties": {name: len(problems) for name, problems in bins.items()},
            "searches": rows,
            "recommendations": [vars(one) for one in found],
            "table": _tables(rows, found, self.cost),
        }
        context.counts.update(problems=len(shares), searches=len(searches),
                              recommended=sum(one.recommended is not None for one in found),
                              refused=sum(one.recommended is None for one in found))  # fmt: skip
        tables = result["table"]
        log.info("%s\n\n%s", tables["searches"]["plain"], tables["recommendations"]["plain"])
        return result

    def _shares(self, input_path: str, searches: Mapping[str, SearchFigures]) -> dict[str, float]:
        """Return the policy's share of right samples of every problem that was searched."""
        first, *others = searches
        problems = searches[first].accuracy.keys()
        for name in others:
            if searches[name].accuracy.keys() != problems:
                raise BadInput(f"searches '{first}' and '{name}' are of different problems: search the same ones")
        samples = [row for row in read_records(Trajectory, input_path) if row.problem_id in problems]
        shares = problem_accuracies(samples)
        if lacking := sorted(problems - shares.keys()):
            raise BadInput(f"{input_path}: no sample of problem '{lacking[0]}' ({len(lacking)} such problems): sample "
                           "the policy on all problems that were searched")  # fmt: skip
        if len(samples) < FEW_SAMPLES * len(shares):
            log.warning("%s holds %.1f samples per problem: with fewer than %d many problems fall into a wrong bin",
                        input_path, len(samples) / len(shares), FEW_SAMPLES)  # fmt: skip
        return shares


def search_rows(
    searches: Mapping[str, SearchFigures], difficulty: str, problems: Sequence[str]
) -> list[dict[str, Any]]:
    """Return what every search gives and costs on problems of one difficulty, cheapest first in tokens."""
    accuracy = intervals({name: [one.accuracy[p] for p in problems] for name, one in searches.items()})
    rows = [
        {"difficulty": difficulty, "search": name, "accuracy": accuracy[name],
         **{cost: round(mean_over(one.costs[cost], problems), 4) for cost in COSTS}}
        for name, one in searches.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: row["tokens"])


def _tables(rows: Sequence[dict[str, Any]], found: Sequence[Recommendation], cost: str) -> dict[str, Any]:
    header = ("right samples", "search", "accuracy", "low", "high", *COSTS, "n")
    lines = [[row["difficulty"], row["search"],
              *(f"{100 * row['accuracy'][key]:.1f}" for key in ("mean", "low", "high")),
              *(f"{row[name]:.4g}" for name in COSTS), str(row["accuracy"]["n"])] for row in rows]  # fmt: skip
    advice = ("right samples", f"{cost} per problem", "recommended", "why")
    said = [[one.difficulty, f"{one.budget:g}", one.recommended or "nothing", one.why] for one in found]
    return {"searches": {"markdown": to_markdown(header, lines), "plain": to_plain(header, lines)},
            "recommendations": {"markdown": to_markdown(advice, said), "plain": to_plain(advice, said)}}  # fmt: skip
