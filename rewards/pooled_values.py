"""Values of states from every sample there is: their own completions, the trajectories, their children's completions.

A trajectory that passed through a state s went on from it as a completion would: it is a sample of the policy's
continuation. Better than its outcome (0 or 1) is the estimated value of the next state it reached. With K completions
of s, n of them right, and m visits whose next states are c_1 .. c_m (the outcome itself where the trajectory ended
first), the pooled value is

    V'(s) = (n + V'(c_1) + ... + V'(c_m)) / (K + m).

**Exactly when it is unbiased.** All four must hold:

1. the trajectories are independent samples of the policy that completes, asked in the same way (temperature, top-p,
   stop, total length), and none was left out for what it turned out to be;
2. whether a prefix is a state is decided by the prefix alone: after every step, at a line break, at an improbable
   token. Ratios of a trajectory's length, a least number of steps, or a choice by the outcome look ahead;
3. no response ends at a state without going on (`StateTree.num_ends` is 0): such a prefix would be a state only
   where another trajectory happened to go on from it;
4. K does not depend on what the completions of s, or of a state below it, turned out to be: no adaptive stopping.

Proof. Let F be all that is known when the m trajectories stand at s. By 1 to 3 the event that s is a state visited
m times is in F, and the rest of each trajectory is a fresh sample given s. The next state on a trajectory is a
stopping time: by 2 it is the first longer prefix that the rule lets in, or the end. By the tower rule and induction
from the longest states upwards, E[V'(c_i) | F] = E[ E[V'(c_i) | c_i] | F] = E[V(c_i) | s] = V(s), the last because
V(s) is the mean outcome over what follows, and V(c_i) the same given more. By 4 the weights 1/(K + m) are in F, so
E[V'(s) | F] = (K V(s) + m V(s)) / (K + m) = V(s).

Variance. A visit counts as one completion, and never says less than one: given s, the variance of V'(c) is at most
that of a single outcome from c, and Var[outcome] = V(s)(1 - V(s)) (Rao-Blackwell). Visits that share the same next
state share its estimate, however, so K + m is the number of independent samples only where their next states
differ; `num_completions` and `num_visits` are kept apart so that an interval can be made of the completions alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from espalier.data.records import Trajectory
from espalier.rewards.monte_carlo import Count, StateKey
from espalier.rewards.state_tree import StateTree, state_tree


@dataclass(frozen=True)
class PooledValue:
    """`value` in [0, 1] from `num_completions` of the state itself and `num_visits` of trajectories."""

    value: float
    num_correct: int
    num_completions: int
    num_visits: int


def pooled_values(trajectories: Sequence[Trajectory], counts: Mapping[StateKey, Count]) -> dict[StateKey, PooledValue]:
    """V' of every state of the trajectories, prompt states included, whether it was completed or not.

    The prompt state without completions is the mean of its trajectories' next states. Raises BadInput for a
    trajectory without token ids.
    """
    return pool(state_tree(trajectories, counts), [t.is_correct for t in trajectories], counts)


def pool(tree: StateTree, outcomes: Sequence[bool], counts: Mapping[StateKey, Count]) -> dict[StateKey, PooledValue]:
    """The same from a tree; `outcomes` of its trajectories. States without any sample are left out."""
    visits: list[list[tuple[int, int]]] = [[] for _ in tree.keys]  # state -> (trajectory, place on its path)
    for number, path in enumerate(tree.paths):
        for place, state in enumerate(path):
            visits[state].append((number, place))
    values: dict[int, float] = {}
    found: dict[StateKey, PooledValue] = {}
    for state in reversed(range(len(tree.keys))):  # children stand after their parents
        count = counts.get(tree.keys[state], Count(0, 0))
        total = float(count.num_correct)
        for number, place in visits[state]:
            path = tree.paths[number]
            total += values[path[place + 1]] if place + 1 < len(path) else float(outcomes[number])
        samples = count.num_completions + len(visits[state])
        if samples:
            values[state] = total / samples
            found[tree.keys[state]] = PooledValue(
                total / samples, count.num_correct, count.num_completions, len(visits[state])
            )
    return {key: found[key] for key in tree.keys if key in found}
