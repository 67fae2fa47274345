"""Estimators that read a group as a prefix tree: by hand, and their expected gradient against the exact one."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from espalier.data.records import BadInput
from espalier.rewards.score import Score
from espalier.rl.advantages.grpo import GRPO
from espalier.rl.advantages.lambda_grpo import LambdaGRPO
from espalier.rl.advantages.rloo import RLOO
from espalier.rl.advantages.shared_prefixes import SharedPrefixes
from espalier.rl.credit.common_prefixes import passers
from espalier.rl.types import Rollout, RolloutGroup
from tests.rl.test_advantages import NO_SAMPLER, make_experience, make_group, make_rollout, moments


def with_steps(rollout: Rollout, *ends: int) -> Rollout:
    """The same tokens, cut into other steps."""
    return replace(rollout, trajectory=replace(rollout.trajectory, steps=["x"] * len(ends), step_ends=list(ends)))


def without_tokens(name: str) -> Rollout:
    """A response that was cut before its first token."""
    empty = make_rollout(name, "a", False).trajectory
    return Rollout(replace(empty, response="", steps=[], step_ends=[], response_ids=[], finish_reason="length"), [], 3)


def advantages(estimator: Any, *groups: RolloutGroup) -> list[list[float]]:
    """At response tokens alone."""
    experience = make_experience(groups)
    found = estimator(groups, experience, NO_SAMPLER).advantages
    assert not found[~experience.response_mask].any()
    return [row[mask].tolist() for row, mask in zip(found, experience.response_mask, strict=True)]


def test_rows_that_begin_alike_are_passers_of_one_node() -> None:
    found = passers([[1, 2, 3], [1, 2], [1, 4], []])
    assert found[0] == [(0, 1, 2, 3), (0, 1, 2), (0, 1), (0,)]
    assert found[1] == [(0, 1, 2, 3), (0, 1, 2), (0, 1)]
    assert found[2] == [(0, 1, 2, 3), (0, 1, 2), (2,)]
    assert found[3] == [(0, 1, 2, 3)]


def test_lambda_grpo_divides_by_the_number_of_rollouts_that_share_a_token() -> None:
    group = make_group([("abc", True), ("abd", False), ("abc", True), ("b", False)])
    # rewards 1 0 1 0: mean 1/2. "a" and "ab" are shared by three; "abc" and its end token by two
    found = advantages(LambdaGRPO(divide_by_std=False), group)
    assert found[0] == found[2] == pytest.approx([0.5 / 3, 0.5 / 3, 0.5 / 2, 0.5 / 2])
    assert found[1] == pytest.approx([-0.5 / 3, -0.5 / 3, -0.5, -0.5])
    assert found[3] == pytest.approx([-0.5, -0.5])
    experience = make_experience([group])
    estimate = LambdaGRPO(divide_by_std=True)([group], experience, NO_SAMPLER)
    assert estimate.advantages[0, 1].item() == pytest.approx(0.5 / (1 / 3) ** 0.5 / 3)
    assert estimate.metrics["shared_tokens"] == (4 + 2 + 4) / 14


def test_lambda_grpo_is_grpo_where_nothing_is_shared_and_knows_one_group_from_another() -> None:
    groups = [make_group([("ab", True), ("ba", False)], "p"), make_group([("ab", False), ("ca", True)], "q")]
    assert advantages(LambdaGRPO(True), *groups) == advantages(GRPO(True), *groups)


def test_in_lambda_grpo_a_shared_step_has_the_mean_advantage_of_its_rollouts_once() -> None:
    # the paper's theorem: GRPO's sum over the rollouts that share a step is |lambda| times their mean advantage
    group = make_group([("abc", True), ("abd", False), ("abe", True), ("b", False)])
    found, plain = advantages(LambdaGRPO(False), group), advantages(GRPO(False), group)
    assert sum(row[0] for row in found[:3]) == pytest.approx(sum(row[0] for row in plain[:3]) / 3)


@pytest.mark.parametrize("estimator", [LambdaGRPO(True), LambdaGRPO(False), SharedPrefixes(), SharedPrefixes(False)])
def test_a_group_that_agrees_and_a_response_without_tokens_are_taken(estimator: Any) -> None:
    group = make_group([("ab", True), ("ac", True), ("a", True)])
    assert not any(value for row in advantages(estimator, group) for value in row)
    mixed = RolloutGroup(group.problem, [*group.rollouts, without_tokens("p/3")], [*group.scores, Score(0.0)])
    found = advantages(estimator, mixed)
    assert found[3] == []
    assert all(row[0] > 0 for row in found[:3])


def test_as_published_a_step_is_worth_the_change_of_the_mean_reward_of_all_that_pass() -> None:
    group = make_group([("abc", True), ("abd", False), ("aec", True), ("bbb", False)])
    found = SharedPrefixes(leave_one_out=False)([group], make_experience([group]), NO_SAMPLER)
    # V = 1/2 at the prompt, 2/3 after a, 1/2 after ab, a rollout's own reward where it is alone
    assert found.state_values[0] == pytest.approx([1 / 2, 2 / 3, 1 / 2, 1])
    assert found.state_values[2] == pytest.approx([1 / 2, 2 / 3, 1, 1])
    rows = found.advantages[:, 1:].tolist()
    assert rows[0] == pytest.approx([1 / 6, -1 / 6, 1 / 2, 1 / 2])
    assert rows[2] == pytest.approx([1 / 6, 1 / 3, 0, 0])
    assert rows[3] == pytest.approx([-1 / 2, 0, 0, 0])
    assert found.metrics["shared_states"] == (2 + 2 + 1 + 0) / 8


def test_left_out_of_its_own_baseline_a_lone_rollout_is_compared_with_those_it_left_last() -> None:
    group = make_group([("abc", True), ("abd", False), ("aec", True), ("bbb", False)])
    found = SharedPrefixes(prior_weight=0.0)([group], make_experience([group]), NO_SAMPLER)
    rows = found.advantages[:, 1:].tolist()
    # the others at the prompt 1/3, after a (0 + 1) / 2, after ab 0; through a 2/3, through ab 1/2
    assert found.state_values[0] == pytest.approx([1 / 3, 1 / 2, 0, 1])
    assert rows[0] == pytest.approx([2 / 3 - 1 / 3, 1 / 2 - 1 / 2, 1 - 0, 1 - 0])
    # alone after ae: the others after a, (1 + 0) / 2, stay its baseline
    assert rows[2] == pytest.approx([2 / 3 - 1 / 3, 1 - 1 / 2, 1 - 1 / 2, 1 - 1 / 2])
    # alone from the first letter on: the others at the prompt, as RLOO
    assert rows[3] == pytest.approx([0 - 2 / 3] * 4)


def test_the_state_before_counts_as_so_many_rollouts_of_a_baseline() -> None:
    group = make_group([("abc", True), ("abd", False), ("aec", True), ("bbb", False)])
    found = SharedPrefixes(prior_weight=1.0)([group], make_experience([group]), NO_SAMPLER)
    # 1/3; with the rewards 0 and 1 of the others after a (0 + 1 + 1/3) / 3; with the 0 after ab (0 + 4/9) / 2
    assert found.state_values[0] == pytest.approx([1 / 3, 4 / 9, 2 / 9, 1])
    endless = SharedPrefixes(prior_weight=1e12)([group], make_experience([group]), NO_SAMPLER)
    assert endless.state_values[0] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1])
    with pytest.raises(BadInput, match=r"prior_weight must be at least 0"):
        SharedPrefixes(prior_weight=-1.0)


def test_rollouts_that_share_nothing_get_rloos_advantages() -> None:
    group = make_group([("abc", True), ("bcd", False), ("cde", True)])
    found, rloo = advantages(SharedPrefixes(), group), advantages(RLOO(), group)
    assert [value for row in found for value in row] == pytest.approx([value for row in rloo for value in row])


def test_states_are_token_prefixes_wherever_the_others_steps_end() -> None:
    # the first response is one step and one of two tokens; the second is cut after every token
    group = make_group([("abc", True), ("abd", False)])
    group = replace(group, rollouts=[with_steps(group.rollouts[0], 2, 4), group.rollouts[1]])
    found = SharedPrefixes(leave_one_out=False)([group], make_experience([group]), NO_SAMPLER)
    assert found.state_values == [[0.5, 0.5, 1.0], [0.5, 0.5, 0.5, 0.0]]
    assert found.advantages[0, 1:].tolist() == [0.0, 0.0, 0.5, 0.5]


def test_the_value_at_the_end_is_the_rollouts_own_reward_though_another_goes_on() -> None:
    group = make_group([("ab", False), ("abc", True)])
    cut = replace(group.rollouts[0].trajectory, response_ids=[97, 98], finish_reason="length", step_ends=[1, 2])
    group = replace(group, rollouts=[Rollout(cut, [-1.0] * 2, 3), group.rollouts[1]])
    found = SharedPrefixes(leave_one_out=False)([group], make_experience([group]), NO_SAMPLER)
    assert found.state_values == [[0.5, 0.5, 0.0], [0.5, 0.5, 0.5, 1.0]]


def test_process_rewards_are_refused_by_values_of_whole_responses() -> None:
    group = replace(make_group([("ab", True), ("b", False)]), scores=[Score(1.0, [0.1, 0.2]), Score(0.0, [0.3])])
    with pytest.raises(BadInput, match="without process terms"):
        SharedPrefixes()([group], make_experience([group]), NO_SAMPLER)


class Words:
    """Words of three letters a or b, each drawn with a probability of its own after every prefix; right are those with
    two b or more."""

    def __init__(self) -> None:
        self.words = ["".join(letters) for letters in product("ab", repeat=3)]
        self.prefixes = sorted({word[:i] for word in self.words for i in range(3)})
        theta = torch.randn(len(self.prefixes), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        self.of_b = dict(zip(self.prefixes, torch.sigmoid(theta).tolist(), strict=True))
        self.share = dict.fromkeys(self.words, 1.0)
        for word in self.words:
            for i, letter in enumerate(word):
                of_b = self.of_b[word[:i]]
                self.share[word] *= of_b if letter == "b" else 1 - of_b

    def gradient(self, word: str, credit: Sequence[float]) -> torch.Tensor:
        """The policy gradient of one rollout by the logits of b, one after each prefix."""
        found = torch.zeros(len(self.prefixes), dtype=torch.float64)
        for i, letter in enumerate(word):
            found[self.prefixes.index(word[:i])] += credit[i] * (float(letter == "b") - self.of_b[word[:i]])
        return found

    def reward(self, word: str) -> float:
        return float(word.count("b") >= 2)

    def estimated(self, estimator: Any, size: int) -> tuple[torch.Tensor, float]:
        """(mean, total variance) of the gradient of a group over all groups of this size."""
        rows = []
        for words in product(self.words, repeat=size):
            share = float(torch.tensor([self.share[word] for word in words], dtype=torch.float64).prod())
            found = advantages(estimator, make_group([(word, self.reward(word) > 0) for word in words]))
            gradients = [self.gradient(word, row) for word, row in zip(words, found, strict=True)]
            rows.append((share, torch.stack(gradients).mean(0)))
        return moments(rows)


def test_values_from_shared_prefixes_have_the_exact_gradient_and_vary_less_with_a_prior() -> None:
    words = Words()
    rows = [words.share[word] * words.gradient(word, [words.reward(word)] * 3) for word in words.words]
    exact = torch.stack(rows).sum(0)
    variances = []
    for prior_weight in (0.0, 4.0):
        mean, variance = words.estimated(SharedPrefixes(prior_weight=prior_weight), 3)
        torch.testing.assert_close(mean, exact, rtol=0, atol=1e-6)
        variances.append(variance)
    assert variances[1] < 0.9 * variances[0]  # one or two rollouts alone make a noisy baseline
    # as published (n - 1) / n of it, n the rollouts that pass: E[n - 1 where n > 0] / E[n] of the exact gradient
    biased, _ = words.estimated(SharedPrefixes(leave_one_out=False), 3)
    through = [sum(words.share[word] for word in words.words if word.startswith(prefix)) for prefix in words.prefixes]
    kept = torch.tensor([1 - (1 - (1 - share) ** 3) / (3 * share) for share in through], dtype=torch.float64)
    assert kept.max() == pytest.approx(2 / 3)
    torch.testing.assert_close(biased, exact * kept, rtol=0, atol=1e-6)
