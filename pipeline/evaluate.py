"""Accuracy with 95 % intervals: greedy, mean of samples, majority vote, best of n by step scores.

Accuracies are means over problems; intervals are bootstrapped over problems (10,000 draws, seeded). Two
policies are compared on the same problems, so the interval of a difference is paired.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data.jsonl import read_records
from data.records import BadInput, StepScores, Trajectory
from pipeline.stage import StageContext
from rewards.aggregate import aggregate


def bootstrap_interval(values: Sequence[float], seed: int = 0, draws: int = 10_000) -> tuple[float, float, float]:
    """(mean, low, high): the percentile bootstrap's 95 % interval of a mean over problems."""
    array = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    means = [array[rng.integers(0, len(array), (500, len(array)))].mean(axis=1) for _ in range(draws // 500)]
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return float(array.mean()), float(low), float(high)


def interval(values: Sequence[float]) -> dict[str, float]:
    """`{"mean", "low", "high", "n"}`."""
    mean, low, high = bootstrap_interval(values)
    return {"mean": round(mean, 5), "low": round(low, 5), "high": round(high, 5), "n": len(values)}


def majority_vote(trajectories: Sequence[Trajectory]) -> float:
    """1 if the most frequent answer is right. Ties go to the answer sampled first; no answer never wins
    against an answer, and a problem without any answer is wrong."""
    votes = Counter(t.answer for t in trajectories if t.answer is not None)
    if not votes:
        return 0.0
    winner = votes.most_common(1)[0][0]
    return float(any(t.is_correct for t in trajectories if t.answer == winner))


def best_of(trajectories: Sequence[Trajectory], scores: Sequence[float]) -> float:
    """1 if the highest-scored trajectory is right; ties go to the one sampled first."""
    best = max(range(len(trajectories)), key=lambda index: (scores[index], -index))
    return float(trajectories[best].is_correct)


def by_problem(trajectories: Sequence[Trajectory]) -> dict[str, list[Trajectory]]:
    """Problem id → its trajectories in sampling order."""
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.problem_id].append(trajectory)
    return dict(groups)


@dataclass(frozen=True)
class Evaluate:
    """`greedy`: one greedy trajectory a problem; the input: n samples a problem; `scores` (may be empty):
    their step scores."""

    greedy: str
    scores: str = ""
    aggregates: tuple[str, ...] = ("product", "minimum", "last")

    def inputs(self) -> list[str]:
        """Greedy trajectories and scores."""
        return [path for path in (self.greedy, self.scores) if path]

    def run(self, input_path: str, context: StageContext) -> dict[str, Any]:
        """`{"accuracy": {name: interval}, "per_problem": {name: [0..1]}, "problems": [id]}`."""
        samples = by_problem(read_records(Trajectory, input_path))
        greedy = by_problem(read_records(Trajectory, self.greedy))
        if not samples:
            raise BadInput(f"{input_path}: no trajectory to evaluate")
        if samples.keys() != greedy.keys():
            raise BadInput(f"{input_path} and {self.greedy} do not hold the same problems")
        samples = {problem: samples[problem] for problem in greedy}
        sizes = {len(group) for group in samples.values()}
        if len(sizes) != 1:
            raise BadInput(f"{input_path}: problems have {min(sizes)} to {max(sizes)} samples: finish sampling first")
        table = self._table(samples, greedy, sizes.pop())
        trajectories = [t for group in samples.values() for t in group]
        context.counts["problems"] = len(samples)
        context.counts["unparseable"] = round(sum(t.answer is None for t in trajectories) / len(trajectories), 5)
        return {
            "accuracy": {name: interval(values) for name, values in table.items()},
            "unparseable": context.counts["unparseable"],
            "problems": list(samples),
            "per_problem": table,
        }

    def _table(
        self, samples: dict[str, list[Trajectory]], greedy: dict[str, list[Trajectory]], n: int
    ) -> dict[str, list[float]]:
        table: dict[str, list[float]] = {
            "greedy": [float(greedy[problem][0].is_correct) for problem in samples],
            "mean": [sum(t.is_correct for t in group) / n for group in samples.values()],
            f"majority_{n}": [majority_vote(group) for group in samples.values()],
        }
        if self.scores:
            scores = {row.id: row.scores for row in read_records(StepScores, self.scores)}
            missing = [t.id for group in samples.values() for t in group if t.id not in scores]
            if missing:
                raise BadInput(f"{self.scores}: no scores for trajectory '{missing[0]}': score these first")
            for how in self.aggregates:
                table[f"best_of_{n}_{how}"] = [
                    best_of(group, [aggregate(scores[t.id], how) for t in group]) for group in samples.values()
                ]
        return table
