"""Whether the training reward falls over many iterations, or right answers do while it rises: a test on the means of a
run's iterations, and the line that says so. A warning only: the run goes on.

Nothing else in a run notices it: the loss of a policy gradient says nothing about progress, and evaluations are rare.
At 20 iterations and at every tenth after that, the slope of the rewards over the last 20, the last 40 and all of them
is tested, one-sided, by Student's t. The k-th look may raise 0.9 % · 6 / (π² k²) of false alarms, divided by its
windows (Bonferroni): all looks of a run that stands still under independent normal noise, however long, add up to 0.9 %
at most. After a fall that was said the count of iterations begins anew. Where the second half of a window lies less
than a tenth below the first, nothing is said.

Simulated with 64 problems of 8 rollouts whose difficulties differ (beta distributed, of concentration 1.5): success
that falls linearly from 9 % to 5 % in 20 iterations is said at once in 38 % of runs and after 10 more iterations at 5 %
in 57 %, from 9 % to 3 % in 24 in 64 %, from 40 % to 20 % in 20 in all. Of flat runs of 24, 100 and 200 iterations 0.5,
0.7 and 0.9 % are said to fall at 9 % and at most 0.3 % at 50 %, under normal noise (of a fifth of the mean) at most 0.9
%, under noise of long tails (Student's t of 3 degrees, the eighth power of a uniform number) at most 0.7 %; of 2,000
runs that rise from 10 % to 60 % in 30 iterations and stand still for 70, at most one. Where success of 30 % itself
wanders (its log-odds with autocorrelation 0.8 and deviation 0.05, or 0.3 and 0.1), 0.7 to 2 % are.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, fmean

import numpy

log = logging.getLogger(__name__)

_FIRST_LOOK, _EVERY = 20, 10  # iterations
_WINDOWS = (20, 40)  # the newest of them, beside all
_FALSE_ALARMS = 0.009  # of all looks together
_FALLS_TOO = 2.0  # standard errors of the reward's slope, from which on it falls as right answers do
_SMALLEST = 0.1  # of the earlier mean: a smaller fall is not said


@dataclass(frozen=True)
class Fall:
    """From the mean reward `before` of the iterations `first` .. `border` - 1 to `after` of `border` .. `last` (numbers
    from 1), the halves of a window with a slope of -`errors` standard errors."""

    first: int
    border: int
    last: int
    before: float
    after: float
    errors: float


class RewardTrend:
    """Fed with one iteration's mean reward after the other, from iteration `first` on; says of each fall once, when it
    is seen: only iterations after it are looked at from then on. Fed with the same rewards again it is in the same
    state."""

    def __init__(self, first: int = 1) -> None:
        self._rewards: list[float] = []
        self._first = first  # iteration of rewards[0]

    def add(self, reward: float) -> Fall | None:
        """Return the fall that shows with this iteration's mean reward."""
        self._rewards.append(reward)
        found = find_fall(self._rewards, self._first)
        if found is not None:
            self._first += len(self._rewards)
            self._rewards = []
        return found


def find_fall(rewards: Sequence[float], first: int = 1) -> Fall | None:
    """Return the most significant fall in the mean rewards of iterations `first`, `first` + 1, ...; None where there is
    none beyond chance, or no look is due at so many of them."""
    count = len(rewards)
    if count < _FIRST_LOOK or (count - _FIRST_LOOK) % _EVERY:
        return None
    look = 1 + (count - _FIRST_LOOK) // _EVERY
    windows = sorted({min(size, count) for size in (*_WINDOWS, count)})
    chance = _FALSE_ALARMS * 6 / (math.pi * look) ** 2 / len(windows)
    found: dict[float, Fall] = {}  # how far beyond its limit → the fall
    for size in windows:
        errors = -slope_errors(rewards[-size:])
        start, border = count - size, count - size // 2
        high, low = fmean(rewards[start:border]), fmean(rewards[border:])
        beyond = errors / student_quantile(1 - chance, size - 2)
        if beyond > 1 and high - low >= _SMALLEST * abs(high):
            found[beyond] = Fall(first + start, first + border, first + count - 1, high, low, errors)
    return found[max(found)] if found else None


def slope_errors(values: Sequence[float]) -> float:
    """Return the slope of the least-squares line through `values` in its standard errors (Student's t of n - 2
    degrees)."""
    given = numpy.asarray(values, dtype=float)
    times = numpy.arange(len(given)) - (len(given) - 1) / 2
    spread = float(times @ times)
    slope = float(times @ given) / spread
    rest = given - given.mean() - slope * times
    return slope / max(math.sqrt(float(rest @ rest) / (len(given) - 2) / spread), 1e-12)


def student_quantile(share: float, degrees: int) -> float:
    """Of Student's distribution, by the Cornish-Fisher expansion (Abramowitz and Stegun 26.7.5)."""
    z = NormalDist().inv_cdf(share)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, 1))


Row = Mapping[str, float]  # of metrics.jsonl


class RewardWatch:
    """Says in one line of the log when the training reward of a run has fallen, and what usually does that, and in
    another when the share of right answers has while the reward has not. What a metrics.jsonl holds already was said by
    the run that wrote it."""

    def __init__(self, metrics: Path):
        self.trend, self.right = RewardTrend(), RewardTrend()
        self._rows: dict[int, Row] = {}
        if metrics.is_file():
            for line in metrics.read_text().splitlines():
                row = json.loads(line)
                self._add(int(row["step"]), row)

    def add(self, iteration: int, values: Row) -> Fall | None:
        """After an iteration (from 1); the fall that was warned of."""
        fall, led_away = self._add(iteration, values)
        if fall is not None:
            log.warning("%s", describe_fall(fall, self._rows))
        if led_away is not None:
            log.warning("%s", led_away)
        return fall

    def _add(self, iteration: int, values: Row) -> tuple[Fall | None, str | None]:
        """Return the fall of the reward, and the line on a fall of right answers alone."""
        reward = values.get("rollout/reward")
        accuracy = values.get("rollout/drawn_accuracy", values.get("rollout/accuracy"))  # of the same rollouts
        if reward is None:  # a line of an evaluation alone
            return None, None
        if not self._rows:
            self.trend, self.right = RewardTrend(iteration), RewardTrend(iteration)
        self._rows[iteration] = {name: values[name] for name in _SHOWN if name in values}
        fall = self.trend.add(reward)
        lost = None if accuracy is None else self.right.add(accuracy)
        return fall, None if lost is None else describe_led_away(lost, self._rows)


_SHOWN = ("rollout/reward", "update/learning_rate", "update/clip_share", "update/kl_old", "update/ratio_max",
          "engine/policy_moved", "rollout/zero_variance", "rollout/response_length", "rollout/truncated")  # fmt: skip


def describe_led_away(fall: Fall, rows: Mapping[int, Row]) -> str | None:
    """Return the line on a fall of right answers in which the reward has not fallen; None where it has too."""
    early, late = (
        [rows[i]["rollout/reward"] for i in range(start, end) if i in rows]
        for start, end in ((fall.first, fall.border), (fall.border, fall.last + 1))
    )
    if not early or not late:
        return None
    if -slope_errors([*early, *late]) > _FALLS_TOO:
        return None
    before, after = fmean(early), fmean(late)
    return (
        f"right answers fall, {fall.before:.3g} of the rollouts in iterations {fall.first} to {fall.border - 1} and "
        f"{fall.after:.3g} in {fall.border} to {fall.last}, while the training reward goes from {before:.3g} to "
        f"{after:.3g}: the policy is paid for something else than being right (a model's score that it has learned to "
        "please, length, form): let the outcome count more, hold the policy near its start (kl.coefficient), train the "
        "reward model again on this policy's rollouts, or stop at an earlier checkpoint"
    )


def describe_fall(fall: Fall, rows: Mapping[int, Row]) -> str:
    """Return how far and since when, and the usual causes in their order with the run's own numbers: means over the
    iterations `rows` holds in either half (the largest of learning rates and ratios)."""

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
        f"{mean('engine/policy_moved'):.2g} nats per token: try {rate / 3:.1g})",
        f"groups that agree and teach nothing ({mean('rollout/zero_variance'):.0%} of them, "
        f"{mean('rollout/zero_variance', True):.0%} before: a larger rollout.group_size, or other problems)",
        f"old rollouts (largest ratio {largest('update/ratio_max'):.2g}, {mean('update/clip_share'):.1%} of tokens "
        f"clipped, KL of an update {mean('update/kl_old'):.2g}: fewer update.num_epochs, larger minibatches)",
        f"length ({mean('rollout/response_length'):.0f} tokens per response, "
        f"{mean('rollout/response_length', True):.0f} before; {mean('rollout/truncated'):.0%} cut, "
        f"{mean('rollout/truncated', True):.0%} before: a larger params.max_tokens)",
    )
    return (
        f"the training reward falls: {fall.before:.3g} in iterations {fall.first} to {fall.border - 1}, "
        f"{fall.after:.3g} in {fall.border} to {fall.last}, a slope of -{fall.errors:.1f} standard errors. Usual "
        f"causes, the likeliest first: {'; '.join(causes)}"
    )
