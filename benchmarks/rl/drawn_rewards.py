"""Rewards that follow from a response's tokens alone, for policies that no task rewards: so that every side of a
comparison has something to learn from nearly every group, and computes it."""

from collections.abc import Sequence


def drawn_reward(response_ids: Sequence[int]) -> float:
    """Return a number in [0, 1), which hardly any two random responses share."""
    return sum(response_ids) % 97 / 97
