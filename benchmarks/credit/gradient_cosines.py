"""How near the gradient of an estimator comes to the policy gradient, from one gradient per group of rollouts.

A group's gradient g is the mean over its rollouts of the sum over tokens of advantage x grad log-prob. The policy
gradient of a problem, G_i, is computed without rollouts (benchmarks/credit/exact_gradient.py); that of the task, G, is
the mean over its problems. Set against the gradient of exact credit on the *same* rollouts an estimator looks better
than it is, because both share the noise of the rollouts; set against that of others, worse. Here all products are of
different problems, i != j, whose noise has a mean of 0:

    <E g, G> = mean of <g_i, G_j>,   |E g|^2 = mean of <g_i, g_j>,   |G|^2 = mean of <G_i, G_j>

each of them unbiased. A batch of B groups has a mean gradient with E |mean|^2 = |E g|^2 + (E |g|^2 - |E g|^2) / B, so
that the cosine of a batch with G is known for every B without drawing one:

    cosine(B) = <E g, G> / (|G| sqrt(E |mean of B|^2)),   and without end <E g, G> / (|G| |E g|)

The last is 1 for an unbiased estimator, whatever its noise; the first is what an update gets.

Most of the noise of g is that of the rollouts, which the gradient g* of exact credit on the same rollouts has too, and
E g* = G is known. So only the rest d = g - k g* is left to be estimated, with k the number that makes it smallest:

    <E g, G> = k |G|^2 + <E d, G>,   |E g|^2 = k^2 |G|^2 + 2 k <E d, G> + |E d|^2

(a control variate: right for every k, and without noise where g is g*). Intervals are those of a bootstrap over
problems; a problem that is drawn twice is not multiplied with itself. All of it needs no more than products of
gradients, so that a resample costs no pass of the network.
"""

import math
from dataclasses import dataclass

import torch

NUM_RESAMPLES = 2000


@dataclass(frozen=True)
class ProblemGradients:
    """Of M problems: `means` [M, P], each the mean over the groups of one problem in float32, and `squares` [M]: the
    mean squared norm of one group's gradient, float64."""

    means: torch.Tensor
    squares: torch.Tensor


@dataclass(frozen=True)
class Products:
    """Products of gradients in float64, of M problems that an estimator is measured on, the first of N: `rest` [M, M]
    of its gradients' rests d with one another, `rest_exact` [M, N] of these with policy gradients, `exact` [N, N] of
    policy gradients; `squares` [M] as of `ProblemGradients`, and the factor k = `scale`."""

    rest: torch.Tensor
    rest_exact: torch.Tensor
    exact: torch.Tensor
    squares: torch.Tensor
    scale: float


@dataclass(frozen=True)
class Interval:
    """A number with the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def products(own: ProblemGradients, same: ProblemGradients, exact: torch.Tensor) -> Products:
    """Multiply an estimator's gradients of M problems, `own`, and those of exact credit on the same rollouts with one
    another and with the policy gradients `exact` [N, P] of the same problems and further ones."""
    size = float((same.means**2).sum(dtype=torch.float64))
    scale = float((own.means * same.means).sum(dtype=torch.float64)) / size if size else 0.0
    rest = own.means - scale * same.means
    return Products(
        (rest @ rest.T).double(), (rest @ exact.T).double(), (exact @ exact.T).double(), own.squares.double(), scale
    )


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


def batch_cosines(found: Products, num_groups: float, counts: torch.Tensor) -> torch.Tensor:
    """Return the cosine of the mean gradient of `num_groups` groups (math.inf: of the expected gradient) with the
    policy gradient, for every row of `counts` [R, N]: [R].

    It is cut to -1 .. 1, beyond which noise can take it, and nan where one of the squared norms is not above 0 by these
    products. A gradient of nothing has cosine 0.
    """
    if not found.squares.any():
        return torch.zeros(len(counts), dtype=torch.float64)
    rows, scale = counts[:, : len(found.rest)], found.scale
    truth, rest = mean_of_pairs(found.exact, counts), mean_of_pairs(found.rest_exact, counts)
    along = scale * truth + rest
    expected = scale**2 * truth + 2 * scale * rest + mean_of_pairs(found.rest, rows)
    spread = (rows @ found.squares) / rows.sum(1) - expected
    batch = expected + (spread / num_groups if math.isfinite(num_groups) else 0.0)
    is_known = (truth > 0) & (batch > 0)
    return (along / (truth * batch).sqrt()).clamp(-1, 1).where(is_known, math.nan)


def interval_of(resampled: torch.Tensor, most: float = 1.0) -> Interval:
    """Return the first number of `resampled` [R + 1] with the 2.5 and 97.5 % quantiles of the others; one that is not
    known may be anything from -`most` to `most`, and counts as at both ends."""
    low = resampled.nan_to_num(-most)[1:].quantile(0.025)
    high = resampled.nan_to_num(most)[1:].quantile(0.975)
    return Interval(float(resampled[0]), float(low), float(high))
