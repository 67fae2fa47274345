"""Whether the training reward falls over many iterations: a test on the rewards of a run, and the line that says so.

Nothing else in a run notices it: the loss of a policy gradient says nothing about progress, and evaluations are rare.
The test looks for the iteration at which the mean reward stepped down: for every such border the iterations from it on
are compared with those just before it (5, 10, 20, ... of them), in standard errors of their ranks' normal scores. The
noise of one iteration is estimated from the differences of neighbours, which a trend hardly touches. The limit grows
with the number of comparisons, so that fewer than 10 of 1,000 flat runs of 24 to 200 iterations are said to fall. What
raises so few false alarms needs a clear fall: with 64 problems an iteration, from 9 % to 3 % is usually seen within two
dozen iterations, from 9 % to 5 % only after more of them.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

import numpy

log = logging.getLogger(__name__)

SHORTEST = 5  # iterations on either side
_WINDOW = 400  # the newest iterations that are looked at
_LIMIT, _GROWTH = 3.1, 0.4  # standard errors, where the noise is known: and for every e-fold of iterations
_SLACK = 8.0  # as much more, divided by the differences that the noise is estimated from
_SMALLEST = 0.1  # of the earlier mean: a smaller fall is not said


@dataclass(frozen=True)
class Fall:
    """From the mean reward `before` of the iterations `first` .. `border` - 1 to `after` of `border` .. `last` (numbers
    from 1), `errors` standard errors apart."""

    first: int
    border: int
    last: int
    before: float
    after: float
    errors: float


class RewardTrend:
    """Fed with an iteration's mean reward after the other; says of each fall once, when it is seen: what comes after it
    is compared with the level it fell to. Fed with the same rewards again it is in the same state."""

    def __init__(self) -> None:
        self._rewards: list[float] = []
        self._first = 1  # iteration of rewards[0]

    def add(self, reward: float) -> Fall | None:
        """The fall that shows with this iteration's mean reward."""
        self._rewards.append(reward)
        if len(self._rewards) > _WINDOW:
            self._first += len(self._rewards) - _WINDOW
            self._rewards = self._rewards[-_WINDOW:]
        found = find_fall(self._rewards, self._first)
        if found is not None:
            self._rewards = self._rewards[found.border - self._first :]
            self._first = found.border
        return found


def find_fall(rewards: Sequence[float], first: int = 1) -> Fall | None:
    """The most significant step down in the mean rewards of iterations `first`, `first` + 1, ...; None where there is
    none beyond chance."""
    count = len(rewards)
    if count < 2 * SHORTEST:
        return None
    scores = normal_scores(rewards)
    noise = math.sqrt(float(numpy.square(numpy.diff(scores)).mean()) / 2)
    sums = numpy.concatenate([[0.0], scores.cumsum()])
    borders = numpy.arange(SHORTEST, count - SHORTEST + 1)
    widths = SHORTEST * 2 ** numpy.arange(math.ceil(math.log2(count / SHORTEST)))
    starts = numpy.maximum(borders - widths[:, None], 0)
    before = (sums[borders] - sums[starts]) / (borders - starts)
    after = numpy.broadcast_to((sums[-1] - sums[borders]) / (count - borders), before.shape)
    error = noise * numpy.sqrt(1 / (borders - starts) + 1 / (count - borders))
    sizes = (before - after) / numpy.maximum(error, 1e-12)
    best = numpy.unravel_index(int(sizes.argmax()), sizes.shape)
    start, border, size = int(starts[best]), int(borders[best[1]]), float(sizes[best])
    if not size > _LIMIT + _GROWTH * math.log(count) + _SLACK / (count - 1):
        return None
    high, low = fmean(rewards[start:border]), fmean(rewards[border:])
    if not high - low >= _SMALLEST * abs(high):
        return None
    return Fall(first + start, first + border, first + count - 1, high, low, size)


def normal_scores(values: Sequence[float]) -> Any:
    """The normal quantiles of the values' ranks (equal values share one): a few lucky iterations weigh no more than
    they would under a normal distribution."""
    _, inverse, counts = numpy.unique(numpy.asarray(values), return_inverse=True, return_counts=True)
    ranks = numpy.cumsum(counts) - (counts - 1) / 2  # from 1
    quantile = NormalDist().inv_cdf
    scores = numpy.array([quantile(rank / (len(values) + 1)) for rank in ranks])
    return scores[inverse]


Row = Mapping[str, float]  # of metrics.jsonl


class RewardWatch:
    """Says in one line of the log when the training reward of a run has fallen, and what usually does that. What a
    metrics.jsonl holds already was said by the run that wrote it."""

    def __init__(self, metrics: Path):
        self.trend = RewardTrend()
        self._rows: dict[int, Row] = {}
        if metrics.is_file():
            for line in metrics.read_text().splitlines():
                row = json.loads(line)
                self._add(int(row["step"]), row)

    def add(self, iteration: int, values: Row) -> Fall | None:
        """After an iteration (from 1); the fall that was warned of."""
        fall = self._add(iteration, values)
        if fall is not None:
            log.warning("%s", describe_fall(fall, self._rows))
        return fall

    def _add(self, iteration: int, values: Row) -> Fall | None:
        reward = values.get("rollout/reward")
        if reward is None:  # a line of an evaluation alone
            return None
        self._rows[iteration] = {name: values[name] for name in _SHOWN if name in values}
        self._rows.pop(iteration - _WINDOW, None)
        return self.trend.add(reward)


_SHOWN = ("update/learning_rate", "update/clip_share", "update/kl_old", "update/ratio_max", "engine/policy_moved",
          "rollout/zero_variance", "rollout/response_length", "rollout/truncated")  # fmt: skip


def describe_fall(fall: Fall, rows: Mapping[int, Row]) -> str:
    """How far and since when, and the usual causes in their order with the run's own numbers: means over the iterations
    `rows` holds before and after the border (the largest of learning rates and ratios)."""

    def values(name: str, start: int, end: int) -> list[float]:
        return [rows[i][name] for i in range(start, end) if i in rows and name in rows[i]]

    def mean(name: str, is_before: bool = False) -> float:
        span = (fall.first, fall.border) if is_before else (fall.border, fall.last + 1)
        return fmean(values(name, *span) or [0.0])

    def largest(name: str) -> float:
        return max(values(name, fall.first, fall.last + 1), default=0.0)

    rate = largest("update/learning_rate")
    causes = (
        f"a learning rate that is too high (it is {rate:.2g}, an iteration moves the policy by "
        f"{mean('engine/policy_moved'):.2g} nats a token: try {rate / 3:.1g})",
        f"groups that agree and teach nothing ({mean('rollout/zero_variance'):.0%} of them, "
        f"{mean('rollout/zero_variance', True):.0%} before: a larger group_size, or other problems)",
        f"old rollouts (largest ratio {largest('update/ratio_max'):.2g}, {mean('update/clip_share'):.1%} of tokens "
        f"clipped, KL of an update {mean('update/kl_old'):.2g}: fewer num_epochs, larger minibatches)",
        f"length ({mean('rollout/response_length'):.0f} tokens a response, {mean('rollout/response_length', True):.0f} "
        f"before; {mean('rollout/truncated'):.0%} cut, {mean('rollout/truncated', True):.0%} before: a larger "
        "params.max_tokens)",
    )
    return (
        f"the training reward fell from {fall.before:.3g} (iterations {fall.first} to {fall.border - 1}) to "
        f"{fall.after:.3g} (since iteration {fall.border}), by {fall.errors:.1f} standard errors. Usual causes, the "
        f"likeliest first: {'; '.join(causes)}"
    )
