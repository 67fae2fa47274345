"""Token log-probs and entropies against an explicit loop in float64."""

import math
from typing import Any

import pytest
import torch

from models.load import load_policy
from models.logprobs import response_logprobs, token_logprobs

torch.set_num_threads(1)  # with tiny matrices two threads mostly wait for each other


def loop(logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, one token at a time."""
    batch, length, _ = logits.shape
    logprobs = torch.zeros(batch, length - 1, dtype=torch.float64)
    entropies = torch.zeros(batch, length - 1, dtype=torch.float64)
    for row in range(batch):
        for t in range(1, length):
            scores = [math.exp(value / temperature) for value in logits[row, t - 1].tolist()]
            shares = [score / sum(scores) for score in scores]
            logprobs[row, t - 1] = math.log(shares[int(ids[row, t])])
            entropies[row, t - 1] = -sum(share * math.log(share) for share in shares)
    return logprobs, entropies


def test_the_logits_before_a_token_give_its_logprob() -> None:
    logits = torch.tensor([[[0.0, math.log(3.0)], [math.log(4.0), 0.0], [9.0, 9.0]]])
    logprobs, entropies = token_logprobs(logits, torch.tensor([[0, 1, 0]]))
    torch.testing.assert_close(logprobs, torch.tensor([[math.log(3 / 4), math.log(4 / 5)]]))
    first = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    second = -(0.8 * math.log(0.8) + 0.2 * math.log(0.2))
    torch.testing.assert_close(entropies, torch.tensor([[first, second]]))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 4096])
def test_chunks_and_temperature_agree_with_the_loop(chunk_tokens: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 6, 11, generator=generator) * 3
    ids = torch.randint(0, 11, (2, 6), generator=generator)
    want_logprobs, want_entropies = loop(logits.double(), ids, temperature)
    logprobs, entropies = token_logprobs(logits, ids, temperature, chunk_tokens)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), want_logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropies.double(), want_entropies, rtol=0, atol=1e-5)


def test_bfloat16_logits_are_summed_in_float32() -> None:
    logits = torch.zeros(1, 2, 1000, dtype=torch.bfloat16)
    logprobs, entropies = token_logprobs(logits, torch.tensor([[0, 7]]))
    assert float(logprobs) == pytest.approx(-math.log(1000), abs=1e-5)
    assert float(entropies) == pytest.approx(math.log(1000), abs=1e-4)


def test_gradients_flow_through_logprobs_and_not_through_entropies() -> None:
    logits = torch.zeros(1, 2, 2, requires_grad=True)
    logprobs, entropies = token_logprobs(logits, torch.tensor([[0, 1]]))
    assert not entropies.requires_grad
    logprobs.sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, torch.tensor([[[-0.5, 0.5], [0.0, 0.0]]]))


def test_padding_changes_no_logprob(tiny_policy: Any) -> None:
    model = load_policy(str(tiny_policy)).eval()
    ids = torch.tensor([[5, 9, 30, 31, 7]])
    padded = torch.tensor([[5, 9, 30, 31, 7, 0, 0, 0], [40, 41, 42, 43, 44, 45, 46, 47]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0], [1] * 8])
    with torch.no_grad():
        alone, _ = response_logprobs(model, ids, torch.ones_like(ids))
        together, _ = response_logprobs(model, padded, mask)
    torch.testing.assert_close(together[:1, :4], alone, rtol=0, atol=1e-5)
