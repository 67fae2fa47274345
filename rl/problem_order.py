"""Which problems an iteration takes: any (`rollout.order=random`), or in epochs, every one once, then all again in
another order (`rollout.order=epochs`).

Epochs stand one behind the other, and an iteration takes the next `count` problems, wherever an epoch ends: none is
skipped. What an iteration takes is a function of (seed, iteration) alone.
"""

import random
from collections.abc import Sequence
from functools import lru_cache

from espalier.data.records import BadInput, Problem


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


def draw_problems(
    problems: Sequence[Problem], count: int, seed: int, iteration: int, round_number: int = 0, order: str = "random"
) -> list[Problem]:
    """Return `count` distinct problems: a function of (seed, iteration, round) alone, so that a resume draws the same.

    `order` says which stand in round 0: any, or the next ones of the present epoch. Rounds above 0
    replace groups whose rewards agreed, by any others; they hold no problem of an earlier round of the iteration, and
    fewer where the problems run out. Raises BadInput where there are fewer in round 0.
    """
    if not 1 <= count <= len(problems):
        had = "what the task has and the window takes"
        raise BadInput(f"rollout.num_problems must be 1 to {len(problems)} ({had}), got {count}")
    if order == "epochs":
        drawn = [problems[index] for index in epoch_batch(len(problems), count, seed, iteration)]
    else:
        drawn = random.Random(f"{seed}/{iteration}").sample(list(problems), count)
    used = {problem.id for problem in drawn}
    for number in range(1, round_number + 1):
        left = [problem for problem in problems if problem.id not in used]
        drawn = random.Random(f"{seed}/{iteration}/{number}").sample(left, min(count, len(left)))
        used |= {problem.id for problem in drawn}
    return drawn
