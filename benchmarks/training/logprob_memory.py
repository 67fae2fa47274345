"""Peak memory of the log-probs of a response, forward and backward, from hidden states and an output head.

What every method needs stands outside the count: hidden states, the head's weight, and a gradient for each of the
two. Counted are the bytes that torch's CPU allocator has out at once beyond them, in a fresh child process for each
vocabulary; the growth of the process's largest resident size is noted beside it (it also sees what kernels
take for themselves).
"""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler import profile

from benchmarks.processes.forked import ROOT
from espalier.models.token_scores import chunked_scores

VOCABULARIES = (1_000, 10_000, 50_000, 150_000)
TOKENS, HIDDEN = 8192, 256
LARGEST_FULL = 50_000  # all logits of the largest vocabulary would take 15 GiB


def product(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return log-probs as the product's objectives have them: `hidden` [1, T, H], `weight` [V, H], `ids` [1, T]."""
    return chunked_scores(hidden[0, :-1], weight, ids[0, 1:]).logprobs


def full_logits(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return log-probs by all logits at once in float32."""
    logits = torch.nn.functional.linear(hidden, weight)
    return torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, ids[:, 1:, None]).squeeze(-1)


METHODS: dict[str, Callable[..., torch.Tensor]] = {"product": product, "full_logits": full_logits}


def allocator_peak(events: list[Any], start_bytes: int) -> int:
    """Return the most bytes out at once, from the allocator's events in order of time."""
    peak = now = start_bytes
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def measure(method: str, vocabulary: int, tokens: int = TOKENS, hidden_size: int = HIDDEN) -> dict[str, int]:
    """Return {"peak", "resident"} in bytes, of this process: call it in a fresh one."""
    torch.manual_seed(0)
    compute = METHODS[method]
    hidden = torch.randn(1, tokens, hidden_size, requires_grad=True)
    weight = (torch.randn(vocabulary, hidden_size) / hidden_size**0.5).requires_grad_()
    ids = torch.randint(vocabulary, (1, tokens))
    compute(hidden[:, :64], weight[:1000], ids[:, :64] % 1000).sum().backward()  # kernels loaded
    hidden.grad = weight.grad = None
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.autocast("cpu", torch.bfloat16, enabled=False), profile(profile_memory=True) as watched:
        compute(hidden, weight, ids).sum().backward()
    found = watched.kineto_results
    assert found is not None
    events = [event for event in found.events() if event.name() == "[memory]"]
    assert hidden.grad is not None
    assert weight.grad is not None
    needed = hidden.grad.nbytes + weight.grad.nbytes
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident) * 1024
    return {"peak": allocator_peak(events, 0) - needed, "resident": growth - needed}


def peaks(vocabularies: tuple[int, ...] = VOCABULARIES) -> dict[str, dict[int, dict[str, int]]]:
    """method → vocabulary → bytes, a child process for each."""
    sizes = {"product": vocabularies, "full_logits": tuple(size for size in vocabularies if size <= LARGEST_FULL)}
    return {method: {size: _in_child(method, size) for size in sizes[method]} for method in METHODS}


def _in_child(method: str, vocabulary: int) -> dict[str, int]:
    command = [sys.executable, "-m", "benchmarks.training.logprob_memory", method, str(vocabulary)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=dict(os.environ), check=False)
    if done.returncode:
        raise SystemExit(f"measuring {method} at vocabulary {vocabulary} failed: {done.stderr.strip()[-400:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
