"""A group of responses as a prefix tree: which of them begin with the same tokens."""

from collections.abc import Sequence

from espalier.rl.types import RolloutGroup


def response_rows(group: RolloutGroup) -> list[list[int]]:
    """Return the token ids of a group's responses, in order."""
    return [rollout.trajectory.response_ids for rollout in group.rollouts]


def passers(rows: Sequence[Sequence[int]]) -> list[list[tuple[int, ...]]]:
    """Say for every row, and every number k of its first tokens, which rows begin with these k tokens.

    `rows` are G lists of token ids; `found[i][k]`, k from 0 to the length of row i, are indices in order, i among them:
    all of them at k = 0. A row that ends there passes too.
    """
    found: list[list[tuple[int, ...]]] = [[] for _ in rows]
    nodes = [(0, tuple(range(len(rows))))]
    while nodes:
        depth, members = nodes.pop()
        branches: dict[int, list[int]] = {}
        for index in members:
            found[index].append(members)
            if depth < len(rows[index]):
                branches.setdefault(rows[index][depth], []).append(index)
        nodes += [(depth + 1, tuple(branch)) for branch in branches.values()]
    return found
