"""Log-probs over a vocabulary of 151,936 from hidden states, forward and backward: chunked (`models.token_scores`),
beside full logits, and liger-kernel's fused cross-entropy where it is installed.

Each in bf16 with float32 sums; loss and gradients of each are compared with those of full float32 logits of a few
tokens.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch
from torch.nn.functional import cross_entropy, linear

from benchmarks.gpu.rows import Row
from espalier.models.token_scores import chunked_scores


@dataclass(frozen=True)
class Size:
    """`tokens` whose log-probs are read."""

    tokens: int
    hidden: int
    vocabulary: int
    max_scores: int = 0


REAL, SMALL = Size(8192, 2048, 151_936), Size(96, 32, 1_519, 32 * 1_519)
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def ways(size: Size, is_gpu: bool) -> dict[str, Loss | str]:
    """Return summed negative log-probs by the names of what computes them, or why one cannot."""

    def chunked(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return -chunked_scores(hidden, weight, targets, max_scores=size.max_scores).logprobs.sum()

    def full(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(linear(hidden, weight).float(), targets, reduction="sum")

    found: dict[str, Loss | str] = {"chunked": chunked, "full logits": full}
    if not is_gpu or not find_spec("liger_kernel"):
        return found | {"liger-kernel": "no GPU" if not is_gpu else "liger-kernel is not installed"}
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # type: ignore[import-not-found]

    loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")
    return found | {"liger-kernel": lambda hidden, weight, targets: loss(weight, hidden, targets)}


def measure(is_rehearsal: bool, folder: Path) -> list[Row]:
    """Compare all ways. Raises SystemExit where a loss is wrong."""
    size, is_gpu = (SMALL, False) if is_rehearsal else (REAL, True)
    device = torch.device("cuda" if is_gpu else "cpu")
    draws = torch.Generator().manual_seed(0)
    hidden = torch.randn(size.tokens, size.hidden, generator=draws).to(device, torch.bfloat16)
    weight = (torch.randn(size.vocabulary, size.hidden, generator=draws) / size.hidden**0.5).to(device, torch.bfloat16)
    targets = torch.randint(0, size.vocabulary, (size.tokens,), generator=draws).to(device)
    few, rows = slice(0, 64), []

    def exact(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(linear(hidden, weight), targets, reduction="sum")

    rows.append(Row("chunked: error of scores at a temperature of 0.7", _error_of_scores(hidden[few], weight), "nats"))
    wanted = _differentiated(exact, hidden[few].float(), weight.float(), targets[few])
    for name, way in ways(size, is_gpu).items():
        if isinstance(way, str):
            rows.append(Row(name, None, note=way))
            continue
        found = _differentiated(way, hidden[few], weight, targets[few])
        errors = [float((one.float() - want).abs().max() / want.abs().max())
                  for one, want in zip(found, wanted, strict=True)]  # fmt: skip
        if max(errors) > 0.02:
            raise SystemExit(f"error: {name}: loss or gradients differ from those of float32 by {max(errors):.3f}")
        rows.append(Row(f"{name}: error of the loss", round(errors[0], 6), "of it"))
        rows.append(Row(f"{name}: error of the gradients", round(max(errors[1:]), 5), "of the largest value"))
        del found
        rows += _cost(name, way, hidden, weight, targets)
    return rows


def _error_of_scores(hidden: torch.Tensor, weight: torch.Tensor) -> float:
    """Return how far log-probs and entropies of the likeliest tokens are from float64's. Raises SystemExit where they,
    their gradients, in one chunk or several, or what is likeliest are wrong."""
    inputs = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    targets = linear(*inputs).argmax(-1)

    def loss(logprobs: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
        return logprobs.sum() + 0.3 * entropies.sum()

    def exact(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logs = torch.log_softmax(logits / 0.7, -1)
        return logs.gather(1, targets.unsqueeze(1)).squeeze(1), -(logs.exp() * logs).sum(-1)

    worst = 0.0
    slopes = torch.autograd.grad(loss(*exact(linear(*inputs))), inputs)
    for chunk in (0, 16 * len(weight)):
        own = [hidden.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()]
        found = chunked_scores(own[0], own[1], targets, temperature=0.7, max_scores=chunk)
        grads = torch.autograd.grad(loss(found.logprobs, found.entropies), own)
        size = chunk // len(weight) or len(hidden)  # logits rounded as ours are, by the same products
        logits = torch.cat([linear(part, weight) for part in hidden.split(size)]).double()
        wanted, likeliest = exact(logits), logits.gather(1, targets.unsqueeze(1)).squeeze(1) == logits.amax(-1)
        errors = [float((one - want).abs().max()) for one, want in zip((found.logprobs, found.entropies), wanted,
                                                                        strict=True)]  # fmt: skip
        off = [float((one.double() - want).abs().max() / want.abs().max()) for one, want in zip(grads, slopes,
                                                                                             strict=True)]  # fmt: skip
        if max(errors) > 1e-3 or max(off) > 0.05 or not torch.equal(found.is_likeliest.bool(), likeliest):
            raise SystemExit(
                f"error: scores at a temperature of 0.7 are {max(errors):.2g} nats off, their gradients "
                f"{max(off):.3f}, {int(found.is_likeliest.sum())} of {len(targets)} are likeliest"
            )
        worst = max(worst, *errors)
    return round(worst, 7)


def _differentiated(
    way: Loss, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the loss, and its gradients with regard to hidden states and head."""
    inputs = (hidden.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_())
    loss = way(*inputs, targets)
    return (loss.detach(), *torch.autograd.grad(loss, inputs))


def _cost(name: str, way: Loss, *given: torch.Tensor) -> list[Row]:
    """Return milliseconds, and on a GPU the peak beside inputs."""
    hidden, weight, targets = given
    is_gpu, seconds, before = hidden.is_cuda, [], 0
    for _ in range(4 if is_gpu else 2):
        inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        if is_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        started = time.perf_counter()
        way(inputs[0], inputs[1], targets).backward()  # type: ignore[no-untyped-call]
        if is_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    rows = [Row(f"{name}: forward and backward", round(1000 * median(seconds), 3), "ms")]
    if is_gpu:
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        rows.append(Row(f"{name}: peak beside inputs", round(peak, 3), "GiB"))
    return rows
