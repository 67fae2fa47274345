"""Values of states by a hidden Markov tree: few completions per state, shrunk towards what its neighbours say.

The values along a trajectory hang together: most steps change nothing, few decide. Each state's value is taken to be
one of G points of a grid, drawn from a kernel P(value of a state | value of the state before it) that is learnt from
all states of the file by expectation maximisation (Baum-Welch on trees; empirical Bayes as in Robbins 1956). Right
and wrong completions of a state are binomial given its value; the last leg of every trajectory is one more sample of
the last state it passed. Sums over the trees are exact (belief propagation: up, then down).

The posterior mean has the least mean square error where the kernel fits, for the price of a bias: a state is drawn
towards its neighbours; the share of right completions (plain K) has none. Costs O(M G^2) per round, M states.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from espalier.data.records import BadInput, Trajectory
from espalier.values.monte_carlo import Count, StateKey
from espalier.values.state_tree import StateTree, state_tree

_EDGE = 0.004  # values of exactly 0 and 1 would rule out a lucky or an unlucky completion


@dataclass(frozen=True)
class SmoothedValue:
    """Posterior mean and standard deviation of a value in [0, 1], and its posterior: G shares that sum to 1."""

    value: float
    deviation: float
    posterior: tuple[float, ...]

    def share_above(self, threshold: float) -> float:
        """Return the posterior probability that the value is above `threshold`."""
        points = np.linspace(0, 1, len(self.posterior))
        return float(np.asarray(self.posterior)[points > threshold].sum())

    def interval(self) -> tuple[float, float]:
        """Return (low, high): the central 95 % of the posterior, half a grid step added on either side."""
        points = np.linspace(0, 1, len(self.posterior))
        low, high = np.searchsorted(np.cumsum(self.posterior), [0.025, 0.975])
        half, last = points[1] / 2, len(points) - 1
        return max(0.0, float(points[min(low, last)] - half)), min(1.0, float(points[min(high, last)] + half))


def smoothed_values(
    trajectories: Sequence[Trajectory], counts: Mapping[StateKey, Count], num_points: int = 21, num_rounds: int = 15
) -> dict[StateKey, SmoothedValue]:
    """Return the posterior of every state of the trajectories, prompt states included, completed or not.

    Raises BadInput for a trajectory without token ids and for fewer than 3 grid points.
    """
    return smooth(
        state_tree(trajectories, counts), [t.is_correct for t in trajectories], counts, num_points, num_rounds
    )


def smooth(
    tree: StateTree,
    outcomes: Sequence[bool],
    counts: Mapping[StateKey, Count],
    num_points: int = 21,
    num_rounds: int = 15,
) -> dict[StateKey, SmoothedValue]:
    """Compute `smoothed_values` from a tree; `outcomes` of its trajectories.

    Raises BadInput for fewer than 3 grid points or 1 round.
    """
    if num_points < 3 or num_rounds < 1:
        raise BadInput(f"at least 3 grid points and 1 round are needed, got {num_points} and {num_rounds}")
    if not tree.keys:
        return {}
    levels = _levels(tree.parents)
    likelihood = _log_likelihood(tree, outcomes, counts, num_points)
    parents = np.asarray(tree.parents)
    start = np.full(num_points, 1.0 / num_points)
    kernel = first_kernel = _first_kernel(num_points)
    posterior = np.empty_like(likelihood)
    for _ in range(num_rounds):
        posterior, moves = _sum_product(likelihood, parents, levels, start, kernel)
        start = posterior[parents < 0].sum(axis=0) + 1.0 / num_points
        start = start / start.sum()
        kernel = moves + 2.0 * first_kernel
        kernel = kernel / kernel.sum(axis=1, keepdims=True)
    posterior, _ = _sum_product(likelihood, parents, levels, start, kernel)
    points = np.linspace(0, 1, num_points)
    means = posterior @ points
    deviations = np.sqrt(np.maximum(posterior @ points**2 - means**2, 0.0))
    return {
        key: SmoothedValue(float(mean), float(deviation), tuple(row.tolist()))
        for key, mean, deviation, row in zip(tree.keys, means, deviations, posterior, strict=True)
    }


def _levels(parents: Sequence[int]) -> list[np.ndarray]:
    """Return the states of every depth, prompt states first."""
    depths = np.zeros(len(parents), dtype=int)
    for state, parent in enumerate(parents):
        depths[state] = depths[parent] + 1 if parent >= 0 else 0
    order = np.argsort(depths, kind="stable")
    borders = np.searchsorted(depths[order], np.arange(depths.max() + 2))
    return [order[start:end] for start, end in pairwise(borders)]


def _log_likelihood(
    tree: StateTree, outcomes: Sequence[bool], counts: Mapping[StateKey, Count], num_points: int
) -> np.ndarray:
    """Return [M, G]: the log-probability of a state's own completions and last legs at each grid point."""
    right, wrong = np.zeros(len(tree.keys)), np.zeros(len(tree.keys))
    for state, key in enumerate(tree.keys):
        count = counts.get(key)
        if count is not None:
            right[state] += count.num_correct
            wrong[state] += count.num_completions - count.num_correct
    for path, is_correct in zip(tree.paths, outcomes, strict=True):
        if path:
            (right if is_correct else wrong)[path[-1]] += 1
    points = np.clip(np.linspace(0, 1, num_points), _EDGE, 1 - _EDGE)
    log_likelihoods: np.ndarray = np.outer(right, np.log(points)) + np.outer(wrong, np.log(1 - points))
    return log_likelihoods


def _first_kernel(num_points: int) -> np.ndarray:
    """Before any data: most steps keep the value nearly, some lead anywhere. Rows sum to 1."""
    points = np.linspace(0, 1, num_points)
    near = np.exp(-0.5 * ((points[:, None] - points[None, :]) / 0.08) ** 2)
    near /= near.sum(axis=1, keepdims=True)
    kernel: np.ndarray = 0.85 * near + 0.15 / num_points
    return kernel


def _sum_product(
    likelihood: np.ndarray, parents: np.ndarray, levels: list[np.ndarray], start: np.ndarray, kernel: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return (posterior [M, G], expected moves [G, G]) by one pass up the trees and one down."""
    below = likelihood.copy()  # log of: own samples and all below, given the state's value
    messages = np.zeros_like(below)  # the same given the parent's value
    for states in reversed(levels[1:]):
        scaled = np.exp(below[states] - below[states].max(axis=1, keepdims=True))
        messages[states] = np.log(np.maximum(scaled @ kernel.T, 1e-300))
        np.add.at(below, parents[states], messages[states])
    evidence = np.exp(below - below.max(axis=1, keepdims=True))
    posterior = np.empty_like(below)
    moves = np.zeros_like(kernel)
    posterior[levels[0]] = evidence[levels[0]] * start
    posterior[levels[0]] /= posterior[levels[0]].sum(axis=1, keepdims=True)
    for states in levels[1:]:
        outside = posterior[parents[states]] / np.exp(messages[states])
        joint = (outside @ kernel) * evidence[states]
        sums = joint.sum(axis=1, keepdims=True)
        posterior[states] = joint / sums
        moves += kernel * ((outside / sums).T @ evidence[states])
    return posterior, moves
