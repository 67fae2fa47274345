"""Problems in epochs: every one once, then all again in another order (`rollout.order=epochs`).

The epochs stand one behind the other, and an iteration takes the next `count` problems, wherever an epoch ends: none is
skipped. What an iteration takes is a function of (seed, iteration) alone.
"""

import random
from functools import lru_cache


@lru_cache(maxsize=8)
def epoch_order(num: int, count: int, seed: int, epoch: int) -> tuple[int, ...]:
    """Return the indices of `num` problems in the order of this epoch (from 0); `count` per iteration, at most `num`.

    An iteration that takes the end of one epoch and the beginning of the next has no problem twice: those that the
    first part holds come later in the second.
    """
    first = epoch
    while first * num % count:  # an epoch that begins with an iteration depends on no other
        first -= 1
    if num >= 2 * count:  # the end of an epoch does not depend on how it began
        first = max(first, epoch - 1)
    order: list[int] = []
    for number in range(first, epoch + 1):
        drawn = list(range(num))
        random.Random(f"{seed}/epoch/{number}").shuffle(drawn)
        begun = number * num % count  # problems that the epoch before gave to the iteration at hand
        held = set(order[len(order) - begun :]) if order else set()
        head = [index for index in drawn if index not in held][: count - begun]
        placed = set(head)
        order = head + [index for index in drawn if index not in placed]
    return tuple(order)


def epoch_batch(num: int, count: int, seed: int, iteration: int) -> list[int]:
    """Return the indices of the `count` distinct problems of an iteration (from 0), 1 <= count <= num."""
    epoch, start = divmod(iteration * count, num)
    taken = epoch_order(num, count, seed, epoch)[start : start + count]
    missing = count - len(taken)
    return [*taken, *(epoch_order(num, count, seed, epoch + 1)[:missing] if missing else ())]
