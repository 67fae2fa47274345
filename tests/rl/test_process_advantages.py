"""Estimators that read the process rewards of the run's reward, by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from espalier.data.records import BadInput
from espalier.rewards.process import step_rewards
from espalier.rewards.score import Score
from espalier.rl.advantages.process_grpo import ProcessGRPO
from espalier.rl.advantages.pure import PURE
from espalier.rl.advantages.rloo import RLOO
from espalier.rl.types import Rollout, RolloutGroup
from tests.rl.test_advantages import NO_SAMPLER, make_experience, make_group, make_rollout
from tests.rl.test_group_advantages import advantages, without_tokens


def end_alone(name: str) -> Rollout:
    """A response that is an end token and no step."""
    row = make_rollout(name, "", False)
    return replace(row, trajectory=replace(row.trajectory, steps=[], step_ends=[]))


def scored(*rows: tuple[str, list[float], float]) -> RolloutGroup:
    """(letters, process reward of each, outcome)."""
    group = make_group([(tokens, outcome > 0) for tokens, _, outcome in rows])
    return replace(group, scores=[Score(outcome, steps) for _, steps, outcome in rows])


def test_process_grpo_sums_the_groups_normalised_step_rewards_from_each_step_on() -> None:
    group = scored(("ab", [0.9, 0.1], 0.0), ("c", [0.5], 0.0))
    # mean 1/2, standard deviation of a sample 0.4: 1, -1 and 0
    found = advantages(ProcessGRPO(), group)
    assert found[0] == pytest.approx([0.0, -1.0, -1.0], abs=1e-6)
    assert found[1] == pytest.approx([0.0, 0.0], abs=1e-6)


def test_process_grpo_normalises_every_group_and_the_outcome_on_its_own() -> None:
    groups = [scored(("ab", [0.9, 0.1], 1.0), ("c", [0.5], 0.0)), scored(("ab", [3.0, 1.0], 0.0), ("c", [2.0], 0.0))]
    found = advantages(ProcessGRPO(), *groups)
    half = 0.5 / 0.5**0.5  # outcomes 1 and 0: mean 1/2, variance of a sample 1/2
    assert found[0] == pytest.approx([0.0 + half, -1.0 + half, -1.0 + half], abs=1e-6)
    assert found[1] == pytest.approx([-half, -half], abs=1e-6)
    assert found[2] == pytest.approx([0.0, -1.0, -1.0], abs=1e-6)


def test_pure_takes_the_others_reward_per_token_off_every_step_by_its_tokens() -> None:
    group = scored(("ab", [0.5, -0.25], 1.0), ("c", [0.4], 0.0), ("def", [0.1, 0.1, 0.1], 0.0))
    # tokens 3, 2 and 4; of the others' rewards per token 0.7 / 6, 0.55 / 7, 0.65 / 5; steps of "ab" have 1 and 2 tokens
    found = advantages(PURE(), group)
    last = -0.25 - 2 * 0.7 / 6
    assert found[0] == pytest.approx([1.0 + (0.5 - 0.7 / 6) + last, 1.0 + last, 1.0 + last])
    assert found[1] == pytest.approx([-0.5 + 0.4 - 2 * 0.55 / 7] * 2)
    assert found[2][0] == pytest.approx(-0.5 + 0.3 - 4 * 0.13)
    assert found[2][2] == found[2][3] == pytest.approx(-0.5 + 0.1 - 2 * 0.13)


def test_with_pure_it_makes_no_difference_into_how_many_steps_a_response_is_cut() -> None:
    fine = scored(("abcd", [0.1, 0.1, 0.1, 0.1], 0.0), ("xy", [0.3, 0.2], 0.0))
    rollout = fine.rollouts[0]
    coarse = replace(rollout, trajectory=replace(rollout.trajectory, steps=["abcd"], step_ends=[5]))
    group = replace(fine, rollouts=[coarse, fine.rollouts[1]], scores=[Score(0.0, [0.4]), fine.scores[1]])
    assert advantages(PURE(), group)[0][0] == pytest.approx(advantages(PURE(), fine)[0][0])
    assert advantages(PURE(), group)[1] == pytest.approx(advantages(PURE(), fine)[1])


def test_in_the_min_form_the_worst_step_is_charged_to_itself_and_those_before_it() -> None:
    rewards = step_rewards([0.9, 0.1, 0.8], "minimum", 0.5, 0.05)
    group = scored(("abc", rewards, 0.0), ("d", [0.0], 0.0))  # the other has no reward: a baseline of 0
    found = advantages(PURE(), group)[0]
    assert found[0] == pytest.approx(-0.4, abs=1e-3)
    assert found[1] == pytest.approx(-0.4, abs=1e-3)
    assert found[2] == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize("estimator", [ProcessGRPO(), PURE()])
def test_responses_without_steps_or_tokens_and_rewards_that_agree_are_taken(estimator: Any) -> None:
    group = scored(("ab", [0.25, 0.25], 0.0), ("c", [0.25], 0.0))
    rollouts = [*group.rollouts, end_alone("p/2"), without_tokens("p/3")]
    found = advantages(estimator, replace(group, rollouts=rollouts, scores=[*group.scores, Score(0.0), Score(0.0)]))
    assert [len(row) for row in found] == [3, 2, 1, 0]
    assert all(torch.isfinite(torch.tensor(row)).all() for row in found)
    nothing = RolloutGroup(group.problem, [end_alone("p/0"), without_tokens("p/1")], [Score(1.0), Score(0.0)])
    alone = advantages(estimator, nothing)
    assert alone[0][0] > 0
    assert alone[1] == []
    if isinstance(estimator, ProcessGRPO):
        same = scored(("ab", [0.25, 0.25], 1.0), ("c", [0.25], 1.0))
        assert not any(value for row in advantages(estimator, same) for value in row)


def test_pure_without_process_rewards_worth_anything_is_rloo() -> None:
    group = scored(("ab", [0.0, 0.0], 1.0), ("c", [0.0], 0.0), ("d", [0.0], 0.0))
    assert advantages(PURE(), group) == advantages(RLOO(), group)


@pytest.mark.parametrize("estimator", [ProcessGRPO(), PURE()])
def test_a_reward_without_process_terms_is_refused(estimator: Any) -> None:
    group = make_group([("ab", True), ("b", False)])
    with pytest.raises(BadInput, match="reads process rewards, and the reward gives none"):
        estimator([group], make_experience([group]), NO_SAMPLER)
