"""Exact values beside the share of right completions that a real engine gives, state by state.

A state is within three errors where that share lies no further outside the value's own bounds than three standard
errors of a binomial with the value within the bounds that varies most. One state says little: of `n` completions three
standard errors are 0.15 at n = 100 and a value of a half. All together say more, so the power of the count is worked
out beside it: the smallest error of all values that are not near 0 or 1 with which fewer than 98 % would be expected
within. The mean signed gap is more powerful still against an error of one sign.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.credit.estimated_credit import CreditBench
from espalier.data.records import State
from espalier.sampling.client import SamplingParams
from espalier.values.exact.decision_values import ExactValue
from espalier.values.monte_carlo import states_of

NUM_ERRORS = 3
GOAL = 0.98
"""Of states: the share that has to be within."""
MOST_COMPLETIONS = 400


@dataclass(frozen=True)
class CheckedState:
    """A state of a problem, its value, and how many of its completions are right."""

    problem_id: str
    value: ExactValue
    num_right: int
    num: int

    @property
    def share(self) -> float:
        """Of right completions."""
        return self.num_right / self.num

    @property
    def is_within(self) -> bool:
        """Whether the share agrees with the value."""
        return self.num_right in agreeing(self.value, self.num)


def standard_error(value: ExactValue, num: int) -> float:
    """Return that of a share of `num` outcomes, by the value within the bounds that varies most; at least that of one
    outcome in `num`."""
    success = min(max(value.low, 0.5), value.high)
    return float(max(success * (1 - success), 1 / num) / num) ** 0.5


def agreeing(value: ExactValue, num: int) -> range:
    """Return the numbers of right completions of `num` whose share is within three errors of the bounds."""
    width = NUM_ERRORS * standard_error(value, num)
    least, most = (value.low - width) * num, (value.high + width) * num
    return range(max(0, math.ceil(least - 1e-9)), min(num, math.floor(most + 1e-9)) + 1)


def chance_within(value: ExactValue, num: int, true_value: float) -> float:
    """Return the probability that a state of this value passes where right completions really have another."""
    chance = min(max(true_value, 0.0), 1.0)
    if chance in (0.0, 1.0):
        return float(round(num * chance) in agreeing(value, num))
    logs = math.log(chance), math.log1p(-chance)
    terms = (
        math.lgamma(num + 1) - math.lgamma(k + 1) - math.lgamma(num - k + 1) + k * logs[0] + (num - k) * logs[1]
        for k in agreeing(value, num)
    )
    return math.fsum(map(math.exp, terms))


def smallest_found_error(states: Sequence[CheckedState], goal: float = GOAL) -> float | None:
    """Return the smallest error, in steps of 0.005, of all values from 0.1 to 0.9 with which fewer than `goal` of the
    states would be expected within; errors go up where the value is below a half, else down. None where there is no
    such error below a half."""
    for number in range(1, 101):
        error = number / 200
        expected = fmean(chance_within(one.value, one.num, _moved(one.value.mid, error)) for one in states)
        if expected < goal:
            return error
    return None


def _moved(value: float, error: float) -> float:
    if not 0.1 <= value <= 0.9:  # where a smaller error is found
        return value
    return value + error if value < 0.5 else value - error


def mean_gap(states: Sequence[CheckedState]) -> tuple[float, float]:
    """Return (mean of share minus value, its standard error): gaps of one problem's states are summed first, since an
    error of the values would be common to them."""
    sums: dict[str, float] = defaultdict(float)
    for one in states:
        sums[one.problem_id] += one.share - one.value.mid
    mean = sum(sums.values()) / len(states)
    own = Counter(one.problem_id for one in states)
    squares = sum((total - mean * own[name]) ** 2 for name, total in sums.items())
    return mean, math.sqrt(squares * len(sums) / max(1, len(sums) - 1)) / len(states)


def check_states(bench: CreditBench, num_problems: int, tokens: int) -> list[CheckedState]:
    """Sample a rollout of the first `num_problems` of the bench, and completions of every state of it: equally many of
    each state, as many as about `tokens` are enough for, and at most `MOST_COMPLETIONS`."""
    trajectories, values = bench.valued_rollouts(num_problems)
    asked: list[tuple[State, ExactValue]] = []
    left = 0
    for trajectory, row in zip(trajectories, values, strict=True):
        states = states_of(trajectory, first_step=0)
        asked += zip(states, row, strict=False)
        left += sum(len(trajectory.response_ids) - len(state.prefix_ids) for state in states)
    completions = max(1, min(MOST_COMPLETIONS, tokens // max(1, left)))
    params = [SamplingParams(completions, 1.0, bench.params.max_tokens - len(state.prefix_ids)) for state, _ in asked]
    rows = bench.loop.run(bench.sampler.complete([state for state, _ in asked], params))
    return [
        CheckedState(state.problem_id, value, sum(row.is_correct for row in sampled), len(sampled))
        for (state, value), sampled in zip(asked, rows, strict=True)
    ]


def describe_check(states: Sequence[CheckedState]) -> dict[str, Any]:
    """Return the counts, the mean gap with its error, the root mean square of gaps in standard errors (1 where noise is
    all there is) and the power."""
    mean, error = mean_gap(states)
    scores = [(one.share - one.value.mid) / standard_error(one.value, one.num) for one in states]
    return {
        "states": len(states),
        "within": sum(one.is_within for one in states),
        "completions": states[0].num,
        "mean_gap": round(mean, 4),
        "mean_gap_error": round(error, 4),
        "gap_in_errors": round(math.sqrt(fmean(score**2 for score in scores)), 3),
        "finds_error": smallest_found_error(states),
    }


def describe_values(bench: CreditBench) -> dict[str, Any]:
    """Return how exact the values are by their own word (bounds, merged prefixes), and the share of right rollouts."""
    widths = [value.high - value.low for draw in bench.draws for row in draw.values for value in row[:-1]]
    rewards = [reward for draw in bench.draws for group in draw.groups for reward in group.rewards]
    error = bench.merge_error
    return {
        "bound_width": round(fmean(widths), 4),
        "most_bound_width": round(max(widths), 4),
        "merge_error": round(error.total_variation, 4),
        "outside": round(bench.outside, 4),
        "merge_value_gap": round(error.value_gap, 4),
        "most_merge_error": round(error.most, 4),
        "success": round(fmean(rewards), 4),
    }
