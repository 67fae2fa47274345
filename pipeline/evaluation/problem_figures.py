"""The figures of an evaluation, one value per problem: filled problem by problem, so that no sample stays in memory."""

import math
from collections.abc import Callable, Sequence

from espalier.data.records import Trajectory
from espalier.pipeline.evaluation.evaluation_inputs import ProblemSamples
from espalier.pipeline.evaluation.intervals import Interval, intervals
from espalier.pipeline.evaluation.rankings import Ranking
from espalier.rewards.votes import best_of, majority_vote, pass_at_k, sizes_up_to, weighted_vote
from espalier.rewards.votes_by_n import best_of_by_n, votes_by_n

PerProblem = dict[str, list[float]]  # metric → one value a problem

MEASURES: dict[str, tuple[str, Callable[[Trajectory], float]]] = {
    "unparseable": ("share", lambda t: t.answer is None),
    "cut_by_length": ("share", lambda t: t.finish_reason == "length"),
    "response_tokens": ("tokens", lambda t: len(t.response_ids)),
    "steps": ("steps", lambda t: len(t.steps)),
    "response_chars": ("characters", lambda t: len(t.response)),
}


class Figures:
    """`accuracies` by metric and `coverage` (pass@k for k = 1, 2, 4, ..., n) of the `labelled` problems; `by_n`, the
    votes and the best of 1, 2, 4, ... samples; `responses` of all."""

    def __init__(self, num_samples: int):
        self.labelled: list[str] = []
        self.accuracies: PerProblem = {}
        self.coverage: PerProblem = {}
        self._num_samples = num_samples
        self._by_n: dict[tuple[str, int], list[float]] = {}
        self._measured: dict[str, PerProblem] = {}
        self._has_ids: dict[str, bool] = {}

    def add(self, samples: ProblemSamples, rankings: Sequence[Ranking]) -> None:
        """Take in a problem."""
        if samples.is_labelled:
            self.labelled.append(samples.id)
            _append(self.accuracies, self._accuracies(samples, rankings))
            right = sum(t.is_correct for t in samples.group)
            n = self._num_samples
            _append(self.coverage, {f"pass_at_{k}": pass_at_k(n, right, k) for k in sizes_up_to(n)})
            self._add_by_n(samples.group, rankings)
        self._measure("samples", samples.group)
        if samples.greedy is not None:
            self._measure("greedy", [samples.greedy])

    def _accuracies(self, samples: ProblemSamples, rankings: Sequence[Ranking]) -> dict[str, float]:
        n, group = self._num_samples, samples.group
        found = {"greedy": float(samples.greedy.is_correct)} if samples.greedy is not None else {}
        found |= {"mean": sum(t.is_correct for t in group) / n, f"majority_{n}": majority_vote(group)}
        found |= {f"best_of_{n}_{row.name}": best_of(group, row.scores_of(group)) for row in rankings}
        found |= {f"weighted_{n}_{row.name}": weighted_vote(group, row.weights_of(group)) for row in rankings}
        return found | ({f"fewest_steps_of_{n}": _of_fewest_steps(group)} if rankings else {})

    def _add_by_n(self, group: Sequence[Trajectory], rankings: Sequence[Ranking]) -> None:
        sizes, right = sizes_up_to(self._num_samples), [t.is_correct for t in group]
        weights = {"majority": [1.0] * len(group)}
        weights |= {f"weighted_{row.name}": row.weights_of(group) for row in rankings}
        found = dict(zip(weights, votes_by_n(group, list(weights.values()), sizes), strict=True))
        scores = {f"best_of_{row.name}": row.scores_of(group) for row in rankings}
        scores |= {"fewest_steps": [-len(t.steps) if t.steps else -math.inf for t in group]} if rankings else {}
        found |= {name: best_of_by_n(right, own, sizes) for name, own in scores.items()}
        for name, values in found.items():
            for n, value in zip(sizes, values, strict=True):
                self._by_n.setdefault((name, n), []).append(value)

    def by_n(self) -> dict[str, dict[str, Interval]]:
        """`{"majority": {"1": interval, "2": ...}, "best_of_NAME": ..., "weighted_NAME": ..., "fewest_steps": ...}`:
        means over the subsets of n samples of each labelled problem (`rewards.votes_by_n`)."""
        figures: dict[str, dict[str, Interval]] = {}
        found = intervals({f"{n} {name}": values for (name, n), values in self._by_n.items()})
        for key, figure in found.items():
            n, _, name = key.partition(" ")
            figures.setdefault(name, {})[n] = figure
        return figures

    def _measure(self, kind: str, group: Sequence[Trajectory]) -> None:
        has_ids = all(t.response_ids or not t.response for t in group)
        self._has_ids[kind] = self._has_ids.get(kind, True) and has_ids
        means = {name: sum(map(measure, group)) / len(group) for name, (_, measure) in MEASURES.items()}
        _append(self._measured.setdefault(kind, {}), means)

    def responses(self) -> dict[str, dict[str, Interval]]:
        """`{"samples": {measure: interval}, "greedy": ...}` over all problems, labelled or not.

        Tokens are left out where a sampler returned no token ids.
        """
        figures = {}
        for kind, rows in self._measured.items():
            left = set() if self._has_ids[kind] else {"response_tokens"}
            figures[kind] = intervals({name: values for name, values in rows.items() if name not in left})
        return figures


def _of_fewest_steps(group: Sequence[Trajectory]) -> float:
    """Return the share of right ones among the samples of fewest steps: what a score that knows nothing but steps'
    indices would choose, beside which a scorer is shown."""
    indexed = [t for t in group if t.steps] or group  # without a step there is no index, and such a score is the lowest
    fewest = min(len(t.steps) for t in indexed)
    right = [t.is_correct for t in indexed if len(t.steps) == fewest]
    return sum(right) / len(right)


def _append(table: PerProblem, values: dict[str, float]) -> None:
    for name, value in values.items():
        table.setdefault(name, []).append(value)
