"""KL estimators, normalisers, value loss, whitening: by hand, or against an exact sum over a small vocabulary."""

import math
from typing import Any

import pytest
import torch

from espalier.data.records import BadInput
from espalier.rl.kl import KLController, bounded, check_kl, divergence, full_divergence
from espalier.rl.losses import (
    clipped_surrogate,
    importance_weights,
    is_driven_off,
    token_weights,
    value_loss,
    whiten,
    whiten_around_mean,
)
from espalier.runtime.schemas import KLConfig
from espalier.values.explained_variance import explained_variance

POLICY = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
REFERENCE = torch.tensor([0.25, 0.25, 0.3, 0.2], dtype=torch.float64)
EXACT = float((POLICY * (POLICY / REFERENCE).log()).sum())


def expected(kind: str) -> float:
    """The mean of an estimator over tokens drawn from the policy, without any sampling."""
    return float((POLICY * divergence(POLICY.log(), REFERENCE.log(), kind)).sum())


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind: str) -> None:
    assert expected(kind) == pytest.approx(EXACT, rel=1e-12)


def test_mse_and_abs_are_what_they_say() -> None:
    d = (POLICY / REFERENCE).log()
    assert expected("mse") == pytest.approx(float((POLICY * d * d / 2).sum()))
    assert expected("abs") == pytest.approx(float((POLICY * d.abs()).sum()))
    assert float(divergence(POLICY.log(), REFERENCE.log(), "k3").min()) >= 0


def test_all_estimators_agree_where_policies_are_near() -> None:
    near = POLICY * torch.tensor([1.01, 0.99, 1.0, 1.0], dtype=torch.float64)
    near = near / near.sum()
    exact = float((POLICY * (POLICY / near).log()).sum())
    for kind in ("k1", "mse", "k3"):
        assert float((POLICY * divergence(POLICY.log(), near.log(), kind)).sum()) == pytest.approx(exact, rel=0.02)


def test_full_is_the_exact_divergence_at_the_sampling_temperature() -> None:
    logits, reference = POLICY.log()[None, None] * 0.7, REFERENCE.log()[None, None] * 0.7
    assert float(full_divergence(logits, reference, temperature=0.7)) == pytest.approx(EXACT, rel=1e-6)


def gradient(kind: str) -> torch.Tensor:
    """The expected gradient of a KL term as a loss, with respect to the logits, over tokens drawn from the policy."""
    logits = POLICY.log().clone().requires_grad_()
    logprobs = torch.log_softmax(logits, dim=-1)
    if kind == "full":
        total = full_divergence(logits.double(), REFERENCE.log(), 1.0)
    else:
        total = (POLICY * divergence(logprobs, REFERENCE.log(), kind)).sum()
    return torch.autograd.grad(total, logits)[0]


def test_the_gradients_of_the_estimators_are_those_of_the_table() -> None:
    logits = POLICY.log().clone().requires_grad_()
    logprobs = torch.log_softmax(logits, dim=-1)
    forward = torch.autograd.grad((logprobs.exp() * (logprobs - REFERENCE.log())).sum(), logits)[0]
    torch.testing.assert_close(gradient("full"), forward, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradient("mse"), forward)
    torch.testing.assert_close(gradient("k1"), torch.zeros_like(forward), rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient("k3"), POLICY - REFERENCE)  # of KL(reference, policy)


def test_terms_of_tokens_are_kept_within_their_bounds() -> None:
    terms = torch.tensor([-3.0, -0.5, 0.0, 0.5, 3.0])
    assert torch.equal(bounded(terms, KLConfig()), terms)
    assert bounded(terms, KLConfig(max_token=2.0)).tolist() == [-2.0, -0.5, 0.0, 0.5, 2.0]
    assert bounded(terms, KLConfig(cuts_negative=True)).tolist() == [0.0, 0.0, 0.0, 0.5, 3.0]
    assert bounded(terms, KLConfig(max_token=2.0, cuts_negative=True)).tolist() == [0.0, 0.0, 0.0, 0.5, 2.0]


def test_a_fixed_coefficient_stays_and_an_adaptive_one_follows_its_target() -> None:
    fixed, adaptive = KLController(0.2, 0.0, 1000), KLController(0.2, 6.0, 1000)
    for controller in (fixed, adaptive):
        controller.update(kl_per_response=60.0, num_rollouts=100)  # far too far: the error is cut at 0.2
    assert fixed.coefficient == 0.2
    assert adaptive.coefficient == pytest.approx(0.2 * (1 + 0.2 * 100 / 1000))
    adaptive.update(kl_per_response=5.4, num_rollouts=100)
    assert adaptive.coefficient == pytest.approx(0.2 * 1.02 * (1 - 0.1 * 100 / 1000))


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (KLConfig(coefficient=0.1, kind="k1", place="loss"), "pulls nowhere"),
        (KLConfig(kind="k2"), "kl.kind"),
        (KLConfig(place="return"), "kl.place"),
        (KLConfig(coefficient=-1.0), "kl.coefficient"),
        (KLConfig(target=3.0), "must begin above 0"),
        (KLConfig(coefficient=0.1, cuts_negative=True), r"those of kl\.kind=k3 never are"),
        (KLConfig(kind="k1", place="reward", coefficient=0.0, cuts_negative=True), r"kl\.coefficient=0 has none"),
    ],
)
def test_kl_settings_without_sense_or_effect_are_refused(config: KLConfig, word: str) -> None:
    with pytest.raises(BadInput, match=word):
        check_kl(config)


def test_normalisers_by_hand() -> None:
    mask = torch.tensor([[True, True, True, True], [True, False, False, False]])
    assert token_weights(mask, "token", 8)[1] == 5
    weights, divisor = token_weights(mask, "sequence", 8)
    assert weights.tolist() == [[0.25] * 4, [1.0, 0, 0, 0]]
    assert divisor == 2
    assert token_weights(mask, "constant", 8)[1] == 16


def test_weights_multiply_a_tokens_loss() -> None:
    zeros, mask = torch.zeros(1, 2), torch.tensor([[True, True]])
    given = (zeros, zeros, torch.tensor([[2.0, 4.0]]), mask, 0.2, 0.2)
    assert float(clipped_surrogate(*given, weights=torch.tensor([[0.5, 0.25]]))[0]) == pytest.approx(-2.0)


def test_dual_clip_bounds_the_loss_of_a_ratio_that_exploded() -> None:
    new, old = torch.log(torch.tensor([[0.9]])), torch.log(torch.tensor([[0.09]]))  # ratio 10
    mask = torch.tensor([[True]])
    assert float(clipped_surrogate(new, old, torch.tensor([[-1.0]]), mask, 0.2, 0.2)[0]) == pytest.approx(10.0)
    assert float(clipped_surrogate(new, old, torch.tensor([[-1.0]]), mask, 0.2, 0.2, 3.0)[0]) == pytest.approx(3.0)
    assert float(clipped_surrogate(new, old, torch.tensor([[1.0]]), mask, 0.2, 0.2, 3.0)[0]) == pytest.approx(-1.2)


def test_importance_weights_are_truncated_above_alone() -> None:
    old, engine = torch.log(torch.tensor([0.9, 0.1])), torch.log(torch.tensor([0.3, 0.2]))
    mask = torch.tensor([True, True])
    weights, is_outside = importance_weights(old, engine, mask, cap=2.0)
    assert (weights.tolist(), is_outside.tolist()) == (pytest.approx([2.0, 0.5]), [True, False])


def test_importance_weights_are_clamped_on_both_sides_masked_or_of_a_whole_response() -> None:
    # ratios 3, 1/4, 1 in the first response, 2 and a padded token in the second
    engine = torch.log(torch.tensor([[0.1, 0.4, 0.5], [0.1, 0.3, 1.0]]))
    old = torch.log(torch.tensor([[0.3, 0.1, 0.5], [0.2, 0.9, 1.0]]))
    mask = torch.tensor([[True, True, True], [True, False, False]])

    def kept(*bounds: Any) -> list[float]:
        found: list[float] = importance_weights(old, engine, mask, *bounds)[0][mask].tolist()
        return found

    assert kept(2.0, 0.5) == pytest.approx([2.0, 0.5, 1.0, 2.0])
    assert kept(2.5, 0.5, "mask") == pytest.approx([0.0, 0.0, 1.0, 2.0])
    whole = (3 * 0.25 * 1) ** (1 / 3)
    assert kept(1.5, 0.5, "clamp", "sequence") == pytest.approx([whole] * 3 + [1.5])
    assert kept(1.5, 0.5, "mask", "sequence") == pytest.approx([whole] * 3 + [0.0])


def test_tokens_are_left_out_that_the_loss_drives_off_the_policy_that_drew_them() -> None:
    drawn_by = torch.tensor([[0.5, 0.5, 0.5, 0.5, 0.01, 0.6]])
    now = torch.tensor([[0.8, 0.8, 0.2, 0.2, 0.15, 0.9]])  # 0.01 to 0.15: fifteen times as likely, and near
    advantages = torch.tensor([[1.0, -1.0, -1.0, 1.0, 1.0, 0.0]])
    found = is_driven_off(torch.log(now), torch.log(drawn_by), advantages, 0.2)
    assert found.tolist() == [[True, False, True, False, False, False]]
    assert is_driven_off(torch.log(now), torch.log(drawn_by), advantages, 0.1).tolist() == [
        [True, False, True, False, True, False]
    ]
    assert not is_driven_off(torch.log(now), torch.log(drawn_by), advantages, 0.31).any()


def test_value_loss_takes_the_larger_of_the_two_errors() -> None:
    # old 0, target 1: V 0.5 clipped to 0.2 -> max(0.25, 0.64); V 0.1 unclipped -> 0.81; the third is masked
    values, old, returns = torch.tensor([[0.5, 0.1, 9.0]]), torch.zeros(1, 3), torch.ones(1, 3)
    mask = torch.tensor([[True, True, False]])
    total, clipped, count = value_loss(values, old, returns, mask, clip_range=0.2)
    assert float(total) == pytest.approx(0.5 * (0.64 + 0.81))
    assert (clipped, count) == (1, 2)
    assert float(value_loss(values, old, returns, mask, 0.0)[0]) == pytest.approx(0.5 * (0.25 + 0.81))


def test_explained_variance_of_a_perfect_a_constant_and_an_inverted_critic() -> None:
    returns = torch.tensor([0.0, 1.0, 2.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(torch.ones(3), returns) == pytest.approx(0.0)
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert explained_variance(returns - 2, returns) == 1.0  # wrong by a constant
    assert explained_variance(returns, torch.ones(3)) is None


def test_whitened_advantages_have_mean_zero_and_sample_variance_one_over_the_mask() -> None:
    mask = torch.tensor([[False, True, True], [False, True, False]])
    values = torch.tensor([[7.0, 1.0, 2.0], [7.0, 6.0, 7.0]]) * mask
    found = whiten(values, mask)
    std = math.sqrt((4 + 1 + 9) / 2)  # mean 3, n - 1 = 2
    torch.testing.assert_close(found, torch.tensor([[0.0, -2 / std, -1 / std], [0.0, 3 / std, 0.0]]))
    torch.testing.assert_close(whiten(values, mask, shifts_mean=False), values / std)


def test_rewards_whitened_around_their_mean_keep_it_and_have_sample_variance_one() -> None:
    mask = torch.tensor([[False, True, True], [False, True, False]])
    values = torch.tensor([[7.0, 1.0, 2.0], [7.0, 6.0, 7.0]])
    found = whiten_around_mean(values, mask)
    std = math.sqrt((4 + 1 + 9) / 2)  # mean 3, n - 1 = 2
    torch.testing.assert_close(found, torch.tensor([[0.0, 3 - 2 / std, 3 - 1 / std], [0.0, 3 + 3 / std, 0.0]]))
    assert float(found[mask].mean()) == pytest.approx(3.0)
    one = torch.zeros(2, 3, dtype=torch.bool)
    assert torch.equal(whiten_around_mean(values, one), values)
