"""Completions where they tell most: states whose value is clear, or whose label is settled, are asked no further.

Every state is asked n times in round 0 (n = `params.n`), then n more a round while it is open. A state closes

- with `max_completions`;
- when its interval is at most `max_width` wide (0: never for that reason): the 95 % interval of Wilson (1927), or,
  with `estimator` "smoothed", 3.92 posterior deviations of `values.smoothed`, which knows its neighbours;
- with `label` "hard" or "classes", when the rest up to `max_completions` could not change the label any more
  (curtailed sampling: the label is exactly that of plain K = `max_completions`), or, with `stops_when_clear`, when
  the whole interval has one label (it may err as often as the interval does).

With `mean_completions` above 0 a run asks at most that many completions per state on average, n per state in round 0
included: each further round spends `round_share` of them on the open states whose interval width times weight is
largest. The weight of a state is the number of trajectories that pass through it, where `trajectories` are given and
`weighs_visits` holds, else 1.

Stopping by the outcome biases the mean of a state's own completions a little (a state that starts with a streak
closes with it): for unbiased values ask plain K.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from espalier.data.jsonl import read_records
from espalier.data.records import BadInput, Completion, Trajectory
from espalier.sampling.rounds import RoundCompletions
from espalier.values.labels import LabelRule, wilson_interval
from espalier.values.monte_carlo import Count, StateKey, state_key
from espalier.values.smoothed import smooth
from espalier.values.state_tree import StateTree, state_tree

ESTIMATORS = ("counted", "smoothed")


@dataclass
class AdaptiveCompletions(RoundCompletions):
    """See the module. `threshold` and `num_classes` are those of `values.labels.LabelRule`.

    Raises BadInput on settings out of range, and where "smoothed" has no trajectories.
    """

    trajectories: str = ""
    max_completions: int = 16
    max_width: float = 0.3
    label: str = "soft"
    threshold: float = 0.0
    num_classes: int = 5
    stops_when_clear: bool = False
    estimator: str = "counted"
    mean_completions: float = 0.0
    round_share: float = 0.2
    weighs_visits: bool = True
    _counts: dict[str, Count] = field(default_factory=dict, init=False, repr=False)
    _weights: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    _tree: StateTree | None = field(default=None, init=False, repr=False)
    _outcomes: list[bool] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        self.rule = LabelRule(self.label, self.threshold, self.num_classes)
        if self.max_completions < 1:
            raise BadInput(f"max_completions must be at least 1, got {self.max_completions}")
        if not 0 <= self.max_width <= 1 or not 0 < self.round_share <= 1:
            raise BadInput(f"max_width must be from 0 to 1 and round_share above 0 to 1, got {self.max_width} and "
                           f"{self.round_share}")  # fmt: skip
        if self.mean_completions < 0:
            raise BadInput(f"mean_completions must be at least 0 (no bound), got {self.mean_completions}")
        if self.estimator not in ESTIMATORS:
            raise BadInput(f"there is no estimator '{self.estimator}': choose from {', '.join(ESTIMATORS)}")
        if self.estimator == "smoothed" and not self.trajectories:
            raise BadInput("the estimator 'smoothed' needs requests.trajectories: the file the states were cut from")

    def inputs(self) -> list[str]:
        """Return the states, and the trajectories where they are given."""
        return [*super().inputs(), *([self.trajectories] if self.trajectories else [])]

    def first_states(self) -> list[str]:
        """Return every state. Raises BadInput where a state lies on none of the trajectories."""
        self._counts = {state_id: Count(0, 0) for state_id in self._states}
        self._weights = dict.fromkeys(self._states, 1)
        if self.trajectories:
            rows = read_records(Trajectory, self.trajectories)
            self._tree = state_tree(rows, map(self._key, self._states))
            self._outcomes = [row.is_correct for row in rows]
            visits = dict(zip(self._tree.keys, self._tree.num_visits(), strict=True))
            weights = {state_id: visits[self._key(state_id)] for state_id in self._states}
            lost = [state_id for state_id, number in weights.items() if not number]
            if lost:
                raise BadInput(f"{self.trajectories}: no trajectory passes through state '{lost[0]}': give the file "
                               "that the states were cut from")  # fmt: skip
            self._weights = weights if self.weighs_visits else self._weights
        return list(self._states)

    def choose(self, number: int, rows: Sequence[Completion], num_samples: int) -> list[str]:
        """Return the open states in file order; with a bound on completions those that weigh most."""
        for row in rows:
            count = self._counts[row.state_id]
            self._counts[row.state_id] = Count(count.num_correct + row.is_correct, count.num_completions + 1)
        widths = self._widths()
        chosen = [state_id for state_id, width in widths.items() if self._is_open(state_id, width)]
        if self.mean_completions:
            asked = sum(count.num_completions for count in self._counts.values())
            left = int((self.mean_completions * len(self._states) - asked) / num_samples + 1e-9)
            size = min(
                left, max(1, math.ceil(self.round_share * self.mean_completions * len(self._states) / num_samples))
            )
            ranked = sorted(chosen, key=lambda state_id: -widths[state_id] * self._weights[state_id])
            kept = set(ranked[: max(0, size)])
            chosen = [state_id for state_id in chosen if state_id in kept]
        return chosen

    def _key(self, state_id: str) -> StateKey:
        state = self._states[state_id]
        return state_key(state.problem_id, state.prefix_ids)

    def _widths(self) -> dict[str, float]:
        """Return the width of every state's interval."""
        if self.estimator == "smoothed" and self._tree is not None:
            counts = {self._key(state_id): count for state_id, count in self._counts.items()}
            posteriors = smooth(self._tree, self._outcomes, counts)
            return {state_id: min(1.0, 3.92 * posteriors[self._key(state_id)].deviation) for state_id in self._states}
        intervals = {state_id: self._interval(state_id) for state_id in self._states}
        return {state_id: high - low for state_id, (low, high) in intervals.items()}

    def _interval(self, state_id: str) -> tuple[float, float]:
        count = self._counts[state_id]
        return wilson_interval(count.num_correct, count.num_completions)

    def _is_open(self, state_id: str, width: float) -> bool:
        count = self._counts[state_id]
        if not count.num_completions or count.num_completions >= self.max_completions or width <= self.max_width:
            return False  # what was refused in round 0 is not asked in another
        if self.rule.kind != "soft" and self.rule.is_settled(
            count.num_correct, count.num_completions, self.max_completions
        ):
            return False
        return not (self.stops_when_clear and self.rule.is_clear(*self._interval(state_id)))
