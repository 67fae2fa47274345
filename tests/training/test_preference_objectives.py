"""Objectives of preferences by hand on two tiny pairs, against formulas in plain floats, and before the first step."""

import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.data.examples.token_examples import OutcomeExample
from espalier.data.records import BadInput
from espalier.models.load import load_policy, load_reference
from espalier.training.objectives.dpo import DirectPreference
from espalier.training.objectives.dpo_positive import PositivePreference
from espalier.training.objectives.dpo_robust import RobustPreference
from espalier.training.objectives.hinge import HingePreference
from espalier.training.objectives.implicit_ce import ImplicitCrossEntropy, implicit_ce_losses
from espalier.training.objectives.ipo import IdentityPreference
from espalier.training.objectives.kto import KahnemanTversky, kto_losses
from espalier.training.objectives.nca import NoiseContrastive
from espalier.training.objectives.preference import PairObjective, PreferenceLogprobs
from tests.support.objective_cases import (
    OUTCOMES,
    PADDED,
    PAIR_OBJECTIVES,
    PAIRS,
    SIDES,
    Fixed,
    random_logits,
    sigmoid,
    token_logprobs,
)
from tests.support.slow import slow_unless

# Two pairs with d = 2 and d = -2; the chosen side of the second has sunk 1 below the reference.
BY_HAND = PreferenceLogprobs(
    chosen=torch.tensor([-2.0, -5.0]),
    rejected=torch.tensor([-4.0, -1.0]),
    reference_chosen=torch.tensor([-3.0, -4.0]),
    reference_rejected=torch.tensor([-3.0, -2.0]),
)


def nls(x: float) -> float:
    """-log sigmoid(x)."""
    return math.log(1 + math.exp(-x))


@pytest.mark.parametrize(
    ("objective", "want"),
    [
        # beta d is 1 and -1 everywhere.
        (DirectPreference(None, 0.5), [nls(1), nls(-1)]),
        (DirectPreference(None, 0.5, label_smoothing=0.1),
         [0.9 * nls(1) + 0.1 * nls(-1), 0.9 * nls(-1) + 0.1 * nls(1)]),
        (DirectPreference(None, 0.5, target_margin=1.0), [nls(0), nls(-2)]),
        (RobustPreference(None, 0.5, flip_rate=0.2),
         [(0.8 * nls(1) - 0.2 * nls(-1)) / 0.6, (0.8 * nls(-1) - 0.2 * nls(1)) / 0.6]),
        (IdentityPreference(None, 0.5), [1.0, 9.0]),  # the target is 1
        (HingePreference(None, 0.5), [0.0, 2.0]),
        # The penalty is 0 and 1: z = 0.5 * (2 - 0) and 0.5 * (-2 - 3 * 1).
        (PositivePreference(True, 0.5, penalty=3.0), [nls(1), nls(-2.5)]),
    ],
    ids=["sigmoid", "conservative", "target margin", "robust", "identity", "hinge", "positive"],
)  # fmt: skip
def test_the_losses_of_two_pairs_by_hand(objective: PairObjective, want: list[float]) -> None:
    torch.testing.assert_close(objective.pair_losses(BY_HAND), torch.tensor(want))


def formula(name: str) -> Callable[[float, float], float]:
    """loss(d, the chosen side's log-ratio), in plain floats, for `PAIR_OBJECTIVES`."""
    b = 0.5
    formulas: dict[str, Callable[[float, float], float]] = {
        "dpo": lambda d, w: -math.log(sigmoid(b * d)),
        "dpo with sft": lambda d, w: -math.log(sigmoid(b * d)),
        "cdpo": lambda d, w: -0.9 * math.log(sigmoid(b * d)) - 0.1 * math.log(sigmoid(-b * d)),
        "length normalised": lambda d, w: -math.log(sigmoid(2.0 * d)),
        "robust": lambda d, w: (-0.8 * math.log(sigmoid(b * d)) + 0.2 * math.log(1 - sigmoid(b * d))) / 0.6,
        "ipo": lambda d, w: (d - 2.5) ** 2,
        "hinge": lambda d, w: max(0.0, 1 - b * d),
        "nca": lambda d, w: (
            -math.log(sigmoid(b * w)) - 0.5 * (math.log(sigmoid(-b * w)) + math.log(sigmoid(-b * (w - d))))
        ),
        "positive": lambda d, w: (
            -0.95 * math.log(sigmoid(b * (d - 3 * max(0.0, -w))))
            - 0.05 * math.log(sigmoid(-b * (d - 3 * max(0.0, -w))))
        ),
    }
    return formulas[name]


@pytest.mark.parametrize("name", PAIR_OBJECTIVES)
def test_a_preference_loss_agrees_with_its_formula_in_float64(name: str) -> None:
    policy, reference = random_logits(4, 5, 10), random_logits(4, 5, 10, seed=1)
    objective = PAIR_OBJECTIVES[name](Fixed(reference))
    pi = [token_logprobs(policy[i], *side) for i, side in enumerate(SIDES)]
    ref = [token_logprobs(reference[i], *side) for i, side in enumerate(SIDES)]
    shares = [len(row) if objective.is_length_normalised else 1 for row in pi]
    ratios = [(sum(p) - sum(r)) / share for p, r, share in zip(pi, ref, shares, strict=True)]
    d = [ratios[0] - ratios[1], ratios[2] - ratios[3]]
    want = sum(formula(name)(d[k], ratios[2 * k]) for k in (0, 1))
    want -= objective.sft_weight * (sum(pi[0]) / 3 + sum(pi[2]) / 2)
    batch = objective.collate(PAIRS, PADDED)
    loss = objective.loss(Fixed(policy), batch)
    assert objective.count(batch) == 2.0
    assert float(loss.total) == pytest.approx(want, abs=1e-5, rel=1e-6)
    margins = [objective.beta * value for value in d]
    metrics = loss.metrics
    assert metrics["margin"] == (pytest.approx(sum(margins), abs=1e-5), 2.0)
    assert metrics["accuracy"] == (sum(margin > 0 for margin in margins), 2.0)
    assert metrics["chosen_reward"] == (pytest.approx(objective.beta * (ratios[0] + ratios[2]), abs=1e-5), 2.0)
    assert metrics["rejected_reward"] == (pytest.approx(objective.beta * (ratios[1] + ratios[3]), abs=1e-5), 2.0)
    assert metrics["chosen_logprob"] == (pytest.approx(sum(pi[0]) + sum(pi[2]), abs=1e-4), 2.0)
    assert metrics["rejected_logprob"] == (pytest.approx(sum(pi[1]) + sum(pi[3]), abs=1e-4), 2.0)
    assert metrics["likelier"] == (float(sum(pi[0]) > sum(pi[1])) + float(sum(pi[2]) > sum(pi[3])), 2.0)


def test_reference_free_means_with_a_target_margin_are_simpo() -> None:
    policy = random_logits(4, 5, 10)
    objective = DirectPreference(None, beta=2.0, is_length_normalised=True, target_margin=1.0)
    pi = [token_logprobs(policy[i], *side) for i, side in enumerate(SIDES)]
    means = [sum(row) / len(row) for row in pi]
    want = sum(-math.log(sigmoid(2.0 * (means[k] - means[k + 1]) - 1.0)) for k in (0, 2))
    loss = objective.loss(Fixed(policy), objective.collate(PAIRS, PADDED))
    assert float(loss.total) == pytest.approx(want, abs=1e-5)
    assert loss.metrics["chosen_reward"] == (pytest.approx(2 * (means[0] + means[2]), abs=1e-5), 2.0)


def test_a_temperature_divides_the_logits_of_policy_and_reference() -> None:
    policy, reference = random_logits(4, 5, 10), random_logits(4, 5, 10, seed=1)
    hot = DirectPreference(Fixed(reference), 0.5, temperature=0.6)
    cold = DirectPreference(Fixed(reference / 0.6), 0.5)
    batch = hot.collate(PAIRS, PADDED)
    want = cold.loss(Fixed(policy / 0.6), batch)
    assert float(hot.loss(Fixed(policy), batch).total) == pytest.approx(float(want.total), abs=1e-5)
    unpaired, scaled = KahnemanTversky(Fixed(reference), temperature=0.6), KahnemanTversky(Fixed(reference / 0.6))
    batch = unpaired.collate(OUTCOMES, PADDED)
    assert unpaired.measure(Fixed(policy), batch)[0] == pytest.approx(
        scaled.measure(Fixed(policy / 0.6), batch)[0], abs=1e-5
    )


@pytest.mark.parametrize("flip_rate", [0.1, 0.3])
def test_robust_dpo_is_unbiased_under_flipped_labels(flip_rate: float) -> None:
    objective = RobustPreference(None, 0.5, flip_rate=flip_rate)
    flipped = PreferenceLogprobs(BY_HAND.rejected, BY_HAND.chosen, BY_HAND.reference_rejected, BY_HAND.reference_chosen)
    mean = (1 - flip_rate) * objective.pair_losses(BY_HAND) + flip_rate * objective.pair_losses(flipped)
    torch.testing.assert_close(mean, DirectPreference(None, 0.5).pair_losses(BY_HAND))


@pytest.mark.parametrize(
    ("name", "is_training"),
    slow_unless(lambda case: not case[1] or case[0] == "dpo", product(PAIR_OBJECTIVES, [False, True])),
)
def test_margins_are_exactly_zero_before_the_first_step(name: str, is_training: bool, tiny_policy: Path) -> None:
    model = load_policy(str(tiny_policy)).train(is_training)
    objective = PAIR_OBJECTIVES[name](load_reference(str(tiny_policy)))
    loss = objective.loss(model, objective.collate(PAIRS, PADDED))
    assert loss.metrics["margin"] == loss.metrics["chosen_reward"] == loss.metrics["rejected_reward"] == (0.0, 2.0)
    assert loss.metrics["margin|square"] == (0.0, 2.0)
    assert loss.total.requires_grad
    if name in ("dpo", "cdpo", "length normalised", "positive"):
        assert float(loss.total.detach()) == pytest.approx(2 * math.log(2), abs=1e-6)


@pytest.mark.parametrize("name", PAIR_OBJECTIVES)
def test_the_gradient_of_a_preference_loss_is_its_slope(name: str) -> None:
    objective = PAIR_OBJECTIVES[name](Fixed(random_logits(4, 5, 10, seed=1)))
    # 1.2 times as long, so that no pair stands where the hinge bends.
    sides = [(1.2 * value).double().requires_grad_() for value in (BY_HAND.chosen, BY_HAND.rejected)]
    rest = (BY_HAND.reference_chosen.double(), BY_HAND.reference_rejected.double())
    assert torch.autograd.gradcheck(lambda c, r: objective.pair_losses(PreferenceLogprobs(c, r, *rest)), sides)


def test_only_response_tokens_carry_a_preference_gradient() -> None:
    logits = random_logits(4, 5, 10).requires_grad_()
    objective = DirectPreference(None, 0.5)
    objective.loss(Fixed(logits), objective.collate(PAIRS, PADDED)).total.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    where = [[bool(value) for value in row] for row in logits.grad.abs().sum(-1) > 0]
    read = [range(start - 1, len(ids) - 1) for ids, start in SIDES]
    assert where == [[t in span for t in range(5)] for span in read]


def test_the_reference_gets_no_gradient(tiny_policy: Path) -> None:
    reference = load_policy(str(tiny_policy))
    objective = DirectPreference(reference)
    model = load_policy(str(tiny_policy))
    objective.loss(model, objective.collate(PAIRS, PADDED)).total.backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is None for parameter in reference.parameters())


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: DirectPreference(None, beta=0.0), "objective.beta must be above 0, got 0.0"),
        (lambda: DirectPreference(None, sft_weight=-1.0), "objective.sft_weight must be at least 0"),
        (lambda: DirectPreference(None, label_smoothing=0.5), r"objective.label_smoothing must be in \[0, 0.5\)"),
        (lambda: RobustPreference(None, flip_rate=0.5), r"objective.flip_rate must be in \[0, 0.5\), got 0.5"),
        (lambda: PositivePreference(None), "DPO-positive compares with a reference: set objective.reference"),
        (lambda: PositivePreference(True, penalty=-1.0), "objective.penalty must be at least 0"),
        (lambda: KahnemanTversky(None, desirable_weight=-1.0), "objective.desirable_weight must be at least 0"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(BadInput, match=text):
        make()


def test_kto_of_two_responses_by_hand() -> None:
    # beta (r - z0) is 1 for the desirable one, beta (z0 - r) is -1 for the undesirable one.
    losses = kto_losses(torch.tensor([3.0, 3.0]), torch.tensor([1.0, 0.0]), 1.0, 0.5, (1.0, 1.5))
    torch.testing.assert_close(losses, torch.tensor([1 - sigmoid(1), 1.5 * (1 - sigmoid(-1))]))
    mixed = kto_losses(torch.tensor([3.0]), torch.tensor([0.25]), 1.0, 0.5, (1.0, 1.5))
    torch.testing.assert_close(mixed, (0.25 * losses[:1] + 0.75 * losses[1:]))


def test_kto_agrees_with_its_formula_and_measures_mismatched_responses() -> None:
    policy, reference = random_logits(4, 5, 10), random_logits(4, 5, 10, seed=1)
    objective = KahnemanTversky(Fixed(reference), 0.5, 1.0, 1.5)
    batch = objective.collate(OUTCOMES, PADDED)
    assert batch.mismatched is not None
    assert batch.ids.tolist() == [[5, 6, 7, 8], [9, 4, 3, 0]]
    assert batch.mismatched.ids.tolist() == [[5, 6, 3, 2, 1], [9, 7, 0, 0, 0]]

    def ratio(row: int, ids: list[int], start: int) -> float:
        return sum(token_logprobs(policy[row], ids, start)) - sum(token_logprobs(reference[row], ids, start))

    # A model of given logits knows no rows: the mismatched ones are the first rows of their own forward pass.
    mismatched = ratio(0, [5, 6, 3, 2, 1], 2) + ratio(1, [9, 7], 1)
    assert objective.measure(Fixed(policy), batch) == (pytest.approx(mismatched, abs=1e-5), 2.0)
    good, bad = ratio(0, [5, 6, 7, 8], 2), ratio(1, [9, 4, 3], 1)
    for step_mean, baseline in ((0.7, 0.7), (-0.7, 0.0)):
        objective.step_mean = step_mean
        want = 1 - sigmoid(0.5 * (good - baseline)) + 2 * 1.5 * (1 - sigmoid(0.5 * (baseline - bad)))
        loss = objective.loss(Fixed(policy), batch)
        assert float(loss.total) == pytest.approx(want, abs=1e-5)  # the second example weighs 2
        assert loss.metrics["baseline"] == (2 * baseline, 2.0)
        assert loss.metrics["accuracy"] == (float(good > baseline) + float(bad <= baseline), 2.0)
    assert objective.count(batch) == 3.0
    assert loss.metrics["desirable_reward"] == (pytest.approx(0.5 * good, abs=1e-5), 1.0)
    assert loss.metrics["margin|minus"] == (pytest.approx(0.5 * bad, abs=1e-5), 1.0)


def test_kto_starts_at_one_half_with_a_baseline_of_exactly_zero(tiny_policy: Path) -> None:
    model, reference = load_policy(str(tiny_policy)), load_reference(str(tiny_policy))
    objective = KahnemanTversky(reference)
    batch = objective.collate(OUTCOMES, PADDED)
    assert objective.measure(model, batch) == (0.0, 2.0)
    loss = objective.loss(model, batch)
    assert float(loss.total.detach()) == pytest.approx(0.5 + 2 * 0.5, abs=1e-6)
    assert loss.metrics["desirable_reward"] == loss.metrics["undesirable_reward"] == (0.0, 1.0)


def test_kto_without_mismatched_responses_says_what_to_set() -> None:
    example = OutcomeExample("a", [5, 6, 7], 2, 1.0)
    with pytest.raises(BadInput, match=r"'a' has no response to another prompt: set examples.has_mismatched=true"):
        KahnemanTversky(None).collate([example], PADDED)
    objective = KahnemanTversky(None, has_baseline=False)
    batch = objective.collate([example], PADDED)
    assert batch.ids.shape == (1, 3)
    assert objective.measure(None, batch) == (0.0, 0.0)


def test_implicit_ce_of_three_responses_by_hand() -> None:
    losses = implicit_ce_losses(torch.tensor([2.0, 2.0, -200.0]), torch.tensor([1.0, 0.25, 1.0]))
    mixed = -0.25 * math.log(sigmoid(2)) - 0.75 * math.log(sigmoid(-2))  # and no sigmoid rounds to 0
    torch.testing.assert_close(losses, torch.tensor([-math.log(sigmoid(2)), mixed, 200.0]))


def test_implicit_ce_agrees_with_its_formula_and_says_how_often_the_sign_is_right() -> None:
    policy, reference = random_logits(2, 4, 10), random_logits(2, 4, 10, seed=1)
    objective = ImplicitCrossEntropy(Fixed(reference), beta=0.5)
    batch = objective.collate(OUTCOMES, PADDED)
    good, bad = (
        0.5 * (sum(token_logprobs(policy[row], ids, start)) - sum(token_logprobs(reference[row], ids, start)))
        for row, ids, start in ((0, [5, 6, 7, 8], 2), (1, [9, 4, 3], 1))
    )
    loss = objective.loss(Fixed(policy), batch)
    want = -math.log(sigmoid(good)) - 2 * math.log(sigmoid(-bad))  # the second example weighs 2
    assert float(loss.total) == pytest.approx(want, abs=1e-5)
    assert objective.count(batch) == 3.0
    assert loss.metrics["accuracy"] == (float(good > 0) + float(bad <= 0), 2.0)
    assert loss.metrics["margin|plus"] == (pytest.approx(good, abs=1e-5), 1.0)
    assert loss.metrics["undesirable_reward"] == (pytest.approx(bad, abs=1e-5), 1.0)


def test_nca_of_a_pair_by_hand_and_its_gradient_keeps_the_chosen_side_likely() -> None:
    sides = [torch.tensor([value], requires_grad=True) for value in (2.0, 4.0)]  # rewards 1 and 2 with beta 0.5
    pairs = PreferenceLogprobs(sides[0], sides[1], torch.zeros(1), torch.zeros(1))
    objective = NoiseContrastive(None, beta=0.5)
    losses = objective.pair_losses(pairs)
    want = -math.log(sigmoid(1)) - 0.5 * (math.log(sigmoid(-1)) + math.log(sigmoid(-2)))
    assert losses.tolist() == [pytest.approx(want, abs=1e-6)]
    losses.sum().backward()
    assert float(sides[0].grad) == pytest.approx(0.5 * (-sigmoid(-1) + 0.5 * sigmoid(1)), abs=1e-6)
    assert float(sides[1].grad) == pytest.approx(0.5 * 0.5 * sigmoid(2), abs=1e-6)
    assert objective.pair_metrics(pairs)["sign_accuracy"] == (1.0, 2.0)  # the rejected side is above 0
