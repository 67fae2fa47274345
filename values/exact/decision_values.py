"""Values of the states of a decision process, by dynamic programming over a policy's probabilities of decisions.

V(s) = sum over decisions of pi(decision | s) V(s'), from the last states to the first (Bellman's equation without
discount). What of a state's decisions is not followed has a value from 0 to 1, so that every value is an interval that
holds the true one. The policy may be a network (`values/exact/line_decisions.py`) or a table.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

NodeId = tuple[int, Hashable]


@dataclass(frozen=True)
class ExactValue:
    """The value of a state lies within [low, high]: success of what was not followed counts 0 and 1."""

    low: float
    high: float

    @property
    def mid(self) -> float:
        """The middle of the interval."""
        return (self.low + self.high) / 2


@dataclass(frozen=True)
class DecisionState:
    """A state that a decision is taken in."""

    depth: int
    """Decisions before it; a decision leads to a greater depth."""
    key: Hashable
    """States of one depth and equal key have one value: that from the prefix that most probability came by."""
    prefix: Hashable
    """What the policy reads."""

    @property
    def node(self) -> NodeId:
        """What the state is found by."""
        return self.depth, self.key


@dataclass(frozen=True)
class Transition:
    """A decision: its probability, and the state it leads to or the outcome (0 to 1) that it ends with."""

    probability: float
    to: DecisionState | float

    @property
    def place(self) -> NodeId | float:
        """What the state is found by, or the outcome."""
        return self.to.node if isinstance(self.to, DecisionState) else self.to


# States → the decisions in each; what their probabilities lack to 1 is not followed.
Decide = Callable[[Sequence[DecisionState]], list[list[Transition]]]


@dataclass
class DecisionNode:
    """States of equal key, and what was found from the one that stands for them."""

    weight: float = 0.0
    """Sum over the asked states of the probability that they lead here; at least 1 for an asked one."""
    prefixes: dict[Hashable, float] = field(default_factory=dict)
    """Prefix → what of the weight came by it."""
    transitions: list[tuple[float, NodeId | float]] | None = None
    """None: not followed."""
    value: ExactValue = ExactValue(0.0, 1.0)

    @property
    def representative(self) -> Hashable:
        """The prefix that most of the weight came by; of equals the first."""
        return max(self.prefixes, key=lambda prefix: self.prefixes[prefix])


Nodes = dict[NodeId, DecisionNode]


def evaluate_policy(asked: Sequence[DecisionState], decide: Decide, state_mass: float = 0.0) -> Nodes:
    """Return every state that the asked ones lead to, with its value, those included.

    A state that fewer than `state_mass` of an asked one's probability leads to is not followed. Raises ValueError where
    a decision does not lead deeper, or probabilities of decisions sum to more than 1.
    """
    nodes: Nodes = defaultdict(DecisionNode)
    by_depth: dict[int, list[NodeId]] = defaultdict(list)
    for state in asked:
        if state.node not in nodes:
            by_depth[state.depth].append(state.node)
        nodes[state.node].weight = nodes[state.node].prefixes[state.prefix] = 1.0
    depth = min(by_depth, default=0)
    while depth <= max(by_depth, default=-1):
        followed = [identity for identity in by_depth[depth] if nodes[identity].weight >= state_mass]
        _follow(nodes, by_depth, followed, decide)
        depth += 1
    for depth in sorted(by_depth, reverse=True):
        for identity in by_depth[depth]:
            node = nodes[identity]
            if node.transitions is not None:
                node.value = value_of(node.transitions, nodes)
    return dict(nodes)


def _follow(nodes: Nodes, by_depth: dict[int, list[NodeId]], followed: Sequence[NodeId], decide: Decide) -> None:
    """Add the transitions of nodes of one depth, and the nodes they lead to."""
    chosen = {identity: DecisionState(*identity, nodes[identity].representative) for identity in followed}
    distinct = list({state.prefix: state for state in chosen.values()}.values())
    found = dict(zip((state.prefix for state in distinct), decide(distinct), strict=True))
    for identity, state in chosen.items():
        node, transitions = nodes[identity], found[state.prefix]
        if sum(transition.probability for transition in transitions) > 1 + 1e-6:
            raise ValueError(f"probabilities of the decisions in state {identity} sum to more than 1")
        node.transitions = [(one.probability, one.place) for one in transitions]
        for transition in transitions:
            if not isinstance(transition.to, DecisionState):
                continue
            if transition.to.depth <= state.depth:
                raise ValueError(f"a decision of state {identity} leads to depth {transition.to.depth}")
            if transition.to.node not in nodes:
                by_depth[transition.to.depth].append(transition.to.node)
            below, weight = nodes[transition.to.node], node.weight * transition.probability
            below.weight += weight
            below.prefixes[transition.to.prefix] = below.prefixes.get(transition.to.prefix, 0.0) + weight


def value_of(transitions: Sequence[tuple[float, NodeId | float]], nodes: Nodes) -> ExactValue:
    """Return the value of a state by its decisions, (probability, state or outcome) each."""
    low = high = followed = 0.0
    for probability, to in transitions:
        value = ExactValue(to, to) if isinstance(to, float) else nodes[to].value
        low += probability * value.low
        high += probability * value.high
        followed += probability
    return ExactValue(low, high + max(0.0, 1.0 - followed))


def shares_leaving(nodes: Nodes, leaves: Callable[[Hashable], float]) -> dict[NodeId, float]:
    """Return the probability with which every state leads out of what is followed by rules: at least, as what is not
    followed counts 0. `leaves` of a prefix: 1 where it is out already, else how probable a next decision is that ends
    outside."""
    shares: dict[NodeId, float] = {}
    for identity in sorted(nodes, key=lambda identity: -identity[0]):
        node = nodes[identity]
        share = leaves(node.representative)
        ways = [(p, to) for p, to in node.transitions or [] if not isinstance(to, float)]
        shares[identity] = share if share == 1.0 else share + sum(p * shares[to] for p, to in ways)
    return shares
