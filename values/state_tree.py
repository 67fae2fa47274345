"""The states of each problem as a tree over token ids, and which trajectories passed through which state."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from espalier.data.prefix_tree import tree_order
from espalier.data.records import Trajectory
from espalier.data.steps import check_ends
from espalier.values.monte_carlo import StateKey


@dataclass(frozen=True)
class StateTree:
    """M states, every problem's prompt state first and parents always before their children.

    `parents[i]` is the index of the longest state that state i extends, -1 for a prompt state. `paths[t]` holds the
    states that the t-th trajectory passed through, shallow to deep, its prompt state first: every state whose ids
    its response begins with and goes on after, wherever its own steps end.
    """

    keys: list[StateKey]
    parents: list[int]
    paths: list[list[int]]

    def num_visits(self) -> list[int]:
        """Return how many trajectories passed through each state."""
        visits = [0] * len(self.keys)
        for path in self.paths:
            for index in path:
                visits[index] += 1
        return visits


def state_tree(trajectories: Sequence[Trajectory], other_states: Iterable[StateKey] = ()) -> StateTree:
    """Return the tree of the prompt states, of the states after every step but the last of the trajectories, and of
    `other_states` (of these problems). Raises BadInput for a trajectory without token ids."""
    prefixes: dict[str, set[tuple[int, ...]]] = {}
    for trajectory in trajectories:
        check_ends(trajectory.steps, trajectory.step_ends, trajectory.id)
        known = prefixes.setdefault(trajectory.problem_id, {()})
        known.update(tuple(trajectory.response_ids[:end]) for end in trajectory.step_ends[:-1])
    for problem_id, prefix in other_states:
        prefixes.setdefault(problem_id, {()}).add(prefix)
    keys: list[StateKey] = []
    parents: list[int] = []
    for problem_id, known in prefixes.items():
        _add_problem(problem_id, list(known), keys, parents)
    index = {key: number for number, key in enumerate(keys)}
    lengths = {problem_id: sorted(set(map(len, known))) for problem_id, known in prefixes.items()}
    paths = [_path(trajectory, lengths[trajectory.problem_id], index) for trajectory in trajectories]
    return StateTree(keys, parents, paths)


def _add_problem(problem_id: str, prefixes: list[tuple[int, ...]], keys: list[StateKey], parents: list[int]) -> None:
    """In tree order the states that a state extends are those of the path to it: a stack."""
    stack: list[int] = []
    for number in tree_order(prefixes):
        prefix = prefixes[number]
        while stack and prefix[: len(keys[stack[-1]][1])] != keys[stack[-1]][1]:
            stack.pop()
        parents.append(stack[-1] if stack else -1)
        stack.append(len(keys))
        keys.append((problem_id, prefix))


def _path(trajectory: Trajectory, lengths: list[int], index: dict[StateKey, int]) -> list[int]:
    """Return the states a trajectory passed through. One cut off by its length exactly at a state did not go on from
    it."""
    ids = trajectory.response_ids
    longest = len(ids) if trajectory.finish_reason == "stop" else len(ids) - 1
    numbers = [index.get((trajectory.problem_id, tuple(ids[:length]))) for length in lengths if length <= longest]
    return [number for number in numbers if number is not None]
