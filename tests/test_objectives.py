"""Each objective by hand on two tiny examples, and on the tiny model for a few steps."""

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data.examples import PairExample, StepExample, TokenExample
from models.load import load_policy, load_reference
from models.scalar_head import load_process_reward
from training.objectives.dpo import DirectPreference, dpo_losses
from training.objectives.objective import Objective
from training.objectives.process_reward import ProcessReward
from training.objectives.sft import SupervisedFineTuning

torch.set_num_threads(1)  # with tiny matrices two threads mostly wait for each other

PAD = 0
DEMONSTRATIONS = [TokenExample("a", [5, 6, 7, 8], 2), TokenExample("b", [9, 4, 3], 1)]
PAIRS = [PairExample("p", [5, 6], [7, 8, 1], [9]), PairExample("q", [4], [3, 2], [8, 8])]
STEPS = [StepExample("a", [5, 6, 7, 8], [1, 3], [1.0, 0.25]), StepExample("b", [9, 4], [1], [0.5])]


class Fixed:
    """A model whose logits [B, T, L] are given."""

    def __init__(self, logits: torch.Tensor):
        self.logits = logits

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.logits[: input_ids.shape[0], : input_ids.shape[1]])

    def to(self, device: torch.device) -> "Fixed":
        return self


def random_logits(rows: int, length: int, labels: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, length, labels, generator=torch.Generator().manual_seed(seed))


def summed_logprob(logits: torch.Tensor, ids: list[int], start: int) -> float:
    """The log-prob of ids[start:], one token at a time, in float64."""
    total = 0.0
    for t in range(start, len(ids)):
        row = [math.exp(value) for value in logits[t - 1].double().tolist()]
        total += math.log(row[ids[t]] / sum(row))
    return total


def test_sft_is_the_summed_cross_entropy_of_response_tokens() -> None:
    logits = random_logits(2, 4, 10)
    objective = SupervisedFineTuning()
    batch = objective.collate(DEMONSTRATIONS, PAD)
    want = -summed_logprob(logits[0], [5, 6, 7, 8], 2) - summed_logprob(logits[1], [9, 4, 3], 1)
    loss = objective.loss(Fixed(logits), batch)
    assert objective.count(batch) == 4.0  # 7, 8 and 4, 3
    assert float(loss.total) == pytest.approx(want, abs=1e-5)
    assert loss.metrics["entropy"][1] == 4.0


def test_sft_of_uniform_logits_is_log_of_the_vocabulary_a_token() -> None:
    objective = SupervisedFineTuning()
    batch = objective.collate(DEMONSTRATIONS, PAD)
    loss = objective.loss(Fixed(torch.zeros(2, 4, 10)), batch)
    assert float(loss.total) == pytest.approx(4 * math.log(10), abs=1e-5)
    assert loss.metrics["entropy"] == (pytest.approx(4 * math.log(10), abs=1e-5), 4.0)


def test_dpo_is_minus_log_sigmoid_of_beta_times_the_difference() -> None:
    policy = (torch.tensor([-2.0, -5.0]), torch.tensor([-4.0, -1.0]))
    reference = (torch.tensor([-3.0, -4.0]), torch.tensor([-3.0, -2.0]))
    losses, chosen, rejected = dpo_losses(*policy, *reference, beta=0.5)
    # Pair 1: 0.5 * (1 + 1) = 1; pair 2: 0.5 * (-1 - 1) = -1.
    want = [math.log(1 + math.exp(-1)), math.log(1 + math.exp(1))]
    torch.testing.assert_close(losses, torch.tensor(want))
    torch.testing.assert_close(chosen, torch.tensor([0.5, -0.5]))
    torch.testing.assert_close(rejected, torch.tensor([-0.5, 0.5]))


@pytest.mark.parametrize("sft_weight", [0.0, 0.3])
def test_dpo_of_pairs_agrees_with_the_formula(sft_weight: float) -> None:
    policy, reference = random_logits(4, 5, 10), random_logits(4, 5, 10, seed=1)
    objective = DirectPreference(Fixed(reference), beta=0.2, sft_weight=sft_weight)
    batch = objective.collate(PAIRS, PAD)
    rows = [([5, 6, 7, 8, 1], 2), ([5, 6, 9], 2), ([4, 3, 2], 1), ([4, 8, 8], 1)]
    pi = [summed_logprob(policy[i], *row) for i, row in enumerate(rows)]
    ref = [summed_logprob(reference[i], *row) for i, row in enumerate(rows)]
    margins = [0.2 * ((pi[i] - ref[i]) - (pi[i + 1] - ref[i + 1])) for i in (0, 2)]
    want = sum(math.log(1 + math.exp(-margin)) for margin in margins) - sft_weight * (pi[0] / 3 + pi[2] / 2)
    loss = objective.loss(Fixed(policy), batch)
    assert objective.count(batch) == 2.0
    assert float(loss.total) == pytest.approx(want, abs=1e-5)
    assert loss.metrics["margin"] == (pytest.approx(sum(margins), abs=1e-5), 2.0)
    assert loss.metrics["accuracy"] == (sum(margin > 0 for margin in margins), 2.0)
    assert loss.metrics["chosen_logprob"] == (pytest.approx(pi[0] + pi[2], abs=1e-4), 2.0)


@pytest.mark.parametrize("is_training", [False, True])
def test_dpo_margins_are_exactly_zero_before_the_first_step(is_training: bool, tiny_policy: Path) -> None:
    model = load_policy(str(tiny_policy)).train(is_training)
    objective = DirectPreference(load_reference(str(tiny_policy)), beta=0.1)
    loss = objective.loss(model, objective.collate(PAIRS, PAD))
    assert loss.metrics["margin"] == (0.0, 2.0)
    assert float(loss.total.detach()) == pytest.approx(2 * math.log(2), abs=1e-6)
    assert loss.total.requires_grad


def test_soft_labels_are_binary_cross_entropy_with_the_value() -> None:
    # Scores 3/4, 1/5 and 1/2 against the values 1, 1/4 and 1/2.
    logits = torch.full((2, 4, 1), 9.0)
    logits[0, 1], logits[0, 3], logits[1, 1] = math.log(3), -math.log(4), 0.0
    objective = ProcessReward()
    batch = objective.collate(STEPS, PAD)
    loss = objective.loss(Fixed(logits), batch)
    want = -math.log(3 / 4) - (0.25 * math.log(1 / 5) + 0.75 * math.log(4 / 5)) + math.log(2)
    assert objective.count(batch) == 3.0
    assert float(loss.total) == pytest.approx(want, abs=1e-6)
    assert loss.metrics["value_mae"] == (pytest.approx(0.25 + 0.05 + 0.0, abs=1e-6), 3.0)
    assert loss.metrics["accuracy"] == (3.0, 3.0)


def test_classes_are_cross_entropy_with_the_number_of_right_completions() -> None:
    # K = 4: the values 1, 1/4 and 1/2 are the classes 4, 1 and 2.
    logits = random_logits(2, 4, 5)
    objective = ProcessReward()
    loss = objective.loss(Fixed(logits), objective.collate(STEPS, PAD))
    want = 0.0
    for row, position, label in ((0, 1, 4), (0, 3, 1), (1, 1, 2)):
        scores = [math.exp(value) for value in logits[row, position].double().tolist()]
        want -= math.log(scores[label] / sum(scores))
    assert float(loss.total) == pytest.approx(want, abs=1e-5)


def test_what_is_not_a_step_end_carries_no_process_reward() -> None:
    logits = torch.zeros(2, 4, 1, requires_grad=True)
    objective = ProcessReward()
    objective.loss(Fixed(logits), objective.collate(STEPS, PAD)).total.backward()
    assert logits.grad is not None
    where = logits.grad.squeeze(-1).nonzero().tolist()
    assert where == [[0, 1], [0, 3]]  # the third value is 1/2, where the gradient at a score of 1/2 is 0


OBJECTIVES = ["sft", "dpo", "soft labels", "classes"]


def case(name: str, policy: Path) -> tuple[Objective, Any, list[Any]]:
    """(objective, fresh model, two examples)."""
    path = str(policy)
    if name == "sft":
        return SupervisedFineTuning(), load_policy(path), DEMONSTRATIONS
    if name == "dpo":
        return DirectPreference(load_reference(path), beta=0.5), load_policy(path), PAIRS
    return ProcessReward(), load_process_reward(path, 1 if name == "soft labels" else 5), STEPS


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_loss_falls_within_a_few_steps(name: str, tiny_policy: Path) -> None:
    objective, model, examples = case(name, tiny_policy)
    batch = objective.collate(examples, PAD)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss = objective.loss(model, batch)
        losses.append(float(loss.total.detach()))
        loss.total.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.9 * losses[0], losses


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_loss_is_a_sum_and_its_count_adds_up(name: str, tiny_policy: Path) -> None:
    objective, model, examples = case(name, tiny_policy)
    model = copy.deepcopy(model).eval()
    together = objective.collate(examples, PAD)
    apart = [objective.collate([example], PAD) for example in examples]
    with torch.no_grad():
        whole = objective.loss(model, together)
        parts = [objective.loss(model, batch) for batch in apart]
    assert float(whole.total) == pytest.approx(sum(float(part.total) for part in parts), abs=1e-5)
    assert objective.count(together) == sum(objective.count(batch) for batch in apart)
    for metric, (total, count) in whole.metrics.items():
        assert total == pytest.approx(sum(part.metrics[metric][0] for part in parts), abs=1e-4)
        assert count == sum(part.metrics[metric][1] for part in parts)
