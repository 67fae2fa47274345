"""What n samples of a problem agree on, and how likely k of them hold a right one: pure functions.

Majority vote after Wang et al. 2023 (self-consistency), best of n and weighted vote after Cobbe et al. 2021 and
Lightman et al. 2023, pass@k after Chen et al. 2021. One rule for ties everywhere: the answer (or the trajectory)
sampled first wins. No answer never wins against an answer.

**Equal answers vote together.** First by what they are written as (`vote_key`: `1/2`, `0.5`, `\\frac{1}{2}`), which is
exact and costs nothing. What is left and is no pair of plain numbers is asked of the grader (`x=3` and `3`, `x+1` and
`1+x`). Its equality is not transitive: `7 cm` is `7` and `7` is `7 m`. So every distinct answer, the most frequent
first (then the shortest, then by the alphabet), joins the first class whose **leader**, its first member, it equals, or
leads a class of its own: nobody is drawn into a class by another member, and which answers are joined does not depend
on the order of the samples. A class answers with its leader and is right as its leader is graded. At most
`MAX_COMPARISONS` pairs of a problem are asked; answers beyond that stay apart and are counted.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

from espalier.data.answers.same_answer import is_mathematical, is_same_answer
from espalier.data.records import Trajectory

_DECIMAL = re.compile(r"([+-]?)((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)", re.ASCII)
_RATIO = re.compile(r"([+-]?)(?:\\[dt]?frac\{(\d+)\}\{(\d+)\}|(\d+)\s*/\s*(\d+))", re.ASCII)
_LONGEST_NUMBER = 200
SMALLEST_LEAD = 1e-9  # of the larger: weights that differ by a smaller share are rounding, a tie
MAX_COMPARISONS = 128  # of one problem, a few milliseconds each, 0.85 s at worst
Key = str | Fraction


@lru_cache(maxsize=65536)
def vote_key(answer: str) -> Key:
    """Return what equal answers share: the value of a number, else the text with its white space made plain.

    Numbers are decimals (`7` = `7.0` = `007` = `+7`; `1,250` = `1250`) and ratios of whole numbers (`1/2` = `0.5` =
    `\\frac{1}{2}`). Anything else counts as written, also `7%`, `$7` and `x=7`: whether these are the same as another
    answer says `answer_classes`.
    """
    text = " ".join(answer.split())
    if len(text) > _LONGEST_NUMBER:
        return text
    if match := _DECIMAL.fullmatch(text):
        return Fraction(Decimal(match[1] + match[2].replace(",", "")))
    if (match := _RATIO.fullmatch(text)) and int(below := match[3] or match[5]):
        return Fraction(int(match[1] + (match[2] or match[4])), int(below))
    return text


def by_problem(trajectories: Iterable[Trajectory]) -> dict[str, list[Trajectory]]:
    """Problem id → its trajectories in sampling order."""
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.problem_id].append(trajectory)
    return dict(groups)


@dataclass(frozen=True)
class AnswerClasses:
    """`leaders`: the key of each distinct answer → that of its class's leader; `num_apart`: distinct answers that were
    not compared with every leader, because `MAX_COMPARISONS` pairs had been."""

    leaders: dict[Key, Key]
    num_apart: int


def answer_classes(trajectories: Sequence[Trajectory]) -> AnswerClasses:
    """Return which answers of a problem vote together; see the module. The same for every order of the trajectories."""
    keys = Counter(vote_key(t.answer) for t in trajectories if t.answer is not None)
    return _classes(tuple(sorted(keys.items(), key=lambda row: (-row[1], len(str(row[0])), str(row[0])))))


@lru_cache(maxsize=16384)
def _classes(keys: tuple[tuple[Key, int], ...]) -> AnswerClasses:
    """Return keys with their counts, in the order in which they are to lead."""
    leaders: dict[Key, Key] = {}
    num_compared, num_apart = 0, 0
    for key, _ in keys:
        leaders[key] = key
        for leader in list(dict.fromkeys(leaders.values())):
            if leader is key or not _may_be_same(key, leader):
                continue
            if num_compared == MAX_COMPARISONS:
                num_apart += 1
                break
            num_compared += 1
            if is_same_answer(str(key), str(leader)):
                leaders[key] = leader
                break
    return AnswerClasses(leaders, num_apart)


def _may_be_same(one: Key, other: Key) -> bool:
    """Say whether two different keys are worth a comparison: plain numbers have been compared, words are as written."""
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return False
    return is_mathematical(str(one)) and is_mathematical(str(other))


def is_one_vote(one: str, other: str) -> bool:
    """Say whether two answers vote together: the same as written, the same number, or the same by the grader, asked in
    both directions. Not transitive (see the module)."""
    key, other_key = vote_key(one), vote_key(other)
    return key == other_key or (_may_be_same(key, other_key) and is_same_answer(str(key), str(other_key)))


def winning_answer(trajectories: Sequence[Trajectory], weights: Sequence[float]) -> str | None:
    """Return the answer with the largest sum of weights, its leader as it was first written; None where nobody
    answered.

    Equal answers vote together (`answer_classes`); a tie goes to the answer sampled first.
    """
    leaders = answer_classes(trajectories).leaders
    totals: dict[Key, list[float]] = {}
    written: dict[Key, str] = {}
    for trajectory, weight in zip(trajectories, weights, strict=True):
        if trajectory.answer is not None:
            key = vote_key(trajectory.answer)
            totals.setdefault(leaders[key], []).append(weight)
            written.setdefault(key, trajectory.answer)
    best: str | None = None
    most = -math.inf
    for leader, votes in totals.items():
        total = math.fsum(votes)
        if best is None or total > most + SMALLEST_LEAD * abs(total):
            best, most = written[leader], total
    return best


def majority_answer(trajectories: Sequence[Trajectory]) -> str | None:
    """Return the most frequent answer; None where nobody answered."""
    return winning_answer(trajectories, [1.0] * len(trajectories))


def is_right(answer: str | None, trajectories: Sequence[Trajectory]) -> float:
    """1 if a trajectory that gave this answer was graded right; the answer of nobody is wrong."""
    if answer is None:
        return 0.0
    key = vote_key(answer)
    return float(any(t.is_correct for t in trajectories if t.answer is not None and vote_key(t.answer) == key))


def majority_vote(trajectories: Sequence[Trajectory]) -> float:
    """1 if the most frequent answer is right. Ties go to the answer sampled first; no answer never wins
    against an answer, and a problem without any answer is wrong."""
    return is_right(majority_answer(trajectories), trajectories)


def weighted_vote(trajectories: Sequence[Trajectory], weights: Sequence[float]) -> float:
    """1 if the answer with the largest sum of weights (at least 0 each) is right; ties as in `majority_vote`."""
    return is_right(winning_answer(trajectories, weights), trajectories)


def best_index(scores: Sequence[float]) -> int:
    """Return the place of the highest score; ties go to the first."""
    return max(range(len(scores)), key=lambda index: (scores[index], -index))


def best_of(trajectories: Sequence[Trajectory], scores: Sequence[float]) -> float:
    """1 if the highest-scored trajectory is right; ties go to the one sampled first."""
    return float(trajectories[best_index(scores)].is_correct)


@lru_cache(maxsize=4096)
def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the chance that k of n samples, drawn without replacement, hold a right one (Chen et al. 2021, eq. 1).

    1 - C(n - c, k) / C(n, k), in whole numbers up to the last division: exact for every n. Raises ValueError
    unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= num_correct <= num_samples and 1 <= k <= num_samples):
        raise ValueError(f"pass@{k} of {num_samples} samples, {num_correct} right, is not defined")
    every = math.comb(num_samples, k)
    return (every - math.comb(num_samples - num_correct, k)) / every


def sizes_up_to(num_samples: int) -> list[int]:
    """1, 2, 4, ... and the number of samples itself."""
    powers = [1 << bit for bit in range(num_samples.bit_length()) if 1 << bit < num_samples]
    return [*powers, num_samples]
