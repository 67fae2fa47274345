"""How near the gradient of an estimator comes to the policy gradient, from one gradient per group of rollouts.

A group's gradient g is the mean over its rollouts of the sum over tokens of advantage x grad log-prob. The policy
gradient of a problem, G_i, is computed without rollouts (benchmarks/credit/exact_gradient.py); that of the task, G, is
the mean over its problems. Set against the gradient of exact credit on the *same* rollouts an estimator looks better
than it is, because both share the noise of the rollouts; set against that of others, worse. Two cosines are had here.

That of a *batch* of B groups, of different problems: the mean of its cosine with G over many batches drawn from the
groups that were sampled. It is what an update gets. (A few rollouts with an improbable slip have gradients a hundred
times as long as all others. A mean over batches of a number from -1 to 1 bears that, one of squared norms does not.)
Its interval is a jackknife over problems: the same mean over the batches without one problem.

That of the *expected* gradient, 1 for an unbiased estimator, whatever its noise: <E g, G> / (|G| |E g|), by products of
gradients of different problems, whose noise has a mean of 0. Most of it is that of the rollouts, which the gradient g*
of exact credit on the same rollouts has too, and E g* = G is known. So only the rest d = g - k g* is left to be
estimated, with k the number that makes it smallest:

    <E g, G> = k |G|^2 + <E d, G>,   |E g|^2 = k^2 |G|^2 + 2 k <E d, G> + |E d|^2

(a control variate: right for every k, and without noise where g is g*). Its interval is a bootstrap over problems; one
that is drawn twice is not multiplied with itself.

All of it needs no more than products of gradients: neither batches nor resamples cost a pass of the network.
"""

import math
from dataclasses import dataclass

import torch

from benchmarks.credit.intervals import t_quantile

NUM_RESAMPLES = 2000
NUM_BATCHES = 20_000


@dataclass(frozen=True)
class Products:
    """Products of gradients in float64, of D groups of each of M problems that an estimator is measured on, the first
    of N: `gram` [M D, M D] of groups with one another, a problem's next to each other, and `along` [M D] of groups with
    the policy gradient; of the problems' rests d, `rest` [M, M] with one another and `rest_exact` [M, N] with policy
    gradients; `exact` [N, N] of policy gradients with one another; the factor k = `scale`."""

    gram: torch.Tensor
    along: torch.Tensor
    rest: torch.Tensor
    rest_exact: torch.Tensor
    exact: torch.Tensor
    scale: float


@dataclass(frozen=True)
class Interval:
    """A number with the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def products(own: torch.Tensor, same: torch.Tensor, exact: torch.Tensor) -> Products:
    """Multiply gradients in float32: an estimator's `own` [M, D, P], those of exact credit on the same rollouts, and
    the policy gradients `exact` [N, P] of the same problems and further ones."""
    groups = own.flatten(0, 1)
    means, same_means = own.mean(1), same.mean(1)
    size = float((same_means**2).sum(dtype=torch.float64))
    scale = float((means * same_means).sum(dtype=torch.float64)) / size if size else 0.0
    rest = means - scale * same_means
    return Products(
        gram=(groups @ groups.T).double(),
        along=(groups @ exact.mean(0)).double(),
        rest=(rest @ rest.T).double(),
        rest_exact=(rest @ exact.T).double(),
        exact=(exact @ exact.T).double(),
        scale=scale,
    )


# --- batches ----------------------------------------------------------------------------------------------------------


def draw_batches(num_problems: int, num_draws: int, size: int, num: int = NUM_BATCHES, seed: int = 0) -> torch.Tensor:
    """Return which groups are in each of `num` batches, [num, M, D] float64: one of the D groups of `size` different
    problems of M. Raises ValueError where there are fewer problems than `size` + 1."""
    if size >= num_problems:
        raise ValueError(f"a batch of {size} groups cannot be drawn in several ways from {num_problems} problems")
    generator = torch.Generator().manual_seed(seed)
    problems = torch.rand(num, num_problems, generator=generator).argsort(1)[:, :size]
    draws = torch.randint(num_draws, (num, size), generator=generator)
    found = torch.zeros(num, num_problems * num_draws, dtype=torch.float64)
    return found.scatter_(1, problems * num_draws + draws, 1.0).view(num, num_problems, num_draws)


def leave_out_means(found: Products, num_draws: int, size: int) -> torch.Tensor:
    """Return the mean cosine of batches of `size` groups, of all and then of those without each problem: [M + 1]. A
    batch whose gradient is 0 has cosine 0."""
    batches = draw_batches(len(found.rest), num_draws, size)
    chosen = batches.flatten(1)
    norm = found.exact.mean().sqrt()
    lengths = ((chosen @ found.gram) * chosen).sum(1).clamp(min=0).sqrt()
    cosines = torch.where(lengths > 0, (chosen @ found.along) / (lengths * norm), 0.0)
    without = 1 - batches.sum(2)
    return torch.cat([cosines.mean()[None], (cosines @ without) / without.sum(0)])


def means_of_batch(found: Products, num_draws: int, size: float) -> torch.Tensor:
    """Return `leave_out_means`; of a size that is no whole number between those of the next ones, of one below 1 that
    of 1."""
    size = max(1.0, size)
    whole, part = int(size), size - int(size)
    means = leave_out_means(found, num_draws, whole)
    return means if part == 0 else (1 - part) * means + part * leave_out_means(found, num_draws, whole + 1)


def jackknife(means: torch.Tensor, most: float = 1.0) -> Interval:
    """Return the first of `means` [M + 1] with its 95 % interval by the others, which leave out a problem each; it is
    cut to -`most` .. `most`."""
    value, others = float(means[0]), means[1:]
    variance = float((others - others.mean()).square().sum()) * (len(others) - 1) / len(others)
    half = t_quantile(len(others) - 1) * math.sqrt(variance)
    return Interval(value, max(-most, value - half), min(most, value + half))


# --- the expected gradient --------------------------------------------------------------------------------------------


def resamples(num_problems: int, num: int = NUM_RESAMPLES, seed: int = 0) -> torch.Tensor:
    """Return how often each of N problems is drawn [num + 1, N] float64: all once, then `num` times N of N with
    replacement."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(num_problems, (num, num_problems), generator=generator)
    counts = torch.zeros(num, num_problems, dtype=torch.float64)
    counts.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))
    return torch.cat([torch.ones(1, num_problems, dtype=torch.float64), counts])


def mean_of_pairs(matrix: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the mean over pairs of different problems of `matrix` [M, N], whose rows are the first M of the N problems
    of its columns, a problem counted `counts` [R, N] times: [R]."""
    rows = counts[:, : len(matrix)]
    both = ((rows @ matrix) * counts).sum(1) - (rows**2) @ matrix.diagonal()
    return both / (rows.sum(1) * counts.sum(1) - (rows**2).sum(1))


def expected_cosine(found: Products, num: int = NUM_RESAMPLES) -> Interval:
    """Return the cosine of the expected gradient with the policy gradient.

    It is cut to -1 .. 1, beyond which noise can take it, and nan where one of the squared norms is not above 0 by these
    products: it may then be anything, which a resample of that kind counts as at both ends. A gradient of nothing has
    cosine 0.
    """
    if not found.gram.any():
        return Interval(0.0, 0.0, 0.0)
    counts = resamples(len(found.exact), num)
    truth, rest = mean_of_pairs(found.exact, counts), mean_of_pairs(found.rest_exact, counts)
    own = mean_of_pairs(found.rest, counts[:, : len(found.rest)])
    expected = found.scale**2 * truth + 2 * found.scale * rest + own
    is_known = (truth > 0) & (expected > 0)
    cosines = ((found.scale * truth + rest) / (truth * expected).sqrt()).clamp(-1, 1).where(is_known, math.nan)
    low, high = (cosines[1:].nan_to_num(end).quantile(at) for end, at in ((-1.0, 0.025), (1.0, 0.975)))
    return Interval(float(cosines[0]), float(low), float(high))
