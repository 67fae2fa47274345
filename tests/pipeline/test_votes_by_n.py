"""Best of n and votes over n against counting every subset, in whole numbers and by another rule for sums."""

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, permutations
from statistics import fmean, stdev

import pytest

from espalier.data.records import Trajectory
from espalier.rewards import votes_by_n as module
from espalier.rewards.votes import best_of, majority_vote, pass_at_k, weighted_vote
from espalier.rewards.votes_by_n import best_of_by_n, votes_by_n
from tests.pipeline.test_evaluate_votes import samples

ANSWERS = ["7", "7.0", "8", "9", "07", None, "8", "10", None]


def some_samples(rng: random.Random, num: int) -> list[Trajectory]:
    return samples(*rng.choices(ANSWERS, k=num))


def best_by_hand(rights: Sequence[bool], scores: Sequence[float]) -> Fraction:
    """Of one subset: the share of right ones among those with the highest score."""
    best = [right for right, score in zip(rights, scores, strict=True) if score == max(scores)]
    return Fraction(sum(best), len(best))


def vote_by_hand(answers: Sequence[str | None], weights: Sequence[int]) -> Fraction:
    """Of one subset of whole weights: the share of 7 among the samples with a number of the largest sum, each of which
    is the first one equally often."""
    sums: dict[float, int] = defaultdict(int)
    for answer, weight in zip(answers, weights, strict=True):
        if answer is not None:
            sums[float(answer)] += weight
    numbers = [float(answer) for answer in answers if answer is not None]
    best = [number for number in numbers if sums[number] == max(sums.values())]
    return Fraction(best.count(7.0), len(best)) if best else Fraction(0)


@pytest.mark.parametrize("seed", range(20))
def test_the_best_of_n_is_the_mean_over_every_subset(seed: int) -> None:
    rng = random.Random(seed)
    num = rng.randint(1, 8)
    rights = [rng.random() < 0.5 for _ in range(num)]
    scores = [rng.choice([-math.inf, 0.0, 0.25, 0.25, 1.5]) for _ in range(num)]
    sizes = range(1, num + 1)
    expected = []
    for n in sizes:
        every = [
            best_by_hand([rights[i] for i in one], [scores[i] for i in one]) for one in combinations(range(num), n)
        ]
        expected.append(float(sum(every) / len(every)))
    assert best_of_by_n(rights, scores, sizes) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_votes_of_n_are_the_mean_over_every_subset(seed: int) -> None:
    rng = random.Random(seed)
    rows = some_samples(rng, rng.randint(1, 8))
    weightings = [[1] * len(rows), [rng.randint(0, 3) for _ in rows], [0] * len(rows)]
    sizes = range(1, len(rows) + 1)
    expected = []
    for weights in weightings:
        curve = []
        for n in sizes:
            every = [vote_by_hand([rows[i].answer for i in one], [weights[i] for i in one])
                     for one in combinations(range(len(rows)), n)]  # fmt: skip
            curve.append(float(sum(every) / len(every)))
        expected.append(curve)
    found = votes_by_n(rows, weightings, sizes)
    assert [pytest.approx(curve, abs=1e-12) for curve in expected] == found


def test_without_ties_all_samples_give_what_a_single_choice_gives() -> None:
    rng = random.Random(1)
    for _ in range(50):
        rows = some_samples(rng, 7)
        scores = rng.sample(range(100), 7)
        assert best_of_by_n([t.is_correct for t in rows], scores, [7]) == [best_of(rows, scores)]
        weights = [2.0**score for score in rng.sample(range(7), 7)]  # no two sums are equal
        assert votes_by_n(rows, [weights], [7]) == [[weighted_vote(rows, weights)]]


def test_over_all_orders_of_the_samples_a_tie_to_the_first_is_a_tie_that_is_shared() -> None:
    rows = samples("7", "8", "8", "7", "9")
    orders = [random.Random(seed).sample(rows, 5) for seed in range(4_000)]
    ((shared,),) = votes_by_n(rows, [[1.0] * 5], [5])
    assert shared == 0.5
    assert fmean(map(majority_vote, orders)) == pytest.approx(shared, abs=0.03)
    # two samples of 1/2 each tie with one of 1, and are first twice as often
    rows, weights = samples("7", "7", "8"), [0.5, 0.5, 1.0]
    ((shared,),) = votes_by_n(rows, [weights], [3])
    single = [weighted_vote([rows[i] for i in order], [weights[i] for i in order]) for order in permutations(range(3))]
    assert shared == pytest.approx(fmean(single))
    assert shared == pytest.approx(2 / 3)


def test_one_sample_is_the_mean_and_a_score_that_knows_all_is_pass_at_n() -> None:
    rows = some_samples(random.Random(3), 8)
    rights = [t.is_correct for t in rows]
    assert votes_by_n(rows, [[1.0] * 8], [1])[0] == pytest.approx([sum(rights) / 8])
    assert best_of_by_n(rights, [0.5] * 8, [1, 4, 8]) == pytest.approx([sum(rights) / 8] * 3)
    sizes = range(1, 9)
    assert best_of_by_n(rights, rights, sizes) == pytest.approx([pass_at_k(8, sum(rights), n) for n in sizes])


def test_many_samples_are_drawn_without_bias_and_alike_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Means of 400 problems with the same answers and other ids are as near the truth as independent draws are."""
    rows = samples(*"77787989999", None)
    weights = [[1.0] * 12, [float(k % 4) for k in range(12)]]
    exact = votes_by_n(rows, weights, [5])
    monkeypatch.setattr(module, "NUM_SUBSETS", 50)
    found = []
    for number in range(400):
        named = [replace(row, problem_id=f"q{number}") for row in rows]
        found.append(votes_by_n(named, weights, [5]))
        assert found[-1] == votes_by_n(named, weights, [5])
    for which in range(2):
        values = [row[which][0] for row in found]
        error = stdev(values) / 400**0.5
        assert 0 < error < 0.5 / (50 * 400) ** 0.5
        assert fmean(values) == pytest.approx(exact[which][0], abs=4 * error)


@pytest.mark.parametrize("cells", [1, 7, 40])
def test_how_many_subsets_are_counted_at_a_time_changes_nothing(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weights = samples(*"778987798", "7"), [[1.0] * 10]
    for most in (module.NUM_SUBSETS, 30):
        with monkeypatch.context() as patch:
            patch.setattr(module, "NUM_SUBSETS", most)
            expected = votes_by_n(rows, weights, [1, 4, 10])
            patch.setattr(module, "_CELLS", cells)
            assert votes_by_n(rows, weights, [1, 4, 10])[0] == pytest.approx(expected[0], abs=1e-12)


def test_sizes_that_are_not_defined_are_refused() -> None:
    for sizes in ([0], [1, 4]):
        with pytest.raises(ValueError, match="of 3 samples are not defined"):
            best_of_by_n([True] * 3, [1.0] * 3, sizes)
        with pytest.raises(ValueError, match="of 3 samples are not defined"):
            votes_by_n(samples("7", "8", "7"), [[1.0] * 3], sizes)
