"""How different a policy's solutions of one problem are: distinct answers and responses, n-grams, BLEU among them.

BLEU is that of `data.bleu`.

- `self_bleu`: each solution against all others of its problem (Zhu et al. 2018); near 1 they say the same;
- `distinct_1` to `distinct_4`: distinct n-grams / all n-grams of a problem's solutions (Li et al. 2016);
- `step_bleu`: mean over pairs of next steps taken from one state, then over states; `step_bleu_by_depth` by the number
  of steps before, `step_bleu_over_depths` the mean of these (the published system's diversity of a tree).

All but the last are means over problems with 95 % intervals. They depend on how many solutions a problem has: compare
policies with the same number.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

from espalier.analysis.analyzers.figure import Panel, write_figure
from espalier.data.bleu import ORDER, Grams, bleu, grams
from espalier.data.jsonl import read_records
from espalier.data.records import BadInput, Trajectory
from espalier.pipeline.evaluation.evaluation_inputs import named_paths
from espalier.pipeline.evaluation.intervals import intervals
from espalier.pipeline.stage import StageContext
from espalier.rewards.votes import by_problem, vote_key


def self_bleu(texts: Sequence[Grams]) -> float:
    """Return the mean BLEU of each of two texts or more against all others."""
    return fmean(bleu(text, [*texts[:place], *texts[place + 1 :]]) for place, text in enumerate(texts))


def distinct_grams(texts: Sequence[Grams], n: int) -> float:
    """Return distinct n-grams / all n-grams of the texts; 0 where none is so long."""
    whole: Counter[tuple[str, ...]] = sum((text.counts[n - 1] for text in texts), Counter())
    return len(whole) / whole.total() if whole else 0.0


def problem_figures(group: Sequence[Trajectory]) -> dict[str, float]:
    """Return the figures of the solutions of one problem; no answer is an answer of its own."""
    texts = [grams(trajectory.response) for trajectory in group]
    answers = {None if one.answer is None else vote_key(one.answer) for one in group}
    return {
        "distinct_answers": float(len(answers)),
        "distinct_responses": len({trajectory.response for trajectory in group}) / len(group),
        "self_bleu": self_bleu(texts),
        **{f"distinct_{n}": distinct_grams(texts, n) for n in range(1, ORDER + 1)},
    }


def step_bleu(groups: Sequence[Sequence[Trajectory]]) -> dict[int, list[float]]:
    """Return number of steps before → of each state with several next steps their mean BLEU over ordered pairs."""
    depths: dict[int, list[float]] = {}
    for group in groups:
        families: dict[tuple[str, ...], list[Grams]] = {}
        for trajectory in group:
            for depth, step in enumerate(trajectory.steps):
                families.setdefault(tuple(trajectory.steps[:depth]), []).append(grams(step))
        for before, steps in families.items():
            pairs = [fmean((bleu(one, [other]), bleu(other, [one]))) for one, other in combinations(steps, 2)]
            if pairs:
                depths.setdefault(len(before), []).append(fmean(pairs))
    return depths


def diversity(trajectories: Sequence[Trajectory], path: str) -> dict[str, Any]:
    """Return the figures of a policy. Raises BadInput where no problem has two solutions."""
    groups = [group for group in by_problem(trajectories).values() if len(group) > 1]
    if not groups:
        raise BadInput(f"{path}: no problem has two solutions or more: sample with params.n above 1")
    rows = [problem_figures(group) for group in groups]
    depths = step_bleu(groups)
    by_depth = {depth: fmean(values) for depth, values in sorted(depths.items())}
    return {
        "problems": len(groups),
        "solutions_per_problem": round(fmean(map(len, groups)), 4),
        **intervals({name: [row[name] for row in rows] for name in rows[0]}),
        "step_bleu": round(fmean(value for values in depths.values() for value in values), 6) if depths else None,
        "step_bleu_over_depths": round(fmean(by_depth.values()), 6) if depths else None,
        "step_bleu_by_depth": {str(depth): round(value, 6) for depth, value in by_depth.items()},
    }


@dataclass(frozen=True)
class MeasureDiversity:
    """The figure stands beside the output, as SVG."""

    samples: Any
    """Trajectory files, several solutions of each problem: a list, or a mapping of names (of policies) to files"""

    def inputs(self) -> list[str]:
        """Return the files."""
        return list(self._paths().values())

    def run(self, input_path: str, context: StageContext) -> dict[str, Any]:
        """Return the figures of each file. Raises BadInput where one has no problem with two solutions."""
        figures = {name: diversity(read_records(Trajectory, path), path) for name, path in self._paths().items()}
        panels = [
            Panel(label, what, {name: [(n, value(row, n)) for n in place(row)] for name, row in figures.items()})
            for label, what, place, value in (
                ("n", "distinct n-grams / n-grams", _orders, lambda row, n: row[f"distinct_{n}"]["mean"]),
                ("steps before", "BLEU among next steps", _depths, lambda row, n: row["step_bleu_by_depth"][str(n)]),
            )
        ]
        write_figure(context.output, "Diversity of solutions", panels)
        context.counts.update({f"self_bleu_{name}": row["self_bleu"]["mean"] for name, row in figures.items()})
        return {"samples": figures}

    def _paths(self) -> dict[str, str]:
        paths = {name or "samples": path for name, path in named_paths(self.samples, "stage.samples").items()}
        if not paths:
            raise BadInput("stage.samples names no file: give Trajectory files, stage.samples={policy: FILE}")
        return paths


def _orders(row: Mapping[str, Any]) -> Sequence[int]:
    return range(1, ORDER + 1)


def _depths(row: Mapping[str, Any]) -> Sequence[int]:
    return [int(depth) for depth in row["step_bleu_by_depth"]]
