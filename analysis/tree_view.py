"""Where a search lost the right answer, and how its scores and values are shown: pure functions of a tree."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from espalier.data.search_tree import SearchTree
from espalier.values.tree_values import completion_counts

NUM_COLOURS = 5


@dataclass(frozen=True)
class Loss:
    """Why the answer of a search is not right. `is_right`: it is; None: nobody knows, since there is no gold answer.
    `unchosen`: right responses that could have been chosen. `lost_at`: without these, the last states of the search
    behind which a right response is known, while behind none of their children that went on one is; at those in
    `pruned_at` a child with one was pruned, at the others none was drawn again as a step."""

    is_right: bool | None
    unchosen: list[int]
    lost_at: list[int]
    pruned_at: list[int]


def right_below(tree: SearchTree) -> list[bool]:
    """Return of every node whether a right response is known that passes through it, completions included."""
    found = [right is True for right in tree.is_correct]
    for node in range(len(found) - 1, 0, -1):  # children come after their parents
        found[tree.parents[node]] = found[tree.parents[node]] or found[node]
    return found


def find_loss(tree: SearchTree) -> Loss:
    """Return where the right answer was lost. What was drawn behind a state only to value it counts as known there."""
    if not tree.gold:
        return Loss(None, [], [], [])
    if tree.is_correct[tree.chosen]:
        return Loss(True, [], [], [])
    nodes = range(len(tree.parents))
    unchosen = [
        node for node in nodes if tree.is_correct[node] and (tree.visits[node] or tree.scores[node] is not None)
    ]
    below = right_below(tree)
    if unchosen or not below[0]:
        return Loss(False, unchosen, [], [])
    goes_on = [not node or tree.visits[node] > 0 for node in nodes]
    is_carried = [False] * len(below)  # whether a child that went on has a right response behind it
    for node in nodes[1:]:
        if goes_on[node] and below[node]:
            is_carried[tree.parents[node]] = True
    lost = [node for node in nodes if goes_on[node] and below[node] and not is_carried[node]]
    with_pruned = {tree.parents[node] for node in pruned_nodes(tree) if below[node]}
    return Loss(False, [], lost, [node for node in lost if node in with_pruned])


def pruned_nodes(tree: SearchTree) -> set[int]:
    """Return the states that the search judged, or would have, and did not go on from. Those on responses that were
    drawn only to value another state were never candidates."""
    counts, parents = completion_counts(tree), set(tree.parents)
    return {
        node
        for node in range(1, len(tree.parents))
        if not tree.visits[node] and not tree.endings[node]
        and (tree.scores[node] is not None or node not in parents
             or (tree.values[node] is not None and not counts[node].num_completions))
    }  # fmt: skip


def span(numbers: Sequence[float | None]) -> tuple[float, float]:
    """Return what colours go from and to: 0 and 1 where all numbers are between these, else the least and the
    largest."""
    known = [number for number in numbers if number is not None and math.isfinite(number)]
    low, high = min(known, default=0.0), max(known, default=1.0)
    return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)


def colour(number: float | None, limits: tuple[float, float]) -> str:
    """Return the class of a number's colour, v0 (low) to v4, or the class of what is not known."""
    if number is None or math.isnan(number):
        return "unknown"
    low, high = limits
    share = (number - low) / (high - low) if high > low else 0.5
    return f"v{min(NUM_COLOURS - 1, max(0, math.floor(share * NUM_COLOURS)))}"
