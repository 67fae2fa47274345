"""The tree that a group of rollouts and their branches make: its states, its segments, what they are worth.

A state is where something was sampled: the prompt, or a cut on a rollout. A segment is what one rollout drew from one
state to the next, or to its end. The segments behind one state are siblings: independent samples of the policy from
there, whichever rollouts they belong to.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from espalier.rl.types import Rollout

# (rollout, its response tokens so far): the state behind them; states that other rollouts branch off at alone.
StatePlace = tuple[int, int]
PROMPT: StatePlace = (-1, 0)


@dataclass(frozen=True)
class Segment:
    """Response tokens `start` .. `end` - 1 of rollout number `rollout` of the group, all drawn by it."""

    rollout: int
    start: int
    end: int

    @property
    def leads_to(self) -> StatePlace:
        """Say where it ends: a state of the tree, or the end of the rollout."""
        return self.rollout, self.end


def segments_by_state(rollouts: Sequence[Rollout]) -> dict[StatePlace, list[Segment]]:
    """Return the siblings behind every state, states with fewer tokens first: the prompt, and a state before those
    behind it. Every token that a rollout drew is in one segment."""
    cuts: list[set[int]] = [set() for _ in rollouts]
    for rollout in rollouts:
        if rollout.branch is not None:
            cuts[rollout.branch.parent].add(rollout.branch.num_tokens)
    found: dict[StatePlace, list[Segment]] = {}
    for number, rollout in enumerate(rollouts):
        borders = [rollout.num_shared, *sorted(cuts[number]), len(rollout.trajectory.response_ids)]
        state = PROMPT if rollout.branch is None else (rollout.branch.parent, rollout.branch.num_tokens)
        for start, end in pairwise(borders):
            segment = Segment(number, start, end)
            found.setdefault(state, []).append(segment)
            state = segment.leads_to
    return dict(sorted(found.items(), key=lambda item: item[0][1]))


def segment_values(tree: Mapping[StatePlace, Sequence[Segment]], rewards: Sequence[float]) -> dict[Segment, float]:
    """Value what every segment leads to: a state by the mean over the segments behind it, an end by the rollout's
    reward.

    Not the mean over the leaves: a child with many leaves would count more than one that ended early, and whether it
    ended is part of what is valued.
    """
    values: dict[Segment, float] = {}
    for siblings in reversed(list(tree.values())):
        for segment in siblings:
            behind = tree.get(segment.leads_to)
            values[segment] = (
                rewards[segment.rollout] if behind is None else sum(values[one] for one in behind) / len(behind)
            )
    return values


def segment_shares(tree: Mapping[StatePlace, Sequence[Segment]]) -> dict[Segment, float]:
    """Return how much of a rollout from the prompt every segment stands for: 1, divided by the branches above it."""
    shares: dict[Segment, float] = {}
    of_states = {PROMPT: 1.0}
    for state, siblings in tree.items():
        for segment in siblings:
            shares[segment] = of_states[state] / (1 if state == PROMPT else len(siblings))
            of_states[segment.leads_to] = shares[segment]
    return shares
