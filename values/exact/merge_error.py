"""How far merged prefixes are from one state: the decisions of a network after different prefixes of one position."""

import random
from collections.abc import Mapping
from dataclasses import dataclass

from espalier.values.exact.decision_values import (
    Decide,
    DecisionState,
    ExactValue,
    NodeId,
    Nodes,
    Transition,
    value_of,
)


@dataclass(frozen=True)
class MergeError:
    """Over pairs of a state's representative prefix and another prefix that leads there, drawn by their probability."""

    num_pairs: int
    total_variation: float
    """Mean of half the summed differences of the two distributions over next decisions."""
    most: float
    """The largest of them."""
    value_gap: float
    """Mean difference of the two values, by the next decision from either prefix and merged values behind it."""


NO_MERGES = MergeError(0, 0.0, 0.0, 0.0)


def total_variation(one: Mapping[object, float], other: Mapping[object, float]) -> float:
    """Return half the summed differences of two distributions; what they lack to 1 counts as one more decision."""
    rest = abs(sum(one.values()) - sum(other.values()))
    return (sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other}) + rest) / 2


def measure_merges(nodes: Nodes, decide: Decide, num_pairs: int, seed: int = 0) -> MergeError:
    """Compare `num_pairs` pairs at most, drawn with replacement by what of a state's weight came by the other prefix;
    `decide` and `nodes` are those of the solved problem."""
    pairs, weights = [], []
    for identity, node in nodes.items():
        if node.transitions is None:
            continue
        chosen = node.representative
        for prefix, weight in node.prefixes.items():
            if prefix != chosen:
                pairs.append(DecisionState(*identity, prefix))
                weights.append(weight)
    if not pairs or num_pairs < 1:
        return NO_MERGES
    drawn = random.Random(seed).choices(pairs, weights, k=num_pairs)
    distinct = list(dict.fromkeys(drawn))
    gaps = {}
    for state, transitions in zip(distinct, decide(distinct), strict=True):
        own = nodes[state.node].transitions or []
        gaps[state] = (
            total_variation(_by_place(own), _by_place([(one.probability, one.place) for one in transitions])),
            abs(value_of(own, nodes).mid - _value(transitions, nodes).mid),
        )
    variations = [gaps[state][0] for state in drawn]
    return MergeError(
        len(drawn),
        sum(variations) / len(drawn),
        max(variations),
        sum(gaps[state][1] for state in drawn) / len(drawn),
    )


def _by_place(edges: list[tuple[float, NodeId | float]]) -> dict[object, float]:
    """Sum probabilities by where they lead."""
    sums: dict[object, float] = {}
    for probability, to in edges:
        sums[to] = sums.get(to, 0.0) + probability
    return sums


def _value(transitions: list[Transition], nodes: Nodes) -> ExactValue:
    """Return the value by merged states; a state that was not met before counts as not followed."""
    edges = [(one.probability, one.place) for one in transitions]
    return value_of([edge for edge in edges if isinstance(edge[1], float) or edge[1] in nodes], nodes)
