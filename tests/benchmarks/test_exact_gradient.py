"""The policy gradient of a problem against automatic differentiation of its value by brute force over all responses."""

from pathlib import Path
from typing import Any

import torch

from benchmarks.credit.exact_gradient import WeightedLine, policy_gradient, weighted_lines, without_tail
from espalier.data.records import Problem
from espalier.data.steps import Decoder
from espalier.values.exact.state_values import ExactSettings
from tests.support.exact_cases import HoldsLetter, sharp_network, written_tokens


def value_by_brute_force(model: Any, tokenizer: Any, prompt: list[int], room: int) -> torch.Tensor:
    """The probability of a right response of at most `room` tokens, the last an end token: by plain passes."""
    decode, letters = Decoder(tokenizer), written_tokens(tokenizer)[1:]
    value = torch.zeros((), dtype=torch.float64)
    reached: dict[tuple[int, ...], torch.Tensor] = {(): torch.ones((), dtype=torch.float64)}
    for length in range(room):
        rows = torch.tensor([[*prompt, *ids] for ids in reached])
        probs = torch.softmax(model(input_ids=rows).logits[:, -1].double(), -1)
        following: dict[tuple[int, ...], torch.Tensor] = {}
        for (ids, mass), row in zip(reached.items(), probs, strict=True):
            if HoldsLetter.holds(decode(ids)):
                value = value + mass * row[1]
            if length + 1 < room:
                following |= {(*ids, token): mass * row[token] for token in letters}
        reached = following
    return value


def test_the_policy_gradient_is_that_of_brute_force_over_all_responses(tmp_path: Path) -> None:
    model, tokenizer = sharp_network(tmp_path / "model")
    problem = Problem("p", "Mia has 5", "")
    settings = ExactSettings(3, line_mass=1e-4, state_mass=0.0, max_width=100_000, merges=False)
    lines = weighted_lines(model, tokenizer, HoldsLetter(), problem, settings)
    assert any(len(line.prefix) > len(lines[0].prefix) for line in lines)  # of later states too
    found = policy_gradient(model, lines, pad_id=0, temperature=1.0)
    value = value_by_brute_force(model, tokenizer, tokenizer("Mia has 5").input_ids, 3)
    assert 0.02 < float(value.detach()) < 0.98
    truth = torch.cat([part.flatten() for part in torch.autograd.grad(value, list(model.parameters()))])
    assert float((found - truth).norm()) < 0.01 * float(truth.norm())


def test_lines_of_little_weight_are_left_out_from_the_end() -> None:
    lines = [WeightedLine((1,), (2,), weight) for weight in (0.5, -0.4, 0.08, 0.02)]
    assert without_tail(lines, 0.05) == lines[:3]
    assert without_tail(lines, 0.11) == lines[:2]
    assert without_tail([WeightedLine((1,), (2,), 0.0)]) == []


def test_the_gradient_of_no_lines_is_zero(tmp_path: Path) -> None:
    model, _ = sharp_network(tmp_path / "model")
    assert not policy_gradient(model, [], pad_id=0, temperature=1.0).any()
