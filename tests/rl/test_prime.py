"""PRIME's advantages by brute force in float64, and by hand where that is short."""

from typing import Any

import pytest
import torch

from espalier.data.records import BadInput, Problem, Trajectory
from espalier.rewards.score import Score
from espalier.rl.advantages.prime import PRIME, against_others, unit_rewards
from espalier.rl.advantages.rloo import RLOO
from espalier.rl.experience import token_rewards
from espalier.rl.losses import whiten
from espalier.rl.old_logprobs import OldLogprobs
from espalier.rl.types import Experience, Rollout, RolloutGroup

# (prompt tokens, step ends, outcome) of two problems' rollouts; one response has no token
ROWS = [
    [(2, [2, 3, 6], 1.0), (2, [4], 0.0), (2, [1, 2], 1.0)],
    [(3, [5, 7], 0.0), (3, [], 0.0), (3, [2, 3], 1.0)],
]


def groups_of(rows: list[list[tuple[int, list[int], float]]]) -> list[RolloutGroup]:
    found = []
    for number, own in enumerate(rows):
        problem = Problem(f"p{number}", "", "1")
        rollouts = []
        for index, (start, ends, outcome) in enumerate(own):
            ids = list(range(ends[-1])) if ends else []
            trajectory = Trajectory(f"p{number}/{index}", problem.id, "", "x" * len(ends), ["x"] * len(ends),
                                    [7] * start, ids, ends, "stop", "1", "1", outcome > 0.5)  # fmt: skip
            rollouts.append(Rollout(trajectory, [0.0] * len(ids), 0))
        found.append(RolloutGroup(problem, rollouts, [Score(outcome) for _, _, outcome in own]))
    return found


def case() -> tuple[list[RolloutGroup], Experience]:
    """The groups, with a drawn reward of every token."""
    groups = groups_of(ROWS)
    flat = [row for own in ROWS for row in own]
    length = max(start + (ends[-1] if ends else 0) for start, ends, _ in flat)
    places = torch.arange(length)
    mask = torch.stack([(places >= start) & (places < start + (ends[-1] if ends else 0)) for start, ends, _ in flat])
    rewards = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    zeros = torch.zeros(mask.shape)
    experience = Experience(zeros.int(), mask, mask, zeros, OldLogprobs(zeros, zeros),
                            rewards=token_rewards(groups, mask), implicit_rewards=rewards)  # fmt: skip
    return groups, experience


def brute_force(
    rewards: torch.Tensor, granularity: str, gamma: float, weights: tuple[float, float], bounds: bool
) -> list[list[float]]:
    """The advantages of every rollout's response tokens, from the definition, one number at a time."""
    flat = [row for own in ROWS for row in own]
    units: list[dict[int, float]] = []  # of every rollout: token at which a unit ends → its reward
    for number, (start, ends, _) in enumerate(flat):
        own = rewards[number, start : start + (ends[-1] if ends else 0)].double().tolist()
        cuts = {"token": range(1, len(own) + 1), "step": ends, "whole": [len(own)] if own else []}[granularity]
        sums, before = {}, 0
        for end in cuts:
            sums[end - 1] = sum(own[before:end])
            before = end
        units.append(sums)
    if bounds:
        every = [sum(value for at, value in own.items() if at >= t) for own in units for t in range(20)]
        largest = max(map(abs, every)) + 1e-6
        units = [{at: value / largest for at, value in own.items()} for own in units]
    means = [sum(own.values()) / max(1, len(own)) for own in units]
    found, first = [], 0
    for problem in ROWS:
        members = range(first, first + len(problem))
        first += len(problem)
        for i in members:
            others = [j for j in members if j != i]
            baseline = sum(means[j] for j in others) / len(others)
            outcome = flat[i][2] - sum(flat[j][2] for j in others) / len(others)
            num = flat[i][1][-1] if flat[i][1] else 0
            found.append([
                weights[0] * sum(gamma ** (s - t) * (value - baseline) for s, value in units[i].items() if s >= t)
                + weights[1] * outcome
                for t in range(num)
            ])  # fmt: skip
    return found


@pytest.mark.parametrize("granularity", ["token", "step", "whole"])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("bounds", [True, False])
def test_prime_equals_brute_force_of_its_definition(granularity: str, gamma: float, bounds: bool) -> None:
    groups, experience = case()
    estimator = PRIME(5.0, 2.0, gamma, granularity, bounds)
    found = estimator(groups, experience, None).advantages  # type: ignore[arg-type]
    assert experience.implicit_rewards is not None
    want = brute_force(experience.implicit_rewards, granularity, gamma, (5.0, 2.0), bounds)
    for row, own in enumerate(want):
        mask = experience.response_mask[row]
        torch.testing.assert_close(found[row][mask], torch.tensor(own, dtype=found.dtype), rtol=1e-5, atol=1e-5)
    assert not found[~experience.response_mask].any()


def test_without_process_rewards_prime_is_rloo_and_each_weight_reaches_the_advantage() -> None:
    groups, experience = case()
    parts = {w: PRIME(*w)(groups, experience, None).advantages  # type: ignore[arg-type]
             for w in ((1.0, 1.0), (0.0, 1.0), (1.0, 0.0), (3.0, 2.0))}  # fmt: skip
    torch.testing.assert_close(parts[0.0, 1.0], RLOO()(groups, experience, None).advantages)  # type: ignore[arg-type]
    torch.testing.assert_close(parts[3.0, 2.0], 3 * parts[1.0, 0.0] + 2 * parts[0.0, 1.0])
    assert parts[1.0, 0.0].abs().max() > 0


def test_the_last_token_has_its_own_reward() -> None:
    """Two rollouts of two tokens: rewards 1, 2 and 0, 0; the others' means are 0 and 1.5."""
    mask = torch.tensor([[True, True], [True, True]])
    rewards, is_unit = unit_rewards(torch.tensor([[1.0, 2.0], [0.0, 0.0]]), mask, [[1, 2], [1, 2]])
    assert against_others(rewards, is_unit, [2]).tolist() == [[1.0, 2.0], [-1.5, -1.5]]
    whole, _ = unit_rewards(torch.tensor([[1.0, 2.0], [0.0, 0.0]]), mask, [[2], [2]])
    assert whole.tolist() == [[0.0, 3.0], [0.0, 0.0]]


def test_bounded_returns_do_not_depend_on_beta_and_stay_within_one() -> None:
    groups, experience = case()
    assert experience.implicit_rewards is not None
    scaled: Any = Experience(experience.ids, experience.attention_mask, experience.response_mask,
                             experience.rollout_logprobs, experience.old, rewards=experience.rewards,
                             implicit_rewards=1000 * experience.implicit_rewards)  # fmt: skip
    first, second = (PRIME(outcome_weight=0.0)(groups, one, None).advantages  # type: ignore[arg-type]
                     for one in (experience, scaled))  # fmt: skip
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)
    whitened = whiten(first, experience.response_mask)[experience.response_mask]
    assert float(whitened.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(whitened.std()) == pytest.approx(1.0, abs=1e-5)


def test_a_granularity_or_discount_that_does_not_exist_is_refused() -> None:
    with pytest.raises(BadInput, match=r"advantage\.granularity must be one of token, step, whole, got 'line'"):
        PRIME(granularity="line")
    with pytest.raises(BadInput, match=r"advantage\.gamma must be above 0"):
        PRIME(gamma=0.0)
