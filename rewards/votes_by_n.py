"""Best of n and votes at every n up to the number of samples N: means over the subsets of n of a problem's N samples.

What n samples would have given is estimated as pass@k is (`rewards.votes.pass_at_k`): by the mean over all C(N, n)
subsets, which is unbiased for n independent samples. **Ties share**: samples of the best score, or with one of the
answers of the largest sum, count alike. A single choice (`best_of`, `majority_vote`) takes what was sampled first,
which comes to the same in expectation.

- **Best of n** has a closed form: the best of a subset is one of those with the score s if one of them is in it and
  none of a higher score.
- **Votes** are counted over all subsets where there are at most `NUM_SUBSETS` (every n of 12 samples), else over as
  many drawn ones: uniformly, seeded by the problem's id and n. That keeps the mean unbiased. Its standard error is at
  most 0.016 per problem, independent from problem to problem, and so a part of the intervals over problems.

Which answers are equal, and which are right, is decided once, by all N samples (`rewards.votes.answer_classes`).
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import combinations, groupby

import numpy as np

from espalier.data.records import Trajectory
from espalier.data.row_index import hash_of
from espalier.rewards.votes import SMALLEST_LEAD, answer_classes, vote_key

NUM_SUBSETS = 1_000
_CELLS = 1_000_000  # subsets times answers, or samples, at a time: what bounds the memory


def best_of_by_n(are_right: Sequence[bool], scores: Sequence[float], sizes: Sequence[int]) -> list[float]:
    """Return for each n of `sizes` the chance that the highest-scored of n of these N samples is right.

    Exact: sorted by score, the samples with the score s, of which `upto` have s or less and `below` less, hold the best
    of C(upto, n) - C(below, n) subsets. Raises ValueError on lists of unequal lengths, and on n outside of 1 to N.
    """
    _check_sizes(len(scores), sizes)
    rows = sorted(zip(scores, are_right, strict=True), key=lambda row: row[0])
    found, below = [0.0] * len(sizes), 0
    for _, tied in groupby(rows, key=lambda row: row[0]):
        right = [is_right for _, is_right in tied]
        upto = below + len(right)
        for place, n in enumerate(sizes):
            chosen = math.comb(upto, n) - math.comb(below, n)
            found[place] += chosen * sum(right) / (len(right) * math.comb(len(rows), n))
        below = upto
    return found


def votes_by_n(
    trajectories: Sequence[Trajectory], weightings: Sequence[Sequence[float]], sizes: Sequence[int]
) -> list[list[float]]:
    """Return for each list of weights [N], at least 0 each, and each n of `sizes` the mean vote of n of a problem's N
    samples: 1 where the answer with the largest sum of weights is right, all 1 for the majority's.

    No answer never wins against an answer, and a subset without any answer is wrong. All weightings are counted on the
    same subsets. Raises ValueError as `best_of_by_n`.
    """
    num = len(trajectories)
    _check_sizes(num, sizes)
    classes, right = _classes_of(trajectories)
    weights = np.asarray(weightings, dtype=np.float64).reshape(len(weightings), num)
    sums, counts = np.zeros((len(weightings), len(sizes))), np.zeros(len(sizes))
    for column, n in enumerate(sizes):
        for places in _subsets(num, n, trajectories[0].problem_id, max(1, _CELLS // max(n, len(right) + 1))):
            counts[column] += len(places)
            sums[:, column] += _num_won(places, classes, right, weights)
    return (sums / counts).tolist()


def _check_sizes(num: int, sizes: Sequence[int]) -> None:
    if not all(1 <= n <= num for n in sizes):
        raise ValueError(f"subsets of {list(sizes)} of {num} samples are not defined")


def _classes_of(trajectories: Sequence[Trajectory]) -> tuple[np.ndarray, np.ndarray]:
    """Return the class of each sample's answer [N], K where it has none, and whether each class is right [K]."""
    leaders = answer_classes(trajectories).leaders
    numbers = {leader: number for number, leader in enumerate(dict.fromkeys(leaders.values()))}
    keys = [None if t.answer is None else vote_key(t.answer) for t in trajectories]
    right = {key for key, t in zip(keys, trajectories, strict=True) if t.is_correct}
    classes = [len(numbers) if key is None else numbers[leaders[key]] for key in keys]
    return np.array(classes), np.array([leader in right for leader in numbers], dtype=bool)


def _num_won(places: np.ndarray, classes: np.ndarray, right: np.ndarray, weights: np.ndarray) -> list[float]:
    """Return for each row of weights [V, N] the sum of the votes of subsets [B, n] of samples."""
    shape = len(places), len(right) + 1
    cells = (classes[places] + shape[1] * np.arange(shape[0])[:, None]).ravel()
    num_cells = shape[0] * shape[1]
    counts = np.bincount(cells, minlength=num_cells).reshape(shape)[:, :-1]
    found = []
    for own in weights:
        totals = np.bincount(cells, own[places].ravel(), minlength=num_cells).reshape(shape)[:, :-1]
        most = totals.max(axis=1, initial=0.0, keepdims=True)
        wins = counts * (totals >= most - SMALLEST_LEAD * np.abs(most))
        found.append(float((wins @ right.astype(float) / np.maximum(wins.sum(axis=1), 1)).sum()))
    return found


def _subsets(num: int, size: int, problem_id: str, block: int) -> Iterator[np.ndarray]:
    """Yield subsets [at most `block`, size] as places of samples: all of them, or those that are drawn."""
    if math.comb(num, size) <= NUM_SUBSETS:
        every = _all_subsets(num, size)
        yield from (every[start : start + block] for start in range(0, len(every), block))
        return
    rng = np.random.default_rng([size, hash_of(problem_id) % 2**64])
    block = min(block, max(1, _CELLS // num))
    for start in range(0, NUM_SUBSETS, block):
        numbers = rng.random((min(block, NUM_SUBSETS - start), num))
        yield np.argpartition(numbers, size - 1, axis=1)[:, :size]


@lru_cache(maxsize=32)
def _all_subsets(num: int, size: int) -> np.ndarray:
    return np.array(list(combinations(range(num), size)))
