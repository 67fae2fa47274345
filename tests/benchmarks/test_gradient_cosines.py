"""Cosines of gradients by hand, and their intervals on gradients whose truth is known."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import permutations

import pytest
import torch

from benchmarks.credit.gradient_cosines import (
    Interval,
    draw_batches,
    expected_cosine,
    jackknife,
    leave_out_means,
    mean_of_pairs,
    means_of_batch,
    products,
)


def test_pairs_of_a_matrix_are_of_different_problems() -> None:
    matrix = torch.tensor([[9.0, 1.0, 2.0], [3.0, 9.0, 4.0], [5.0, 6.0, 9.0]], dtype=torch.float64)
    assert mean_of_pairs(matrix, torch.ones(1, 3, dtype=torch.float64)).tolist() == pytest.approx([3.5])
    drawn = [0, 0, 2]  # the pairs (0, 2) and (2, 0), twice each: (0, 0) is one problem
    pairs = [float(matrix[drawn[i], drawn[j]]) for i, j in permutations(range(3), 2) if drawn[i] != drawn[j]]
    found = mean_of_pairs(matrix, torch.tensor([[2.0, 0.0, 1.0]], dtype=torch.float64))
    assert found.tolist() == pytest.approx([sum(pairs) / len(pairs)])


def groups_of(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    """One group of each problem."""
    return torch.tensor(rows)[:, None]


def test_the_cosine_of_the_expected_gradient_by_hand() -> None:
    """Gradients (1, 3) and (1, 1), policy gradients (1, 0): by different problems' products <E g, G> = 1, |E g|^2 = 4.

    With exact credit of the same rollouts (2, 0) and (0, 0) k is 1 / 2 and the rests (0, 3), (1, 1): <E d, G> = 1 / 2,
    |E d|^2 = 3; so <E g, G> is 1 and |E g|^2 is 1 / 4 + 1 / 2 + 3.
    """
    own, exact = groups_of([[1.0, 3.0], [1.0, 1.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    assert expected_cosine(products(own, torch.zeros(2, 1, 2), exact), 10).value == pytest.approx(1 / 2)
    same = groups_of([[2.0, 0.0], [0.0, 0.0]])
    assert expected_cosine(products(own, same, exact), 10).value == pytest.approx(1 / math.sqrt(3.75))


def test_exact_credit_has_the_direction_of_the_policy_gradient_whatever_its_noise() -> None:
    same = groups_of([[9.0, 1.0], [-5.0, 1.0]])
    found = products(same, same, torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    assert expected_cosine(found, 10).value == pytest.approx(1.0)


def test_a_policy_gradient_that_noise_hides_gives_no_cosine() -> None:
    """Of policy gradients (1, 0) and (-1, 0) the product is -1, which is no squared norm."""
    own, exact = torch.ones(2, 1, 2), torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    found = expected_cosine(products(own, own, exact), 100)
    assert math.isnan(found.value)
    assert (found.low, found.high) == (-1.0, 1.0)


def test_a_batch_is_of_different_problems_and_its_cosine_by_hand() -> None:
    """Single groups have cosines 1, 0 and -1, sums of pairs, (1, 1), (0, 0), (-1, 1), 1 / sqrt(2), 0, -1 / sqrt(2)."""
    batches = draw_batches(5, 2, 3, num=50)
    assert batches.shape == (50, 5, 2)
    assert set(batches.sum(2).flatten().tolist()) == {0.0, 1.0}
    assert set(batches.sum((1, 2)).tolist()) == {3.0}
    with pytest.raises(ValueError, match="3 problems"):
        draw_batches(3, 2, 3)
    own, exact = groups_of([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]), torch.tensor([[3.0, 0.0]] * 3)
    found = products(own, own, exact)
    assert leave_out_means(found, 1, 1).tolist() == pytest.approx([0.0, -0.5, 0.0, 0.5], abs=0.03)
    root = 1 / math.sqrt(2)
    assert leave_out_means(found, 1, 2).tolist() == pytest.approx([0.0, -root, 0.0, root], abs=0.03)
    between = means_of_batch(found, 1, 1.25).tolist()
    assert between == pytest.approx([0.0, -0.375 - root / 4, 0.0, 0.375 + root / 4], abs=0.03)
    assert torch.equal(means_of_batch(found, 1, 0.3), leave_out_means(found, 1, 1))


def test_the_jackknife_of_a_mean_is_students_interval() -> None:
    """Of 1, 2, 3, 6 / 10 the mean is 0.3 with standard error sqrt(0.14 / 3 / 4) and t(3) = 3.182."""
    numbers = [0.1, 0.2, 0.3, 0.6]
    means = torch.tensor([0.3, *((1.2 - number) / 3 for number in numbers)], dtype=torch.float64)
    half = 3.18245 * math.sqrt(0.14 / 12)
    assert asdict(jackknife(means)) == pytest.approx({"value": 0.3, "low": 0.3 - half, "high": 0.3 + half}, abs=1e-5)


def test_a_gradient_of_nothing_has_cosine_0() -> None:
    found = products(torch.zeros(3, 1, 2), torch.zeros(3, 1, 2), torch.ones(3, 2))
    assert expected_cosine(found) == jackknife(means_of_batch(found, 1, 2)) == Interval(0.0, 0.0, 0.0)


def gradients(rng: torch.Generator, num: int, is_biased: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of 20 numbers, two groups a problem: policy gradients G_i = G + noise of 1 of twice as many problems;
    those of rollouts of the first G_i + 2 more, one in ten of them 10 times as long; an estimator's twice that (or that
    turned) + 1 more."""

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, 20, generator=rng, dtype=torch.float64)

    truth, turned = torch.zeros(2, 20, dtype=torch.float64)
    truth[0], turned[1] = 2.0, 2.0 * is_biased
    exact = truth + noise(2 * num)
    slips = 1 + 9.0 * (torch.rand(num, 2, 1, generator=rng) < 0.1)
    same = exact[:num, None] + 2 * slips * noise(num, 2)
    return 2 * (same + turned) + noise(num, 2), same, exact


@pytest.mark.parametrize("is_biased", [pytest.param(False, marks=pytest.mark.slow), True])
def test_intervals_hold_the_true_cosines_in_nine_of_ten_samples(is_biased: bool) -> None:
    """That of the expected gradient is 1, or 1 / sqrt(2); that of a batch is simulated by 4,000 of them."""
    rng = torch.Generator().manual_seed(0)
    own, _, _ = gradients(rng, 4000 * 8, is_biased)
    batches = own[:, 0].view(4000, 8, 20).mean(1)
    of_batch = float((batches[:, 0] / batches.norm(dim=1)).mean())
    expected = math.sqrt(0.5) if is_biased else 1.0
    held = [0, 0]
    for _ in range(60):
        found = products(*gradients(rng, 24, is_biased))
        for number, (interval, truth) in enumerate(
            [(expected_cosine(found, 200), expected), (jackknife(means_of_batch(found, 2, 8)), of_batch)]
        ):
            held[number] += interval.low - 1e-9 <= truth <= interval.high + 1e-9
    assert min(held) >= 54
