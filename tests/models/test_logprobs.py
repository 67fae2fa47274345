"""Token log-probs and entropies against an explicit loop in float64."""

import gc
import math
import shutil
import weakref
from importlib.util import find_spec
from threading import Thread
from typing import Any

import pytest
import torch

from espalier.models import token_scores
from espalier.models.load import load_policy
from espalier.models.logprobs import plain_head, response_logprobs
from espalier.models.token_scores import chunked_scores
from tests.support.pass_logprobs import token_logprobs


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
@pytest.mark.parametrize("max_scores", [1, 33, 10**6])  # one token at a time, three, all
def test_chunks_and_temperature_agree_with_the_loop(max_scores: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 6, 8, generator=generator)
    weight = torch.randn(11, 8, generator=generator)
    ids = torch.randint(0, 11, (2, 6), generator=generator)
    want_logprobs, want_entropies = loop((hidden @ weight.T).double(), ids, temperature)
    read, targets = hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    scores = chunked_scores(read, weight, targets, temperature=temperature, max_scores=max_scores)
    assert scores.logprobs.dtype == torch.float32
    torch.testing.assert_close(scores.logprobs.double(), want_logprobs.flatten(), rtol=0, atol=1e-5)
    torch.testing.assert_close(scores.entropies.double(), want_entropies.flatten(), rtol=0, atol=1e-5)
    assert scores.is_likeliest.tolist() == ((read @ weight.T).argmax(-1) == targets).float().tolist()
    logprobs, entropies = token_logprobs(hidden @ weight.T, ids, temperature)
    torch.testing.assert_close(logprobs.flatten(), scores.logprobs)
    torch.testing.assert_close(entropies.flatten(), scores.entropies)


@pytest.mark.parametrize("max_scores", [1, 33, 10**6])
def test_gradients_of_chunks_are_those_of_autograd_in_float64(max_scores: int) -> None:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 11, (10,), generator=generator)
    shapes = ((10, 8), (11, 8), (11,))
    exact = [torch.randn(*shape, generator=generator).double().requires_grad_() for shape in shapes]
    single = [tensor.detach().float().requires_grad_() for tensor in exact]
    factors = torch.randn(2, 10, generator=generator)
    logs = torch.log_softmax((exact[0] @ exact[1].T + exact[2]) / 0.7, -1)
    entropies = -(logs.exp() * logs).sum(-1)
    (factors[0] * logs[range(10), targets] + factors[1] * entropies).sum().backward()
    scores = chunked_scores(*single[:2], targets, bias=single[2], temperature=0.7, max_scores=max_scores)
    (factors[0] * scores.logprobs + factors[1] * scores.entropies).sum().backward()
    for mine, want in zip(single, exact, strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.double(), want.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("max_scores", "tokens"), [(640, 10), (0, 20)])
def test_no_more_scores_stand_at_a_time_than_asked_and_by_default_not_of_too_few_tokens(
    max_scores: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(token_scores.MAX_SCORES, "cpu", 640)
    monkeypatch.setattr(token_scores, "LEAST_TOKENS", 20)
    monkeypatch.setattr(token_scores, "missing", lambda *_: 0)
    sizes: list[int] = []
    plain = token_scores.linear

    def counted(*arguments: Any) -> torch.Tensor:
        found: torch.Tensor = plain(*arguments)
        sizes.append(found.numel())
        return found

    monkeypatch.setattr(token_scores, "linear", counted)
    hidden, weight = torch.randn(60, 8, requires_grad=True), torch.randn(64, 8)
    targets = torch.zeros(60, dtype=torch.long)
    chunked_scores(hidden, weight, targets, max_scores=max_scores).logprobs.sum().backward()
    assert sizes == [64 * tokens] * (60 // tokens) * 2  # so many tokens at a time, forward and again backward


@pytest.mark.slow  # half a minute of compiling
@pytest.mark.skipif(find_spec("triton") is None or not any(map(shutil.which, ("g++", "clang++"))), reason="no compiler")
def test_what_gpus_run_fused_is_what_cpus_run_in_parts() -> None:
    for rows, vocabulary in ((6, 300), (9, 300), (1, 1000)):
        logits, targets = 5 * torch.randn(rows, vocabulary), torch.randint(vocabulary, (rows,))
        fused = token_scores._by_one_kernel(token_scores._read_rows)(logits, targets, 0.7)
        plain = token_scores._read_rows(logits, targets, 0.7)
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)
        given = plain[3], plain[4], torch.randn(rows)
        for more in ((), (torch.randn(rows), plain[1])):
            half = logits.to(torch.bfloat16)
            fused = token_scores._by_one_kernel(token_scores._rounded)(half, 0.7, *given, *more)
            torch.testing.assert_close(fused, token_scores._rounded(half, 0.7, *given, *more), rtol=0.01, atol=1e-5)


def test_many_shapes_stay_fused_in_the_threads_of_backward_passes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function: function)
    limits: list[int] = []

    def kernel(logits: torch.Tensor) -> torch.Tensor:
        limits.append(torch._dynamo.config.recompile_limit)
        return logits

    run = token_scores._by_one_kernel(kernel)
    thread = Thread(target=run, args=(torch.zeros(1),))
    thread.start()
    thread.join()
    run(torch.zeros(1))
    assert limits == [64, 64]


def test_parts_that_caches_hold_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    given = torch.randn(7, 5), torch.randn(50, 5)
    found = []
    for size in (2**17, 120, 1):  # all rows, two, one
        monkeypatch.setitem(token_scores.PART, "cpu", size)
        hidden, weight = (one.clone().requires_grad_() for one in given)
        scores = chunked_scores(hidden, weight, torch.arange(7), temperature=0.7)
        (scores.logprobs.sum() + scores.entropies.sum()).backward()
        found.append((scores.logprobs.detach(), scores.entropies.detach(), hidden.grad, weight.grad))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_a_gradient_asked_twice_is_the_same_twice() -> None:
    hidden, weight = torch.randn(7, 5, requires_grad=True), torch.randn(50, 5, requires_grad=True)
    for max_scores in (0, 100):  # logits kept, and computed again
        loss = chunked_scores(hidden, weight, torch.arange(7), max_scores=max_scores).logprobs.sum()
        first, second = (torch.autograd.grad(loss, (hidden, weight), retain_graph=True) for _ in range(2))
        torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_nothing_can_be_differentiated_twice() -> None:
    hidden, weight = torch.randn(7, 5, requires_grad=True), torch.randn(50, 5)
    loss = chunked_scores(hidden, weight, torch.arange(7)).logprobs.square().sum()
    (first,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_scores_are_float32_and_the_likeliest_is_found_at_any_temperature_whatever_autocast_says() -> None:
    hidden, weight = torch.randn(64, 16).to(torch.bfloat16), torch.randn(300, 16).to(torch.bfloat16)
    targets = (hidden @ weight.T).argmax(-1)
    plain = chunked_scores(hidden, weight, targets, temperature=0.7)
    with torch.autocast("cpu", torch.bfloat16):
        cast = chunked_scores(hidden, weight, targets, temperature=0.7)
    torch.testing.assert_close(cast.entropies, plain.entropies, rtol=0, atol=1e-5)
    torch.testing.assert_close(cast.logprobs, plain.logprobs, rtol=0, atol=1e-5)
    assert plain.is_likeliest.all()
    assert (plain.logprobs <= 0).all()


def test_gradients_do_not_depend_on_autocast_around_the_backward_pass() -> None:
    found = []
    for is_cast in (False, True):
        hidden, weight = torch.linspace(-4, 4, 70).view(7, 10), torch.linspace(-3, 3, 500).view(50, 10)
        hidden.requires_grad_()
        loss = chunked_scores(hidden, weight, torch.arange(7), max_scores=100).logprobs.sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            loss.backward()
        found.append(hidden.grad)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_of_large_logits_the_gradient_sums_to_nothing() -> None:
    bias = torch.zeros(2, requires_grad=True)
    weight = torch.tensor([[1000.0], [989.5]])
    chunked_scores(torch.ones(1, 1), weight, torch.tensor([0]), bias=bias).logprobs.sum().backward()
    assert bias.grad is not None
    share = math.exp(-10.5) / (1 + math.exp(-10.5))  # of the other token
    torch.testing.assert_close(bias.grad, torch.tensor([share, -share]), rtol=1e-3, atol=0)


def test_a_graph_that_is_never_walked_back_is_let_go() -> None:
    hidden = torch.randn(7, 5, requires_grad=True)
    read = hidden * 2
    seen = weakref.ref(read)
    chunked_scores(read, torch.randn(50, 5), torch.arange(7))
    del read
    gc.collect()
    assert seen() is None


def test_a_network_that_changes_its_logits_behind_the_head_goes_the_long_way(tiny_policy: Any) -> None:
    model = load_policy(str(tiny_policy))
    assert plain_head(model) is model.lm_head
    model.config.final_logit_softcapping = 30.0
    assert plain_head(model) is None


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
