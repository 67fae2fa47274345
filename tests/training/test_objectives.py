"""Objectives of one sequence at a time by hand on two tiny examples; all objectives on the tiny model."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.data.examples.step_examples import prefix_examples
from espalier.data.examples.token_examples import StepExample, TokenExample
from espalier.data.records import BadInput
from espalier.models.scalar_head import load_process_reward
from espalier.training.objectives.bradley_terry import BradleyTerry
from espalier.training.objectives.objective import calibration, with_deviation
from espalier.training.objectives.outcome_reward import OutcomeRewardObjective
from espalier.training.objectives.preference import unpaired_metrics
from espalier.training.objectives.process_reward import ProcessRewardObjective
from espalier.training.objectives.scalar_targets import class_targets
from espalier.training.objectives.sft import SupervisedFineTuning
from espalier.training.sums import Sums, finish_metrics
from tests.support.objective_cases import (
    BATCH_CASES,
    DEMONSTRATIONS,
    OBJECTIVES,
    OUTCOMES,
    PADDED,
    PAIRS,
    STEPS,
    Fixed,
    case,
    log_softmax,
    random_logits,
    sigmoid,
    token_logprobs,
)


@pytest.mark.parametrize(("reduction", "count"), [("token", 4.0), ("sequence", 2.0), ("batch", 2.0)])
def test_sft_is_the_weighted_cross_entropy_of_response_tokens(reduction: str, count: float) -> None:
    logits = random_logits(2, 4, 10)
    objective = SupervisedFineTuning(reduction)
    batch = objective.collate(DEMONSTRATIONS, PADDED)
    first = token_logprobs(logits[0], [5, 6, 7, 8], 2)
    second = token_logprobs(logits[1], [9, 4, 3], 1)  # weights 1/2 and -2
    shares = (2, 2) if reduction == "sequence" else (1, 1)
    want = -sum(first) / shares[0] - (0.5 * second[0] - 2.0 * second[1]) / shares[1]
    loss = objective.loss(Fixed(logits), batch)
    assert objective.count(batch) == count
    assert float(loss.total) == pytest.approx(want, abs=1e-5)
    assert loss.metrics["logprob"] == (pytest.approx(sum(first) + sum(second), abs=1e-5), 4.0)
    assert loss.metrics["entropy"][1] == 4.0


def test_sft_of_uniform_logits_is_log_of_the_vocabulary_a_token() -> None:
    objective = SupervisedFineTuning()
    batch = objective.collate([DEMONSTRATIONS[0], replace(DEMONSTRATIONS[1], weights=[])], PADDED)
    loss = objective.loss(Fixed(torch.zeros(2, 4, 10)), batch)
    assert float(loss.total) == pytest.approx(4 * math.log(10), abs=1e-5)
    assert loss.metrics["entropy"] == (pytest.approx(4 * math.log(10), abs=1e-5), 4.0)


def test_a_token_of_weight_0_is_masked_and_not_counted() -> None:
    logits = random_logits(1, 5, 10)
    batches = []
    for reduction in ("token", "sequence"):
        objective = SupervisedFineTuning(reduction)
        batch = objective.collate([TokenExample("a", [5, 6, 7, 8, 3], 2, [1.0, 0.0, 1.0])], PADDED)
        batches.append((objective.count(batch), float(objective.loss(Fixed(logits), batch).total)))
    logprobs = token_logprobs(logits[0], [5, 6, 7, 8, 3], 2)
    total = -(logprobs[0] + logprobs[2])
    assert batches == [(2.0, pytest.approx(total, abs=1e-5)), (1.0, pytest.approx(total / 2, abs=1e-5))]


def test_an_example_without_a_response_counts_nothing() -> None:
    empty = TokenExample("e", [5, 6], 2)
    for reduction in ("token", "sequence", "batch"):
        objective = SupervisedFineTuning(reduction)
        batch = objective.collate([empty], PADDED)
        assert objective.count(batch) == 0.0
        assert float(objective.loss(Fixed(random_logits(1, 2, 10)), batch).total) == 0.0


def test_a_temperature_divides_the_logits_of_sft() -> None:
    logits = random_logits(2, 4, 10)
    batch = SupervisedFineTuning().collate(DEMONSTRATIONS, PADDED)
    want = float(SupervisedFineTuning().loss(Fixed(logits / 0.6), batch).total)
    assert float(SupervisedFineTuning(temperature=0.6).loss(Fixed(logits), batch).total) == pytest.approx(
        want, abs=1e-5
    )
    with pytest.raises(BadInput, match=r"objective.temperature must be above 0"):
        SupervisedFineTuning(temperature=0.0)


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(BadInput, match=r"loss_aggregation must be token, sequence or batch, got 'mean'"):
        SupervisedFineTuning("mean")


def test_soft_labels_are_binary_cross_entropy_with_the_value() -> None:
    # Scores 3/4, 1/5 and 1/2 against the values 1, 1/4 (of weight 2) and 1/2.
    logits = torch.full((2, 4, 1), 9.0)
    logits[0, 1], logits[0, 3], logits[1, 1] = math.log(3), -math.log(4), 0.0
    objective = ProcessRewardObjective()
    batch = objective.collate(STEPS, PADDED)
    loss = objective.loss(Fixed(logits), batch)
    want = -math.log(3 / 4) - 2 * (0.25 * math.log(1 / 5) + 0.75 * math.log(4 / 5)) + math.log(2)
    assert objective.count(batch) == 4.0
    assert float(loss.total) == pytest.approx(want, abs=1e-6)
    assert loss.metrics["value_mae"] == (pytest.approx(0.25 + 0.05 + 0.0, abs=1e-6), 3.0)
    assert loss.metrics["brier"] == (pytest.approx(0.0625 + 0.0025, abs=1e-6), 3.0)
    assert loss.metrics["accuracy"] == (3.0, 3.0)
    assert loss.metrics["score"] == (pytest.approx(1.45, abs=1e-6), 3.0)
    assert loss.metrics["value"] == (pytest.approx(1.75, abs=1e-6), 3.0)


def test_hard_labels_say_whether_the_value_is_above_the_threshold() -> None:
    logits = random_logits(2, 4, 1)
    batch = ProcessRewardObjective().collate(STEPS, PADDED)
    for threshold, labels in ((0.0, (1, 1, 1)), (0.25, (1, 0, 1)), (0.5, (1, 0, 0))):
        want = 0.0
        for (row, place), label, weight in zip(((0, 1), (0, 3), (1, 1)), labels, (1, 2, 1), strict=True):
            score = sigmoid(float(logits[row, place]))
            want -= weight * math.log(score if label else 1 - score)
        assert float(ProcessRewardObjective(threshold).loss(Fixed(logits), batch).total) == pytest.approx(
            want, abs=1e-5
        )
    with pytest.raises(BadInput, match=r"hard_above must be null \(soft labels\) or in \[0, 1\), got 1.0"):
        ProcessRewardObjective(1.0)


def test_classes_are_cross_entropy_with_the_number_of_right_completions() -> None:
    # K = 4: the values 1, 1/4 and 1/2 are the classes 4, 1 and 2.
    logits = random_logits(2, 4, 5)
    objective = ProcessRewardObjective()
    loss = objective.loss(Fixed(logits), objective.collate(STEPS, PADDED))
    want = 0.0
    for row, position, label, weight in ((0, 1, 4, 1), (0, 3, 1, 2), (1, 1, 2, 1)):
        want -= weight * log_softmax(logits[row, position])[label]
    assert float(loss.total) == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("num_labels", [2, 3, 4, 5, 9])
def test_class_targets_keep_the_value_and_use_at_most_two_neighbours(num_labels: int) -> None:
    values = torch.tensor([0.0, 0.125, 1 / 3, 0.5, 2 / 3, 0.875, 1.0])
    targets = class_targets(values, num_labels)
    classes = torch.arange(num_labels) / (num_labels - 1)
    torch.testing.assert_close((targets * classes).sum(-1), values, rtol=0, atol=1e-5)
    torch.testing.assert_close(targets.sum(-1), torch.ones(7))
    assert int((targets > 0).sum(-1).max()) <= 2
    for number in range(num_labels):  # a number of completions is its class and no other
        one = class_targets(torch.tensor([number / (num_labels - 1)]), num_labels)[0]
        assert one.tolist() == [float(index == number) for index in range(num_labels)]


@pytest.mark.parametrize("num_labels", [1, 5])
def test_a_value_of_0_875_trains_as_0_875(num_labels: int, tiny_policy: Path) -> None:
    objective, model = ProcessRewardObjective(), load_process_reward(str(tiny_policy), num_labels)
    batch = objective.collate([StepExample("a", [5, 6, 7, 8], [3], [0.875])], PADDED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(60):
        loss = objective.loss(model, batch)
        loss.total.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    assert objective.loss(model, batch).metrics["score"][0] == pytest.approx(0.875, abs=0.01)


def test_what_is_not_a_step_end_carries_no_process_reward() -> None:
    logits = torch.zeros(2, 4, 1, requires_grad=True)
    objective = ProcessRewardObjective()
    objective.loss(Fixed(logits), objective.collate(STEPS, PADDED)).total.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    where = logits.grad.squeeze(-1).nonzero().tolist()
    assert where == [[0, 1], [0, 3]]  # the third value is 1/2, where the gradient at a score of 1/2 is 0


@pytest.mark.parametrize("num_labels", [1, 5])
def test_one_pass_over_all_steps_equals_a_pass_for_each_prefix(num_labels: int, tiny_policy: Path) -> None:
    objective = ProcessRewardObjective()
    found = []
    for examples in (STEPS, [part for example in STEPS for part in prefix_examples(example)]):
        model = load_process_reward(str(tiny_policy), num_labels)
        torch.nn.init.normal_(model.score.weight, std=0.1, generator=torch.Generator().manual_seed(0))
        batch = objective.collate(examples, PADDED)
        loss = objective.loss(model, batch)
        loss.total.backward()  # type: ignore[no-untyped-call]
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        found.append((objective.count(batch), float(loss.total.detach()), gradients))
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-5)
    for one, other in zip(found[0][2], found[1][2], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_outcomes_are_read_at_the_last_token() -> None:
    logits = random_logits(2, 4, 1)
    objective = OutcomeRewardObjective()
    batch = objective.collate([OUTCOMES[0], replace(OUTCOMES[1], value=0.25)], PADDED)
    first, second = sigmoid(float(logits[0, 3])), sigmoid(float(logits[1, 2]))
    want = -math.log(first) - 2 * (0.25 * math.log(second) + 0.75 * math.log(1 - second))
    assert objective.count(batch) == 3.0  # the second example weighs 2
    assert float(objective.loss(Fixed(logits), batch).total) == pytest.approx(want, abs=1e-5)


def test_a_two_class_outcome_model_is_cross_entropy() -> None:
    logits = random_logits(2, 4, 2)
    objective = OutcomeRewardObjective()
    want = -log_softmax(logits[0, 3])[1] - 2 * log_softmax(logits[1, 2])[0]
    assert float(objective.loss(Fixed(logits), objective.collate(OUTCOMES, PADDED)).total) == pytest.approx(
        want, abs=1e-5
    )


@pytest.mark.parametrize(
    ("margin_scale", "label_smoothing", "centring"), [(0, 0, 0), (2, 0, 0), (0, 0.2, 0), (0, 0, 0.3), (1, 0.1, 0.01)]
)
def test_bradley_terry_agrees_with_the_formula(margin_scale: float, label_smoothing: float, centring: float) -> None:
    logits = random_logits(4, 5, 1)
    chosen = [float(logits[0, 4].double()), float(logits[2, 2].double())]
    rejected = [float(logits[1, 2].double()), float(logits[3, 2].double())]
    want = 0.0
    for c, r, margin in zip(chosen, rejected, (0.5, 0.25), strict=True):
        s = c - r - margin_scale * margin
        want -= (1 - label_smoothing) * math.log(sigmoid(s)) + label_smoothing * math.log(sigmoid(-s))
        want += centring * (c + r) ** 2
    objective = BradleyTerry(margin_scale, label_smoothing, centring)
    batch = objective.collate(PAIRS, PADDED)
    loss = objective.loss(Fixed(logits), batch)
    assert objective.count(batch) == 2.0
    assert float(loss.total) == pytest.approx(want, abs=1e-5)
    margins = [c - r for c, r in zip(chosen, rejected, strict=True)]
    assert loss.metrics["margin"] == (pytest.approx(sum(margins), abs=1e-5), 2.0)
    assert loss.metrics["accuracy"] == (sum(margin > 0 for margin in margins), 2.0)
    assert loss.metrics["chosen_reward"] == (pytest.approx(sum(chosen), abs=1e-5), 2.0)
    assert loss.metrics["reward|square"][1] == 4.0


def test_bradley_terry_of_equal_rewards_is_log_2_and_a_tie_is_not_right() -> None:
    loss = BradleyTerry().loss(Fixed(torch.zeros(4, 5, 1)), BradleyTerry().collate(PAIRS, PADDED))
    assert float(loss.total) == pytest.approx(2 * math.log(2), abs=1e-6)
    assert loss.metrics["accuracy"] == (0.0, 2.0)


def test_pairs_do_not_train_a_model_of_classes() -> None:
    with pytest.raises(BadInput, match=r"one label, not 2: set model.num_labels=1"):
        BradleyTerry().loss(Fixed(torch.zeros(4, 5, 2)), BradleyTerry().collate(PAIRS, PADDED))
    with pytest.raises(BadInput, match=r"label_smoothing must be in \[0, 0.5\)"):
        BradleyTerry(label_smoothing=0.5)


def test_calibration_error_is_the_gap_in_each_bin() -> None:
    # Bin 0: 0.05 against 0; bin 7: 0.75 and 0.8, its upper border, against 0 and 1: the gaps 0.75 and -0.2 add to 0.55.
    metrics = calibration(torch.tensor([0.05, 0.75, 0.8, 1.0]), torch.tensor([0.0, 0.0, 1.0, 1.0]))
    assert len(metrics) == 10
    means = {name: total / count for name, (total, count) in metrics.items()}
    assert finish_metrics(means) == {"calibration_error": pytest.approx((0.05 + 0.55 + 0.0) / 4, abs=1e-6)}


def test_deviations_and_differences_are_finished_from_their_parts() -> None:
    metrics = with_deviation("margin", torch.tensor([1.0, 3.0, 5.0]))
    means = {name: total / count for name, (total, count) in metrics.items()}
    assert finish_metrics(means) == {"margin": 3.0, "margin_std": pytest.approx(math.sqrt(8 / 3), abs=1e-6)}
    assert finish_metrics({"x|plus": 3.0, "x|minus": 1.0, "loss": 2.0}) == {"x": 2.0, "loss": 2.0}
    for side in ("plus", "minus"):
        assert finish_metrics({f"x|{side}": 3.0, "loss": 2.0}) == {"loss": 2.0}


def test_what_nobody_counted_has_no_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards, is_said = torch.tensor([2.0, -3.0, -4.0]), torch.tensor([True, False, False])
    bad = unpaired_metrics(rewards, is_said, torch.zeros(3))
    both = unpaired_metrics(rewards, is_said, torch.tensor([1.0, 0.0, 0.0]))
    sums = Sums()
    sums.add(bad)
    assert sums.means() == {"undesirable_reward": pytest.approx(-5 / 3), "accuracy": pytest.approx(2 / 3)}
    sums.add(both)
    assert sums.means() == {
        "desirable_reward": 2.0,
        "undesirable_reward": pytest.approx(-12 / 5),
        "margin": pytest.approx(2 + 12 / 5),
        "accuracy": pytest.approx(5 / 6),
    }
    want, alone = sums.means(), Sums()
    alone.add(bad)
    other = [value for name in sorted(both) for value in both[name]]  # another rank's
    monkeypatch.setattr(
        "espalier.training.sums.sum_over_ranks", lambda own: [a + b for a, b in zip(own, other, strict=True)]
    )
    assert alone.means() == want


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_loss_falls_within_a_few_steps(name: str, tiny_policy: Path) -> None:
    objective, model, examples = case(name, tiny_policy)
    if name == "sft token":  # with weights below 0 there is no lower bound to fall to
        examples = [replace(example, weights=[]) for example in examples]
    batch = objective.collate(examples, PADDED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: list[float] = []
    for _ in range(8):
        loss = objective.loss(model, batch)
        losses.append(float(loss.total.detach()))
        loss.total.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.1 * abs(losses[0]), losses


@pytest.mark.parametrize("name", BATCH_CASES)
def test_a_loss_is_a_sum_and_its_count_adds_up(name: str, tiny_policy: Path) -> None:
    objective, model, examples = case(name, tiny_policy)
    model.eval()
    together = objective.collate(examples, PADDED)
    apart = [objective.collate([example], PADDED) for example in examples]
    with torch.no_grad():
        whole = objective.loss(model, together)
        parts = [objective.loss(model, batch) for batch in apart]
    assert float(whole.total) == pytest.approx(sum(float(part.total) for part in parts), abs=1e-5)
    assert objective.count(together) == sum(objective.count(batch) for batch in apart)
    for metric, (total, count) in whole.metrics.items():
        assert total == pytest.approx(sum(part.metrics[metric][0] for part in parts), abs=1e-4)
        assert count == sum(part.metrics[metric][1] for part in parts)


def gradient(objective: Any, model: Any, examples: list[Any]) -> list[torch.Tensor]:
    model.zero_grad()
    objective.loss(model, objective.collate(examples, PADDED)).total.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("name", BATCH_CASES)
def test_padding_does_not_change_the_gradient(name: str, tiny_policy: Path) -> None:
    objective, model, examples = case(name, tiny_policy)
    together = gradient(objective, model, examples)
    first, second = (gradient(objective, model, [example]) for example in examples)
    for whole, one, other in zip(together, first, second, strict=True):
        torch.testing.assert_close(whole, one + other, rtol=0, atol=1e-5)
