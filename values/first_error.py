"""The first error of every wrong trajectory by bisection: about log2(S) states, not S (OmegaPRM, Luo et al. 2024).

A state none of whose K completions is right counts as lost. Once lost, always lost: what extends a state of value 0
has value 0 too, so the states of a wrong trajectory are good up to some step and lost from the next on, and halving
finds it. K completions miss a state of value v with probability (1 - v)^K. Free of charge: a state that a right
trajectory passes through is good, and one question answers for every trajectory that shares the state.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from espalier.data.records import Trajectory
from espalier.values.monte_carlo import Count, StateKey, state_key
from espalier.values.state_tree import state_tree


@dataclass(frozen=True)
class ErrorSearch:
    """Where the first error of a trajectory of S steps lies, as far as is known.

    The states after the first `num_good` steps are good, those from step `num_lost` on are lost (counted from 1).
    The search is over when they differ by one: step `num_lost` is the first error. A right trajectory is good to
    its end: `num_good` S, `num_lost` S + 1.
    """

    num_good: int
    num_lost: int

    @property
    def is_over(self) -> bool:
        """Whether nothing lies between."""
        return self.num_lost - self.num_good <= 1

    @property
    def middle(self) -> int:
        """The step whose state is asked next."""
        return (self.num_good + self.num_lost) // 2

    def labels(self, num_steps: int) -> list[float | None]:
        """1 for each good step, 0 for each lost one, None for those between."""
        return [
            1.0 if step <= self.num_good else 0.0 if step >= self.num_lost else None for step in range(1, num_steps + 1)
        ]


def states_on_right_ways(trajectories: Sequence[Trajectory]) -> set[StateKey]:
    """Return every state that some right trajectory passed through."""
    tree = state_tree(trajectories)
    return {
        tree.keys[state]
        for trajectory, path in zip(trajectories, tree.paths, strict=True)
        if trajectory.is_correct
        for state in path
    }


def search_state(
    trajectory: Trajectory, counts: Mapping[StateKey, Count], good: Iterable[StateKey] = ()
) -> ErrorSearch:
    """Return what counts and `good` states say of a trajectory's first error; the prompt state is taken for good.

    Where a lost state stands before a good one (K completions missed it) the good one is believed.
    """
    num_steps = len(trajectory.steps)
    if trajectory.is_correct:
        return ErrorSearch(num_steps, num_steps + 1)
    known_good = good if isinstance(good, set) else set(good)
    keys = {step: state_key(trajectory.problem_id, trajectory.response_ids[:end])
            for step, end in enumerate(trajectory.step_ends[:-1], 1)}  # fmt: skip
    num_good = max((step for step, key in keys.items() if key in known_good or _is_good(counts.get(key))), default=0)
    lost = [step for step, key in keys.items() if step > num_good and key in counts and not counts[key].num_correct]
    return ErrorSearch(num_good, min(lost, default=num_steps))


def _is_good(count: Count | None) -> bool:
    return count is not None and count.num_correct > 0
