"""Bytes of tensors that a step of training holds at most, on a CPU: counted, not guessed from the process.

Two parts. What lives when the step begins (weights, moments, buffers of an engine) are the storages of all tensors that
Python knows, each once, mapped files too. What the step adds is torch's own account of its allocator, as its profiler
keeps it: gradients, activations, and whatever an operation takes for itself and gives back. The process takes more
than their sum (its interpreter, pages that the C library keeps, kernels of oneDNN):
`benchmarks.processes.sides.peak_rss` says how much.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.processes.sides import status_bytes


@dataclass
class Peak:
    """Bytes: `before` a piece of work, and the most that tensors took `within` it beside those."""

    before: int = 0
    within: int = 0

    @property
    def bytes(self) -> int:
        """In all."""
        return self.before + self.within


def live_bytes() -> int:
    """Sum the storages of all tensors of this process, each once; a file that is mapped counts as what it is."""
    gc.collect()
    sizes: dict[int, int] = {}
    for found in gc.get_objects():
        if issubclass(type(found), FakeTensor):
            continue  # of torch's own caches: a shape without numbers
        if issubclass(type(found), torch.Tensor) and found.device.type == "cpu":
            for tensor in (found, found.grad if found.is_leaf else None):
                if tensor is not None and tensor.layout is torch.strided:
                    storage = tensor.untyped_storage()
                    sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


@contextmanager
def measured() -> Iterator[Peak]:
    """Measure what is done within; the figures are there afterwards."""
    peak = Peak(before=live_bytes())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        yield peak
    peak.within = max(0, *_running_totals(watched))


def _running_totals(watched: profile) -> list[int]:
    """Return the allocator's account after each of its moves, in their order; it begins with 0."""
    total, totals = 0, [0]
    events = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
    for event in sorted(events, key=lambda one: one.start_ns()):
        total += event.nbytes()
        totals.append(total)
    return totals


def reset_peak_rss() -> int:
    """Begin to note the most that this process takes; return what it takes now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def own_pages() -> int:
    """Return what this process takes now that is no file, in bytes."""
    return status_bytes("RssAnon")
