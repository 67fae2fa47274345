"""What is wanted of a Ray cluster's nodes, places for engines or ranks, and how many of them given nodes can hold."""

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
ROOM_OF_RANKS = "ESPALIER_ROOM"
"""The variable that tells a rank which room the ranks of its run have."""


class BadRoom(ValueError):
    """No such room can be: the cluster lacks what is wanted, or the config asks for none that there is."""

    exit_code = 2


@dataclass(frozen=True)
class Room:
    """What is wanted: `number` places of the same `resources` each ({"CPU": 2, "GPU": 1}), laid out by `strategy`:
    PACK (on few nodes), SPREAD (on many), STRICT_PACK (on one), STRICT_SPREAD (each on a node of its own). In messages:
    `what` the places are for, and the `section` of the config that asks for them."""

    what: str
    number: int
    resources: Mapping[str, float] = field(default_factory=dict)
    strategy: str = "PACK"
    section: str = "client"

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise BadRoom(f"{self.section}.placement must be one of {', '.join(STRATEGIES)}, got '{self.strategy}'")
        if min(self.resources.values(), default=0) <= 0:
            raise BadRoom(
                f"{self.what} need at least 1 CPU each and no negative number of anything, got "
                f"{spelled(self.resources)}: set {self.section}.cpus_each and {self.section}.gpus_each"
            )


def places_of(room: Room, nodes: Sequence[Mapping[str, float]]) -> int:
    """Return how many such places the nodes (total resources of each) could hold, however many are wanted."""
    return held_by(room, [places_on(room.resources, node) for node in nodes])


def held_by(room: Room, places: Collection[int]) -> int:
    """Return how many of its places may be used together, by those that each node has."""
    return {
        "PACK": sum(places),
        "SPREAD": sum(places),
        "STRICT_PACK": max(places, default=0),
        "STRICT_SPREAD": sum(number > 0 for number in places),
    }[room.strategy]


def missing_room(room: Room, nodes: Sequence[Mapping[str, float]]) -> str:
    """Return what the nodes (total resources of each) lack for it, "" where they could hold it."""
    could = places_of(room, nodes)
    if could >= room.number:
        return ""
    each = spelled(room.resources)
    has = "; ".join(spelled({name: node.get(name, 0) for name in room.resources}) for node in nodes)
    where = {"STRICT_PACK": " on one node", "STRICT_SPREAD": " each on a node of its own"}.get(room.strategy, "")
    beside = " beside the ranks" if ROOM_OF_RANKS in os.environ else ""
    return f"{room.number} {room.what} of {each} each{where} are wanted, and the cluster has room for {could} of them" \
           f"{beside}: {len(nodes)} node{'s' * (len(nodes) != 1)} with {has}"  # fmt: skip


def places_on(wanted: Mapping[str, float], has: Mapping[str, float]) -> int:
    """Return how many places of the wanted resources a node that has so much can hold."""
    return min((math.floor(has.get(name, 0) / number) for name, number in wanted.items() if number), default=1 << 30)


def spelled(resources: Mapping[str, float]) -> str:
    """Return "2 CPUs, 1 GPU"."""
    return ", ".join(f"{number:g} {name}{'s' * (number != 1 and name.isupper())}" for name, number in resources.items())
