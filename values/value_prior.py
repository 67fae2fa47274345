"""What counts of right completions say of true values, under a Beta distribution of the values over states.

The distribution is fitted by its mean and variance, the variance already free of the completions' own noise
(`values.label_reliability`). Given it, c of K right completions make the posterior Beta(alpha + c, beta + K - c), and
"how likely is this state better than that one" is an integral. It is computed on a grid of logits, on which every Beta
density is smooth and bounded: t = log(v / (1 - v)) has the log-density alpha log s(t) + beta log s(-t), s the logistic
function.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

GRID = 16_001
DEPTH = 40.0  # the grid ends where the log-density is this far below its highest
LOWEST, HIGHEST = 0.02, 1e5  # of alpha + beta: nearly all values 0 or 1; nearly all values equal

CountPair = tuple[int, int]  # right completions, completions


@dataclass(frozen=True)
class ValuePrior:
    """A Beta distribution of true values over states."""

    alpha: float
    beta: float

    @cached_property
    def logits(self) -> np.ndarray:
        """The grid [G], as wide as the prior is: posteriors are narrower."""
        mode = math.log(self.alpha / self.beta)
        lowest = float(_log_density(self.alpha, self.beta, np.asarray(mode))) - DEPTH
        ends = []
        for sign, rate in ((-1.0, self.alpha), (1.0, self.beta)):
            near, far = 0.0, 2 * DEPTH / rate + 2 * DEPTH
            for _ in range(60):
                middle = (near + far) / 2
                is_inside = _log_density(self.alpha, self.beta, np.asarray(mode + sign * middle)) > lowest
                near, far = (middle, far) if is_inside else (near, middle)
            ends.append(mode + sign * far)
        return np.linspace(ends[0], ends[1], GRID)

    def posteriors(self, counts: Sequence[CountPair]) -> np.ndarray:
        """Return the probabilities [N, G] of the grid's points given each of N counts."""
        right = np.asarray([one for one, _ in counts], dtype=np.float64)[:, None]
        wrong = np.asarray([number - one for one, number in counts], dtype=np.float64)[:, None]
        logs = _log_density(self.alpha + right, self.beta + wrong, self.logits)
        masses = np.exp(logs - logs.max(axis=1, keepdims=True))
        return np.asarray(masses / masses.sum(axis=1, keepdims=True))

    def higher(self, first: Sequence[CountPair], second: Sequence[CountPair]) -> np.ndarray:
        """Return P(V_first > V_second | counts) [N, M] for every count of `first` [N] and of `second` [M], the two
        states independent of one another."""
        masses = self.posteriors(second)
        below = np.cumsum(masses, axis=1) - masses / 2
        return np.asarray(self.posteriors(first) @ below.T)

    def count_probs(self, num_completions: int) -> np.ndarray:
        """Return P(c of K right) [K + 1]: the beta-binomial distribution."""
        total, k = _log_beta(self.alpha, self.beta), num_completions
        logs = [math.log(math.comb(k, c)) + _log_beta(self.alpha + c, self.beta + k - c) - total for c in range(k + 1)]
        return np.exp(np.asarray(logs))

    def expected_auc(self, num_completions: int) -> float:
        """Return how well shares of K completions tell states whose true value is above the mean from the rest: the
        probability that of one of each kind the better has the higher share, equal shares counting half."""
        counts = [(right, num_completions) for right in range(num_completions + 1)]
        is_above = self.logits > math.log(self.alpha / self.beta)
        above = self.posteriors(counts) @ is_above
        probs = self.count_probs(num_completions)
        good, bad = probs * above, probs * (1 - above)
        return float(good @ (np.cumsum(bad) - bad / 2) / (good.sum() * bad.sum()))

    @cached_property
    def loss_gain(self) -> float:
        """Return how much lower the cross-entropy (in nats) of the values as soft targets is for a reader that knows
        each of them than for one that says their mean: H(mean) - E H(V), H the entropy of a binary outcome."""
        logs = np.logaddexp(0, -self.logits), np.logaddexp(0, self.logits)  # -log v, -log(1 - v)
        entropies = np.exp(-logs[0]) * logs[0] + np.exp(-logs[1]) * logs[1]
        mean = self.alpha / (self.alpha + self.beta)
        return -mean * math.log(mean) - (1 - mean) * math.log1p(-mean) - float(self.posteriors([(0, 0)])[0] @ entropies)

    def completions_for(self, auc: float, most: int = 256) -> int | None:
        """Return the fewest completions per state (2 or more) whose `expected_auc` is at least `auc`; None beyond
        `most`."""
        low, high = 1, 2
        while self.expected_auc(high) < auc:
            low, high = high, 2 * high
            if high > most:
                return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.expected_auc(middle) >= auc else (middle, high)
        return high


def fit_prior(mean: float, variance: float) -> ValuePrior | None:
    """Return the Beta distribution of this mean and variance; None where there is no variance: all values are equal.

    A variance beyond what values in [0, 1] can have is lowered to nearly that.
    """
    if variance <= 0 or not 0 < mean < 1:
        return None
    total = min(HIGHEST, max(LOWEST, mean * (1 - mean) / variance - 1))
    return ValuePrior(mean * total, (1 - mean) * total)


def _log_density(alpha: float | np.ndarray, beta: float | np.ndarray, logits: np.ndarray) -> np.ndarray:
    return np.asarray(-alpha * np.logaddexp(0, -logits) - beta * np.logaddexp(0, logits))


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
